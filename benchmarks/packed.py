"""Time of packed against padded execution, relative to the number of visible tokens; and of early exit.

    python benchmarks/packed.py results/packed.jsonl                                    on a GPU, ViT-B, batch 256
    python benchmarks/packed.py /tmp/packed.jsonl --model vit_tiny_patch16_224 --batch 4 --rounds 3        anywhere

Tape lengths are uniform from 0 to T, for T of 5, 50 and 90 % of the sequence; A-ViT's tokens are random and halt by
their scores. `law` is (time packed ÷ time padded) ÷ (tokens packed ÷ tokens padded). `padded` is the model's default;
`unmasked`, a stronger baseline, runs all rows without a mask; `waits` is A-ViT packed by a form that waits for the
number of running tokens before it launches what does not need it. Models that repeat blocks (UT, U2T, UViT, PonderNet)
halt after about half their steps and exit; `law` is (time ÷ time of all steps) ÷ (multiply-adds ÷ those of all steps).
All run in turn in one process; ratios are medians over rounds, of wall time, or on a CPU with one thread of processor
time, which does not depend on other programs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import timm
import torch
from record import add_rows, parser_of, settings_of
from torch import Tensor, nn

import adatape
from adatape.config import ReaderConfig
from adatape.evaluate.speed import interleaved, repeats_within, spread
from adatape.macs import total
from adatape.models import AViT, avit
from adatape.models.avit import tokens_per_layer
from adatape.packing import PendingPacking, launch_packing
from adatape.records import Tape

SHARES = {5: (224, 10), 50: (224, 196), 90: (64, 144)}  # per cent of tape: image size, tape tokens
EXITING = {"UT": "ut", "U2T": "u2t", "UViT": "uvit", "PonderNet": "ponder"}
HALTING = {"gamma": 2.0, "beta": -2.0}  # random tokens then halt at all layers
Sides = dict[str, Callable[[], Any]]


def tape_sides(arguments: argparse.Namespace, size: int, longest: int) -> tuple[Sides, float]:
    """All blocks on random tokens and tapes, and the fraction of padded rows that are visible."""
    vit = timm.create_model(arguments.model, img_size=size, class_token=False, global_pool="avg")
    reading = ReaderConfig(steps=longest, merge=1, threshold=longest / 2)
    wrapped = adatape.wrap(vit, "learn", bank_size=longest, reading=reading, gate=False, tape_ffn="none", layer=0)
    model = ready(wrapped, arguments)
    batch, inputs, width = arguments.batch, model.vit.patch_embed.num_patches, model.embed_dim
    tokens = torch.randn(batch, inputs, width, device=arguments.device)
    tape = random_tape(batch, longest, width, arguments.device)
    model.embed = lambda _: tokens
    model.reader.forward = lambda *_: tape
    rows = torch.cat([tokens, tape.tokens], 1)
    visible = (inputs + tape.length.float().mean().item()) / rows.shape[1]
    return sides_of(model, size, rows), visible


def random_tape(batch: int, longest: int, width: int, device: str) -> Tape:
    length = torch.randint(longest + 1, (batch,), device=device)
    mask = torch.arange(longest, device=device) < length[:, None]
    tokens = torch.randn(batch, longest, width, device=device) * mask[..., None]
    place = torch.arange(longest, device=device).expand(batch, -1)
    index = place.masked_fill(~mask, -1)[..., None]
    return Tape(tokens, mask, index, mask.float()[..., None], length, torch.zeros(batch, device=device))


def avit_sides(arguments: argparse.Namespace) -> tuple[Sides, float]:
    """All blocks on random tokens, and the mean fraction of tokens that run in a layer."""
    model = ready(AViT(timm.create_model(arguments.model), **HALTING), arguments)
    size, count = model.vit.patch_embed.img_size[0], model.vit.patch_embed.num_patches + 1
    tokens = torch.randn(arguments.batch, count, model.embed_dim, device=arguments.device)
    model.embed = lambda _: tokens
    with torch.no_grad(), context(arguments):
        steps = model(torch.zeros(arguments.batch, 3, size, size, device=arguments.device), output=True).steps
    sides = sides_of(model, size, tokens)

    def waits() -> Tensor:
        with mock.patch.object(avit, "launch_packing", launch_and_wait):
            return sides["packed"]()

    return sides | {"waits": waits}, tokens_per_layer(steps.weight).mean().item() / count


def launch_and_wait(keep: Tensor) -> PendingPacking:
    pending = launch_packing(keep)
    pending.sync()
    return pending


def exit_sides(arguments: argparse.Namespace, family: str) -> tuple[Sides, float]:
    """A model that exits after about half its steps, one that takes them all, and the ratio of their multiply-adds."""
    model, full = (ready(create_repeating(family, arguments.model), arguments) for _ in range(2))
    stage = getattr(model, "stage", model)
    torch.nn.init.zeros_(stage.halt.weight)
    torch.nn.init.constant_(stage.halt.bias, math.log(2 / max(2.01, model.steps - 2)))  # a score of about 2 / steps
    full.never_halt()
    images = torch.randn(arguments.batch, 3, *model.vit.patch_embed.img_size, device=arguments.device)
    taken: list[int] = []
    run_block = model.run_block

    def counted(*given: Any, **more: Any) -> Tensor:
        taken.append(1)
        return run_block(*given, **more)

    model.run_block = counted
    with torch.no_grad(), context(arguments):
        model(images)
    del model.run_block
    after = len(model.vit.blocks) if family == "uvit" else 0
    macs = total(model.parts(len(taken) - after)).macs / total(full.parts(full.steps)).macs
    return {"full": partial(full, images), "packed": partial(model, images)}, macs


def create_repeating(family: str, vit: str) -> Any:
    """The registered model of a family in the size of `vit`, or a tiny one of its shape where none is registered."""
    name = vit.replace("vit", family, 1)
    if timm.is_model(name):
        return timm.create_model(name)
    like = timm.create_model(vit)
    shape = {"embed_dim": like.embed_dim, "num_heads": like.blocks[0].attn.num_heads}
    return timm.create_model(f"{family}_tiny_patch16_224", patch_size=like.patch_embed.patch_size[0], **shape)


def sides_of(model: Any, size: int, rows: Tensor) -> Sides:
    """`embed` is replaced by precomputed tokens; images only provide the shape."""
    images = torch.zeros(len(rows), 3, size, size, device=rows.device)

    def run(packed: bool) -> Tensor:
        model.set_packed(packed)
        return model.forward_features(images)

    def unmasked() -> Tensor:
        x = rows
        for block in model.vit.blocks:
            x = block(x)
        return x

    return {"padded": partial(run, False), "packed": partial(run, True), "unmasked": unmasked}


def ready(model: nn.Module, arguments: argparse.Namespace) -> Any:
    model = model.to(arguments.device).eval()  # parameters keep requires_grad, so that autocast caches their casts
    if arguments.compile:
        for block in (*model.get_submodule("vit.blocks").children(), getattr(model, "block", None)):
            if block is not None:
                block.compile(dynamic=True)
    return model


def context(arguments: argparse.Namespace) -> Any:
    return torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.dtype == "bf16")


def clock_of(device: str) -> Callable[[], float]:
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def measure(sides: Sides, tokens: float, arguments: argparse.Namespace) -> dict[str, Any]:
    synchronize = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    with torch.no_grad(), context(arguments):
        for call in sides.values():
            for _ in range(arguments.warm_up):
                call()
        repeats = {name: repeats_within(call, arguments.seconds, synchronize) for name, call in sides.items()}
        took = interleaved(sides, arguments.rounds, repeats, synchronize, clock_of(arguments.device))
    found: dict[str, Any] = {"tokens": tokens, "clock": clock_of(arguments.device).__name__}
    for other in sides.keys() - {"packed"}:
        ratios = [mine / theirs for mine, theirs in zip(took["packed"], took[other], strict=True)]
        found[f"time_to_{other}"] = statistics.median(ratios)
        found[f"law_to_{other}"] = statistics.median(ratios) / tokens
    return found | {"seconds": {name: spread(values)._asdict() for name, values in took.items()}}


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bf16", "fp32"])
    parser.add_argument("--shares", type=int, nargs="*", choices=list(SHARES), default=list(SHARES), help="of tape, %%")
    parser.add_argument("--exits", nargs="*", choices=list(EXITING), default=list(EXITING), help="early exits timed")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one side in one round")
    parser.add_argument("--warm-up", type=int, default=3)
    arguments = parser.parse_args(given)
    arguments.dtype = arguments.dtype or ("bf16" if arguments.device == "cuda" else "fp32")
    settings = settings_of(arguments)
    cases = {f"tape, {share} %": partial(tape_sides, arguments, *SHARES[share]) for share in arguments.shares}
    cases["A-ViT"] = partial(avit_sides, arguments)
    cases |= {name: partial(exit_sides, arguments, EXITING[name]) for name in arguments.exits}
    for mode in arguments.modes:
        arguments.compile = mode == "compiled"
        for name, make in cases.items():
            torch.manual_seed(0)
            torch.compiler.reset()
            found = measure(*make(), arguments)
            row = {"case": f"{name}, {mode}", "mode": mode, **found, "settings": settings}
            add_rows(arguments.out, [row], arguments.device)
            laws = "  ".join(f"{key} {value:.3f}" for key, value in sorted(found.items()) if isinstance(value, float))
            print(f"{name:11} {mode:9} {laws}", flush=True)


if __name__ == "__main__":
    main()
