"""A finished run at several budgets, and a search for the one to use."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adatape.config import Budget, Experiment, to_dict
from adatape.data.batch import Shard
from adatape.data.loaders import Labelled
from adatape.data.sets import open_set
from adatape.evaluate.budget import (
    COSTS,
    LENGTHS,
    Point,
    Target,
    apply_budget,
    budget_at,
    choose,
    floors,
    frontier,
    grid,
    milliseconds_per_image,
    point,
    range_of,
    refusal,
    scaled_budget,
    trained_budget,
)
from adatape.evaluate.device import pick_device
from adatape.evaluate.progress import SILENT, Progress, with_progress
from adatape.evaluate.reading import Reads, collect
from adatape.evaluate.result import FIGURE_NAMES, Result, main_figure
from adatape.models.base import Adaptive
from adatape.train.evaluate import test_batches
from adatape.train.folder import load_config, load_finished, load_run, with_budget, write
from adatape.train.lock import write_lock

LARGE_BATCH = 64
SINGLES = 8  # samples that are timed one by one
SEARCHED = 5000  # samples that a search looks at, at most
Batches = Callable[[], Iterator[Labelled]]
Times = list[dict[int, float]]  # for each budget, milliseconds per image by the size of a batch


class HeldOut(NamedTuple):
    """What a budget is chosen on, and what its figures are then reported on."""

    chosen_on: Batches
    reported_on: Batches
    said: str


class MeasuredBudgets(NamedTuple):
    """A run's model at several budgets, and what it answers at the one it was trained for."""

    experiment: Experiment
    model: Adaptive
    device: torch.device
    points: list[Point]
    usual: Reads
    left_out: dict[int, str]


@dataclass(frozen=True)
class FoundBudget(Result):
    """The budget that was chosen, and whether it was stored."""

    target: Target
    chosen_on: str
    budget: Budget
    reported: dict[str, Any]
    """figures on samples that it was not chosen on"""
    chosen: dict[str, Any]
    """figures on those that it was chosen on"""
    frontier: list[dict[str, Any]]
    settings: int
    """how many were tried"""
    run: Path
    config: Path | None = None
    """where it was stored; None if it was not"""

    def as_dict(self) -> dict[str, Any]:
        values = super().as_dict()
        reported = {name: value for name, value in values.pop("reported").items() if name not in values["budget"]}
        name = main_figure(self.chosen)
        return {**values, **reported, f"{name}_when_chosen": self.chosen[name]}


@dataclass(frozen=True)
class RemovedBudget(Result):
    """What a run did before its stored budget was removed, and does now."""

    run: Path
    budget: Budget | None
    """that was stored; None if there was none"""
    trained: Budget


def measure_budgets(
    folder: Path, budgets: Sequence[int], device: str = "auto", trust: bool = False, progress: Progress = SILENT
) -> MeasuredBudgets:
    """Accuracy, length, work and time at each number of steps; those that the model cannot have are left out."""
    experiment, model, place = _loaded(folder, device, trust)
    x = _first(test_batches(experiment, None, place), LARGE_BATCH)
    asked = [budget_at(model, steps, experiment.model.budget) for steps in sorted(set(budgets))]
    possible, left_out = _possible(model, asked, x)
    with _warned_once(model, possible):
        times = _times(model, possible, x, (1, x.shape[0]))
        points = _points(model, possible, times, lambda: test_batches(experiment, None, place), progress)
        usual = _seen(model, trained_budget(model), test_batches(experiment, None, place))
    return MeasuredBudgets(experiment, model, place, points, usual, left_out)


def find_budget(
    folder: Path, target: Target, device: str = "auto", trust: bool = False, progress: Progress = SILENT
) -> FoundBudget:
    """Finds the cheapest budget that meets a target on held-out data; nothing is written."""
    experiment, model, place = _loaded(folder, device, trust)
    held = _held_out(experiment, place, target)
    settings = _settings(model, held, target)
    times = _times(model, settings, _first(held.chosen_on(), SINGLES), (1,))
    points = _points(model, settings, times, lambda: _limited(held.chosen_on()), progress)
    chosen = choose(points, target)
    reported = point(chosen.budget, _seen(model, chosen.budget, held.reported_on()), chosen.milliseconds)
    edge = [budget_row(each) for each in frontier(points, COSTS[target.name])]
    rows = budget_row(reported), budget_row(chosen)
    return FoundBudget(target, held.said, chosen.budget, *rows, edge, len(points), folder)


def store_budget(
    folder: Path, target: Target, device: str = "auto", trust: bool = False, progress: Progress = SILENT
) -> FoundBudget:
    """Finds a budget and stores it in the run's config.json; nobody else writes there meanwhile."""
    load_finished(folder, trust)  # refuses what is no run before the lock leaves a file in it
    with write_lock(folder):
        found = find_budget(folder, target, device, trust, progress)
        return dataclasses.replace(found, config=_write_budget(folder, found.budget))


def reset_budget(folder: Path, trust: bool = False) -> RemovedBudget:
    """Removes the stored budget of a run, which then runs as trained."""
    experiment, model = load_run(folder, stored_budget=False, trust=trust)
    trained, stored = trained_budget(model), experiment.model.budget
    if stored is not None:
        with write_lock(folder):
            _write_budget(folder, None)
    return RemovedBudget(folder, stored, trained)


def _write_budget(folder: Path, budget: Budget | None) -> Path:
    config = folder / "config.json"
    write(config, to_dict(with_budget(load_config(config), budget)))
    return config


def _settings(model: Adaptive, held: HeldOut, target: Target) -> list[Budget]:
    """All settings of a search; a mean length is what a floor is set by, where the model has one."""
    if target.name == "steps":
        return _possible(model, [scaled_budget(model, int(target.limit))], _first(held.chosen_on(), 1))[0]
    length = target.limit if target.name == "length" else None
    found = floors(model, _limited(held.chosen_on()), LENGTHS if length is None else (length,))
    return found if found and length is not None else [*grid(model), *found]


def _points(
    model: Adaptive, budgets: Sequence[Budget], times: Times, batches: Batches, progress: Progress
) -> list[Point]:
    return [
        point(budget, _seen(model, budget, batches()), took)
        for budget, took in with_progress(zip(budgets, times, strict=True), "budgets", len(budgets), progress)
    ]


def _loaded(folder: Path, device: str, trust: bool) -> tuple[Experiment, Adaptive, torch.device]:
    place = torch.device(pick_device(device))
    experiment, model = load_run(folder, stored_budget=False, trust=trust)
    range_of(model)  # refuses a model without a budget
    return experiment, model.to(place).eval(), place


def _held_out(experiment: Experiment, place: torch.device, target: Target) -> HeldOut:
    valid, workers = open_set(experiment.data, "validation"), experiment.engine.workers
    test: Batches = lambda: test_batches(experiment, None, place)  # noqa: E731
    name = FIGURE_NAMES["mean_ap" if experiment.data.several_labels else "accuracy"]
    how = "given, not searched for; tried" if target.name == "steps" else "chosen"
    if valid.split == "validation":
        said = f"{how} on the validation set, {name} reported on the test set"
        return HeldOut(lambda: valid.evaluation_batches(valid.eval_batch, Shard(), place, workers), test, said)
    said = f"no validation split: {how} on every other test sample, {name} reported on the others"
    return HeldOut(lambda: _every_other(test(), 0), lambda: _every_other(test(), 1), said)


def _every_other(batches: Iterable[Labelled], first: int) -> Iterator[Labelled]:
    """Rows that stand at even places of the set, or at odd ones."""
    seen = 0
    for x, label in batches:
        start = (first + seen) % 2
        seen += label.shape[0]
        yield Labelled(x[start::2], label[start::2])


def _limited(batches: Iterable[Labelled]) -> Iterator[Labelled]:
    left = SEARCHED
    for x, label in batches:
        yield Labelled(x[:left], label[:left])
        left -= label.shape[0]
        if left <= 0:
            return


def _first(batches: Iterable[Labelled], count: int) -> Tensor:
    gathered: list[Tensor] = []
    for x, _ in batches:
        gathered.append(x)
        if sum(map(len, gathered)) >= count:
            break
    return torch.cat(gathered)[:count]


def _possible(model: Adaptive, asked: Sequence[Budget], x: Tensor) -> tuple[list[Budget], dict[int, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        reasons = {budget.steps: refusal(model, budget, x) for budget in asked}
    left_out = {steps: reason for steps, reason in reasons.items() if reason is not None}
    possible = [budget for budget in asked if budget.steps not in left_out]
    if not possible:
        raise ValueError(next(iter(left_out.values()), "budgets is empty; give numbers of steps with commas between"))
    return possible, left_out


@contextmanager
def _warned_once(model: Adaptive, budgets: Sequence[Budget]) -> Iterator[None]:
    """The furthest budget warns if it lies outside the trained range; the others then need not."""
    furthest = max(budgets, key=lambda budget: budget.steps)
    apply_budget(model, Budget(furthest.steps))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _seen(model: Adaptive, budget: Budget, batches: Iterable[Labelled]) -> Reads:
    apply_budget(model, budget)
    return collect(model, batches)


def _times(model: Adaptive, budgets: Sequence[Budget], x: Tensor, sizes: Sequence[int]) -> Times:
    columns = [milliseconds_per_image(model, budgets, x[: SINGLES if size == 1 else size], size) for size in sizes]
    return [dict(zip(sizes, row, strict=True)) for row in zip(*columns, strict=True)]


def budget_row(each: Point) -> dict[str, Any]:
    figures = {name: value for name, value in each._asdict().items() if name not in ("budget", "milliseconds")}
    figures = {name: value for name, value in figures.items() if value is not None}
    times = {f"ms_batch{size}": value for size, value in each.milliseconds.items()}
    return {**to_dict(each.budget), **figures, **times}
