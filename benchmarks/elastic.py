"""Does a ragged batch cost what its tokens cost? Packed against padded, over the blocks that follow the tape.

    python benchmarks/elastic.py results/elastic.json                                   on a GPU, ViT-B, batch 256
    python benchmarks/elastic.py /tmp/elastic.json --model vit_tiny_patch16_224 --batch 4 --rounds 3       anywhere

Tapes are of any length from 0 to T, evenly, for T of 5, 50 and 90 % of the sequence; A-ViT's tokens halt by scores
that random tokens give them. `law` is (time packed ÷ time padded) ÷ (tokens packed ÷ tokens padded), which issue 5
wants at most 1.03. `padded` is what the model does where it is not packed; `unmasked` is harder to beat: all rows, and
attention to all of them, as if nothing were hidden. All run in turns in one process; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import adatape
from adatape.encoder import TapeBlocksFrom
from adatape.measure.speed import interleaved, repeats_within, spread
from adatape.models import AdaTape, AViT
from adatape.models.adaptive import no_visit
from adatape.models.avit import tokens_per_layer
from adatape.train.folder import environment

SHARES = {5: (224, 10), 50: (224, 196), 90: (64, 144)}  # per cent of tape: image size, tape tokens
HALTING = {"gamma": 2.0, "beta": -2.0}  # a token of a standard normal coordinate halts at any layer
Sides = dict[str, Callable[[], Any]]


def tape_model(arguments: argparse.Namespace, size: int, tape: int) -> AdaTape:
    blocks = {"block_fn": TapeBlocksFrom(1)} if arguments.tape_ffn == "append+blocks" else {}
    vit = timm.create_model(arguments.model, img_size=size, class_token=False, global_pool="avg", **blocks)
    reads = {"steps": tape, "merge": 1, "threshold": tape / 2, "noise": 0.0, "hide": 0.0}
    return adatape.wrap(vit, "learn", bank_size=tape, gate=False, tape_ffn=arguments.tape_ffn, **reads)


def tape_sides(arguments: argparse.Namespace, size: int, tape: int) -> tuple[Sides, float]:
    """Blocks 2 to L over random tokens, and how many of the padded rows are visible."""
    model = ready(tape_model(arguments, size, tape), arguments)
    rows = model.vit.patch_embed.num_patches + tape
    tokens = torch.randn(arguments.batch, rows, model.embed_dim, device=arguments.device)
    hidden = torch.randint(tape + 1, (arguments.batch, 1), device=arguments.device)
    visible = torch.arange(rows, device=arguments.device) < rows - hidden
    full = copy.copy(model)
    full._hides_nothing = lambda: True  # type: ignore[method-assign]
    sides: Sides = {
        "padded": lambda: model._padded(tokens, model._masks(visible), tape, None, no_visit),
        "packed": partial(model._packed, tokens, visible, tape, None, no_visit),
        "unmasked": lambda: full._padded(tokens, full._masks(visible), tape, None, no_visit),
    }
    return sides, visible.float().mean().item()


def avit_sides(arguments: argparse.Namespace) -> tuple[Sides, float]:
    """All blocks over random tokens, and how many of the tokens run in a layer, on average."""
    model = ready(AViT(timm.create_model(arguments.model), **HALTING), arguments)
    rows = model.vit.patch_embed.num_patches + 1
    tokens = torch.randn(arguments.batch, rows, model.embed_dim, device=arguments.device)

    def unmasked() -> Tensor:
        x = tokens
        for block in model.vit.blocks:
            x = block(x)
        return x

    with torch.no_grad(), context(arguments):
        left = tokens_per_layer(model._removing(tokens, no_visit).steps.weight)
    sides = {
        "padded": partial(model._masking, tokens, no_visit),
        "packed": partial(model._removing, tokens, no_visit),
        "unmasked": unmasked,
    }
    return sides, left.mean().item() / rows


def ready(model: nn.Module, arguments: argparse.Namespace) -> Any:
    model = model.to(arguments.device).eval()  # with gradients asked for, autocast casts a weight once and keeps it
    if arguments.compile:
        for block in model.vit.blocks:
            block.compile(dynamic=True)
    return model


def context(arguments: argparse.Namespace) -> Any:
    return torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.dtype == "bf16")


def measure(sides: Sides, tokens: float, arguments: argparse.Namespace) -> dict[str, Any]:
    synchronize = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    with torch.no_grad(), context(arguments):
        for call in sides.values():
            for _ in range(arguments.warm_up):
                call()
        repeats = {name: repeats_within(call, arguments.seconds, synchronize) for name, call in sides.items()}
        took = interleaved(sides, arguments.rounds, repeats, synchronize)
    found: dict[str, Any] = {"tokens": tokens}
    for other in ("padded", "unmasked"):
        ratios = [mine / theirs for mine, theirs in zip(took["packed"], took[other], strict=True)]
        found[f"time_to_{other}"] = statistics.median(ratios)
        found[f"law_to_{other}"] = statistics.median(ratios) / tokens
    return found | {"seconds": {name: spread(values)._asdict() for name, values in took.items()}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bf16", "fp32"])
    parser.add_argument("--tape-ffn", choices=["append", "append+blocks"], default="append")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one side in one round")
    parser.add_argument("--warm-up", type=int, default=3)
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("bf16" if arguments.device == "cuda" else "fp32")
    return arguments


def main() -> None:
    arguments, results = parse(), []
    said = {key: value for key, value in vars(arguments).items() if key != "out"}
    record = {"environment": environment(arguments.device), "arguments": said, "results": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    cases = {f"tape, {share} %": partial(tape_sides, arguments, *shape) for share, shape in SHARES.items()}
    cases["A-ViT"] = partial(avit_sides, arguments)
    for mode in arguments.modes:
        arguments.compile = mode == "compiled"
        for name, make in cases.items():
            torch.manual_seed(0)
            torch.compiler.reset()
            found = measure(*make(), arguments)
            results.append({"case": name, "mode": mode, **found})
            print(
                f"{name:11} {mode:9} tokens {found['tokens']:.3f}  time {found['time_to_padded']:.3f}  "
                f"law {found['law_to_padded']:.3f}  (to unmasked {found['law_to_unmasked']:.3f})",
                flush=True,
            )
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
