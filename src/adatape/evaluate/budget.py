"""One trained model at many budgets: what it answers, spends and takes at each, and which of them to choose."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from adatape.config import Budget
from adatape.evaluate.accuracy import mean_precision, precision_by_class
from adatape.evaluate.reading import Reads
from adatape.evaluate.result import FIGURE_NAMES, main_figure
from adatape.evaluate.speed import seconds_per_call
from adatape.models.base import Adaptive, BudgetRange

FACTORS = (0.25, 0.5, 0.75, 1.0)  # of the trained threshold, beside the one that scales with steps
LEVELS = 12  # numbers of steps that a search tries
FEWEST, MOST = 5, 50  # rounds of timing
PATIENCE = 60.0  # seconds after which one round is enough


class Point(NamedTuple):
    """A budget and what it gives."""

    budget: Budget
    accuracy: float
    length_mean: float
    gflops_mean: float
    gflops_p50: float
    gflops_p95: float
    milliseconds: dict[int, float]  # per image, median, by the size of a batch
    mean_ap: float | None = None  # with several labels

    @property
    def quality(self) -> float:
        """What budgets are compared by: mean AP with several labels, else accuracy."""
        return self.accuracy if self.mean_ap is None else self.mean_ap


class Target(NamedTuple):
    """What must hold: milliseconds, GFLOPs or a mean length at most, an accuracy at least, or so many steps."""

    name: Literal["latency", "gflops", "length", "steps", "accuracy"]
    limit: float
    below_best: bool = False  # an accuracy that is counted down from the best one found


def range_of(model: Adaptive) -> BudgetRange:
    """The budgets that a model has; one without any says why."""
    found = model.budget_range()
    if found is None:
        model.set_budget()  # refuses
        raise TypeError(f"{type(model).__name__} takes a budget and names no range of them")
    return found


def apply_budget(model: Adaptive, budget: Budget) -> None:
    model.set_budget(budget.steps, budget.threshold)


def trained_budget(model: Adaptive) -> Budget:
    known = range_of(model)
    return Budget(known.most, known.threshold)


def scaled_budget(model: Adaptive, steps: int) -> Budget:
    """So many steps, and the threshold that goes with them."""
    return Budget(steps, model.threshold_at(steps) if steps > 0 else None)


def budget_at(model: Adaptive, steps: int, stored: Budget | None) -> Budget:
    """So many steps of a run; a floor that is stored with it holds at any number of them."""
    floor = stored_floor(model, stored) if steps > 0 else None
    return scaled_budget(model, steps) if floor is None else Budget(steps, floor)


def stored_floor(model: Adaptive, stored: Budget | None) -> float | None:
    return stored.threshold if stored is not None and model.stops_below_threshold else None


@torch.no_grad()
def refusal(model: Adaptive, budget: Budget, x: Tensor) -> str | None:
    """Why the model cannot have this budget on inputs like these, if it cannot."""
    try:
        apply_budget(model, budget)
        model.eval()(x[:1])
    except ValueError as error:
        return str(error)
    return None


def grid(model: Adaptive) -> list[Budget]:
    """Steps by thresholds, all within what the model was trained for; only reading adaptively has a threshold."""
    known = range_of(model)
    count = min(LEVELS, known.most - known.least + 1)
    levels = sorted({round(float(level)) for level in torch.linspace(known.least, known.most, count)})
    return [budget for steps in levels for budget in _at_steps(model, steps, known.threshold)]


LENGTHS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # mean lengths at which a search sets the floor


@torch.no_grad()
def floors(model: Adaptive, batches: Iterable[tuple[Tensor, Tensor]], lengths: Iterable[float]) -> list[Budget]:
    """For a model that stops below a threshold: those at which samples have these lengths on average."""
    if not model.stops_below_threshold:
        return []
    most = range_of(model).most
    apply_budget(model, Budget(most))
    model.eval()
    weights = torch.cat([model(x, output=True).tape.weight[..., 0].cpu() for x, _ in batches])
    ranked, samples = weights.flatten().sort(descending=True).values, weights.shape[0]
    counts = (int(length * samples) for length in lengths)
    return [Budget(most, float(ranked[count])) for count in counts if count < len(ranked) and ranked[count] > 0]


def _at_steps(model: Adaptive, steps: int, threshold: float | None) -> list[Budget]:
    scaled = scaled_budget(model, steps)
    if threshold is None or steps < 2:  # the first token is read whatever the threshold
        return [scaled]
    fixed = {Budget(steps, round(threshold * factor, 6)) for factor in FACTORS}
    return sorted({scaled, *fixed}, key=lambda budget: budget.threshold or 0.0)


def point(budget: Budget, reads: Reads, milliseconds: dict[int, float]) -> Point:
    gflops, mean_ap = reads.macs.double() / 1e9, None
    if reads.sets is not None and reads.logits is not None:
        names = [str(n) for n in range(reads.logits.shape[1])]
        mean_ap = mean_precision(precision_by_class(reads.logits, reads.sets[reads.label], names))
    return Point(
        budget,
        accuracy=float(reads.right.double().mean()),
        length_mean=float(reads.length.double().mean()),
        gflops_mean=float(gflops.mean()),
        gflops_p50=float(gflops.quantile(0.5)),
        gflops_p95=float(gflops.quantile(0.95)),
        milliseconds=milliseconds,
        mean_ap=mean_ap,
    )


@torch.no_grad()
def milliseconds_per_image(
    model: Adaptive, budgets: Sequence[Budget], x: Tensor, batch: int, seconds: float = 5.0
) -> list[float]:
    """The median over rounds in which every budget takes its turn on the same batches, after one unmeasured round.

    Budgets side by side see the same machine: what slows it for a while slows them all. Where a round takes a minute,
    one is measured.
    """
    pieces = [piece for piece in x.split(batch) if piece.shape[0] == batch]
    if not pieces:
        raise ValueError(f"batch is {batch}; there are {x.shape[0]} samples to time it on")
    model.eval()
    took: list[list[float]] = [[] for _ in budgets]
    began = time.perf_counter()
    for n in range(MOST + 1):
        took_so_far = time.perf_counter() - began
        if (n > FEWEST and took_so_far > seconds) or (n > 1 and took_so_far > max(seconds, PATIENCE)):
            break
        turns = list(zip(budgets, took, strict=True))
        for budget, row in turns if n % 2 else reversed(turns):
            apply_budget(model, budget)
            row.append(1e3 * _seconds(model, pieces) / (batch * len(pieces)))
    return [statistics.median(row[1:]) for row in took]


def _seconds(model: Adaptive, pieces: Sequence[Tensor]) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if pieces[0].is_cuda else lambda: None
    return seconds_per_call(lambda: [model(piece) for piece in pieces], 1, wait)


def target_of(
    latency: str | None = None,
    gflops: float | None = None,
    accuracy: str | None = None,
    length: float | None = None,
    steps: int | None = None,
) -> Target:
    given = {"latency": latency, "gflops": gflops, "accuracy": accuracy, "length": length, "steps": steps}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        have = " and ".join(named) or "none"
        raise ValueError(f"targets given: {have}; exactly one of {', '.join(given)} must be")
    if latency is not None:
        return Target("latency", _latency(latency))
    if accuracy is not None:
        return _accuracy(accuracy)
    if length is not None:
        return Target("length", float(length))
    return Target("steps", float(steps)) if steps is not None else Target("gflops", float(gflops or 0.0))


def _latency(text: str) -> float:
    """In milliseconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip())
    if not match:
        raise ValueError(f"latency is {text!r}; it must be a time per image, as in 12ms, 800us or 0.5s")
    return float(match[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[match[2]]


def _accuracy(text: str) -> Target:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|pt-of-best)", text.strip())
    if not match or float(match[1]) > 100:
        raise ValueError(f"accuracy is {text!r}; it must be as in 0.5pt-of-best or 97.5%")
    return Target("accuracy", float(match[1]) / 100, below_best=match[2] != "%")


def choose(points: Sequence[Point], target: Target) -> Point:
    """The most accurate budget within a limit of cost, or the cheapest that is accurate enough."""
    if target.name != "accuracy":
        spend = COSTS[target.name]
        within = [each for each in points if spend(each) <= target.limit]
        if not within:
            least = min(points, key=spend)
            raise ValueError(
                f"{target.name} is {target.limit:g}{UNITS[target.name]}; "
                f"the least possible is {spend(least):.4g}{UNITS[target.name]}, at steps {least.budget.steps}"
            )
        return max(within, key=lambda each: (each.quality, -each.gflops_mean, -spend(each)))
    best = max(each.quality for each in points)
    floor = best - target.limit if target.below_best else target.limit
    enough = [each for each in points if each.quality >= floor - 1e-9]
    if not enough:
        name = FIGURE_NAMES[main_figure(points[0]._asdict())]
        raise ValueError(f"{name} is {floor:.2%}; the greatest possible is {best:.2%}")
    return min(enough, key=lambda each: (each.gflops_mean, -each.quality))


COSTS: dict[str, Callable[[Point], float]] = {
    "latency": lambda each: each.milliseconds[1],
    "gflops": lambda each: each.gflops_mean,
    "length": lambda each: each.length_mean,
    "steps": lambda each: each.budget.steps,
    "accuracy": lambda each: each.gflops_mean,
}
UNITS = {"latency": " ms", "gflops": " GFLOPs", "length": "", "steps": ""}


def frontier(points: Sequence[Point], cost: Callable[[Point], float]) -> list[Point]:
    """Those that no cheaper one equals in accuracy (several labels: mean AP), cheapest first."""
    kept: list[Point] = []
    for each in sorted(points, key=lambda each: (cost(each), -each.quality)):
        if not kept or each.quality > kept[-1].quality:
            kept.append(each)
    return kept
