"""Time of a model, reading included, for tapes of given mean lengths, beside the same model with full tapes.

    python benchmarks/by_length.py results/by_length.jsonl                                       on a GPU, B/16, T = 64
    python benchmarks/by_length.py results/by_length.jsonl --layouts padded packed graphs --compile
    python benchmarks/by_length.py results/by_length.jsonl --size small --batch 1 16             on a CPU

Lengths are normal with a deviation of a third of their mean, between 1 and T. `law` is (time ÷ time with full tapes) ÷
(tokens ÷ tokens with full tapes): 1 where time follows tokens. `default` is the model as it is built; `padded` masks
hidden rows, `packed` and `buckets` drop them; `graphs` replays, once a batch is read, the shortest of a few CUDA graphs
of padded blocks that holds its longest tape, beside full tapes replayed likewise. `--budgets` are full tapes of a
smaller budget than the model was built for. With `--compile`, blocks are compiled with dynamic shapes. All run in turn
in one process; ratios are medians over rounds, of wall time, or on a CPU with one thread of processor time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch
from packed import clock_of, context
from record import Row, add_rows, parser_of, settings_of
from torch import Tensor

from adatape.cuda_graphs import WARM_UP_CALLS, Tensors, cuda_graphed, raised_recompile_limit
from adatape.evaluate.speed import interleaved, repeats_within
from adatape.evaluate.timed_models import MODELS_COMPILED
from adatape.models.base import BlocksOutput, ignore_block
from adatape.models.execution import BlocksInput, run_padded
from adatape.packing import append_tape, truncate_tape
from adatape.ragged_attention import padding_mask

MERGE = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {"packed": None},
    "padded": {"packed": False},
    "packed": {},
    "buckets": {"buckets": 4},
}
GRAPHS = "graphs"
PARTS = 8  # graphs hold tapes of multiples of an eighth of T


def drawn_lengths(mean: int, batch: int, longest: int) -> Tensor:
    """(batch,), around `mean`; one sample has just that length."""
    if batch == 1:
        return torch.tensor([mean])
    around = mean + mean / 3 * torch.randn(batch, generator=torch.Generator().manual_seed(0))
    return around.round().long().clamp(1, longest)


def set_lengths(model: Any, lengths: Tensor, longest: int) -> None:
    """Makes every read end with the longest of `lengths`, then cuts each tape to its own.

    Equal bank tokens have equal weights, 1 / merge, so that the halting sum of all samples grows alike.
    """
    model.reader.threshold = longest / MERGE - 1e-3
    read = type(model.reader).forward
    model.reader.forward = lambda *given: truncate_tape(read(model.reader, *given), lengths)


class Parts:
    """A model cut in two, for batches that are read before it is known which graph of the blocks holds them."""

    def __init__(self, model: Any, capture: Callable[[Callable[..., Tensors]], Callable[..., Tensors]]) -> None:
        self.model, self.capture = model, capture
        self.read, self.blocks = capture(self._read), dict[int, Callable[..., Tensors]]()

    def __call__(self, images: Tensor) -> Tensor:
        tokens, tape, mask, longest = self.read(images)
        step = math.ceil(mask.shape[1] / PARTS)
        rows = step * math.ceil(int(longest) / step)  # waits for the device
        if rows not in self.blocks:
            self.blocks[rows] = self.capture(self._run_blocks)
        (logits,) = self.blocks[rows](tokens, tape[:, :rows], mask[:, :rows])
        return logits

    def _read(self, images: Tensor) -> Tensors:
        model = self.model
        tokens = model.run_plain_blocks(model.embed(images), None, model.join.layer, ignore_block)
        tape = model.reader(tokens[:, 0], model.bank.open(images, tokens, tokens[:, 0]), None)
        return tokens, tape.tokens, tape.mask, tape.length.max()

    def _run_blocks(self, tokens: Tensor, tape: Tensor, mask: Tensor) -> Tensors:
        model = self.model
        rows, visible = append_tape(tokens, model.append_mlp(tape), mask)
        masks = [padding_mask(visible)] * (len(model.vit.blocks) - model.join.layer)
        rows = run_padded(model._step, BlocksInput(rows, visible, tape.shape[1]), masks, ignore_block)
        result = BlocksOutput(rows, tokens.new_zeros(len(tokens)), visible)
        return (model.forward_head(model._final_norm(model._pooled_rows(result))),)


def build(how: Any, steps: int) -> Any:
    name = f"adatape_{how.size}_patch16_224"
    model = timm.create_model(name, bank="learn", bank_size=how.bank_size, steps=steps, threshold=1e6, merge=MERGE)
    with torch.no_grad():
        model.bank.tokens.copy_(model.bank.tokens[:1].expand_as(model.bank.tokens).clone())
    model = model.to(how.device).eval()
    if how.compile:
        for block in model.vit.blocks:
            block.compile(dynamic=True)
    return model


def measure(how: Any, batch: int) -> list[Row]:
    images = torch.randn(batch, 3, 224, 224, device=how.device)
    model, inputs = build(how, how.steps), (224 // 16) ** 2

    def run(lengths: Tensor, longest: int, layout: str) -> Tensor:
        set_lengths(model, lengths, longest)
        model.set_packed(**LAYOUTS[layout])
        return model(images)

    def graphed(lengths: Tensor, longest: int) -> Callable[[], Tensor]:
        parts = Parts(model, cuda_graphed)

        def replay() -> Tensor:
            set_lengths(model, lengths, longest)  # for the calls before the capture
            return parts(images)

        for _ in range(WARM_UP_CALLS + 1):
            replay()
        return replay

    def run_budget(steps: int) -> Tensor:
        vars(model.reader).pop("forward", None)
        model.set_packed(None)
        model.set_budget(steps)
        try:
            return model(images)
        finally:
            model.set_budget()

    def side(lengths: Tensor, layout: str) -> Callable[[], Tensor]:
        given = lengths.to(how.device), int(lengths.max())
        return graphed(*given) if layout == GRAPHS else partial(run, *given, layout)

    drawn = {mean: drawn_lengths(mean, batch, how.steps) for mean in how.lengths}
    full = torch.full((batch,), how.steps)
    synchronize = torch.cuda.synchronize if how.device == "cuda" else lambda: None
    with torch.no_grad(), context(how), raised_recompile_limit(MODELS_COMPILED):
        sides = {"full": side(full, "padded")} | (
            {f"full {GRAPHS}": side(full, GRAPHS)} if GRAPHS in how.layouts else {}
        )
        sides |= {f"{mean} {name}": side(drawn[mean], name) for mean in drawn for name in how.layouts}
        sides |= {f"budget {steps}": partial(run_budget, steps) for steps in how.budgets}
        for call in sides.values():
            call()
        repeats = {name: repeats_within(call, how.seconds, synchronize) for name, call in sides.items()}
        took = interleaved(sides, how.rounds, repeats, synchronize, clock_of(how.device))
    mode = "blocks compiled" if how.compile else "eager"
    timed = [(f"{mean} {name}", f"length {mean}, {name}", drawn[mean], name) for mean in drawn for name in how.layouts]
    timed += [(f"budget {n}", f"budget {n}", torch.full((batch,), n), "budget") for n in how.budgets]
    rows = []
    for name, told, lengths, layout in timed:
        mean = lengths.float().mean().item()
        tokens = (inputs + mean) / (inputs + how.steps)
        whole = took[f"full {GRAPHS}" if layout == GRAPHS else "full"]
        time = statistics.median(mine / theirs for mine, theirs in zip(took[name], whole, strict=True))
        case = f"{how.size}, {how.device}, {mode}, batch {batch}, {told}"
        found = {"tokens": tokens, "time": time, "law": time / tokens, "longest": int(lengths.max())}
        settled = {
            "batch": batch,
            "mean": int(told.split()[1].strip(",")),
            "layout": layout,
            "clock": clock_of(how.device).__name__,
        }
        rows.append({"case": case, **found, **settled, "settings": settings_of(how)})
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=["tiny", "small", "base"], default="base")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=64, help="T, the longest tape")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8, 16, 32, 48])
    parser.add_argument("--budgets", type=int, nargs="*", default=[4, 8, 16, 32, 48], help="steps below T")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, GRAPHS], default=list(LAYOUTS))
    parser.add_argument("--bank-size", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bf16", "fp32"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one side in one round")
    how = parser.parse_args(given)
    how.dtype = how.dtype or ("bf16" if how.device == "cuda" else "fp32")
    for batch in how.batch:
        rows = measure(how, batch)
        add_rows(how.out, rows, how.device)
        for row in rows:
            print(
                f"{row['case']:60} tokens {row['tokens']:.3f}  time {row['time']:.3f}  law {row['law']:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
