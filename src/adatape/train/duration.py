"""How long a run will take on a CPU: roughly before it starts, and by its first steps once it has."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from adatape.evaluate.cost import cost, total
from adatape.train.trainer import Trainer

BACKWARD = 2  # times the multiply-adds of a forward pass
WORTH_MEASURING = 1e14  # multiply-adds, minutes of the fastest CPU
LONG, NOTABLE = 3600.0, 120.0  # seconds from which a run is said to be long, or its duration is told
FIRST_STEPS, PATIENCE = 10, 20.0  # steps, or seconds and at least two steps, after which the duration is told
SHORTER = "a GPU (--device cuda), a smaller model, smaller images or fewer steps take less"
Say = Callable[[str], None]
Clock = Callable[[], float]


def training_macs(trainer: Trainer) -> float:
    """Multiply-adds of the steps that are left, with the longest tape; evaluation is not counted."""
    optimizer = trainer.experiment.optimizer
    samples = float(optimizer.batch * (optimizer.steps - trainer.step))
    return total(cost(trainer.model)).macs * (1 + BACKWARD) * samples


def macs_per_second(
    dtype: torch.dtype = torch.float32, seconds: float = 0.5, clock: Clock = time.perf_counter
) -> float:
    """What this CPU does at best: matrix products of the shapes of a small ViT, by the quickest of them."""
    rows, inner, columns = 1576, 384, 1536  # 8 images of 197 tokens through a feed-forward
    left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
    began, quickest = clock(), float("inf")
    while quickest == float("inf") or clock() - began < seconds:
        start = clock()
        left @ right
        quickest = min(quickest, clock() - start)
    return rows * inner * columns / max(quickest, 1e-9)


def warn_if_too_large(trainer: Trainer, say: Say, speed: Callable[[torch.dtype], float] = macs_per_second) -> None:
    """Says before a run starts that it is too large for a CPU, if even matrix products alone would take hours."""
    if trainer.device.type != "cpu" or trainer.shard.rank:
        return
    macs = training_macs(trainer)
    if macs < WORTH_MEASURING:
        return
    seconds = macs / speed(torch.bfloat16 if trainer.experiment.engine.precision == "bf16" else torch.float32)
    if seconds >= LONG:
        say(
            f"this run has {macs:.1e} multiply-adds, which take this CPU roughly {in_words(seconds)}; {SHORTER}. "
            "Ctrl-C stops it, and it can be resumed"
        )


class DurationTeller:
    """Tells once, by its first steps, how long a run on a CPU will take; short runs are not worth a line."""

    def __init__(self, say: Say, clock: Clock = time.monotonic) -> None:
        self.say, self.clock = say, clock
        self.first: tuple[int, float] | None = None
        self.told = False

    def on_step(self, step: int, steps: int) -> None:
        """The first step is not counted, since it starts threads and workers, and may compile."""
        if self.told:
            return
        now = self.clock()
        if self.first is None:
            self.first = step, now
            return
        done, took = step - self.first[0], now - self.first[1]
        if done < FIRST_STEPS and not (done >= 2 and took >= PATIENCE):
            return
        self.told = True
        left = took / done * (steps - step)
        if left >= NOTABLE:
            pace = f"at {took / done:.2g} s a step, the {steps - step:,} steps left"
            self.say(f"{pace} take about {in_words(left)}{f'; {SHORTER}' if left >= LONG else ''}")


def in_words(seconds: float) -> str:
    """A duration with two figures, in the unit that suits it."""
    for unit, size in (("years", 365 * 86400.0), ("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            rounded = float(f"{seconds / size:.2g}")
            return f"{rounded:,.0f} {unit}" if rounded == int(rounded) else f"{rounded} {unit}"
    return f"{seconds:.0f} seconds"
