"""Budgets on the command line: one model at several of them, and a search for the one to use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from adatape.config import Budget, Experiment, to_dict
from adatape.data.batch import Part
from adatape.data.loaders import Labelled
from adatape.data.sets import open_set
from adatape.evaluate.budget import (
    COSTS,
    Point,
    Rows,
    Target,
    apply_budget,
    choose,
    frontier,
    grid,
    look,
    milliseconds_per_image,
    point,
    range_of,
    refusal,
    scaled_budget,
    target_of,
    trained_budget,
)
from adatape.models.adaptive import Adaptive
from adatape.report.pictures.elastic import draw_elastic, examples_of
from adatape.report.terminal import TABLE, pick_device
from adatape.train.evaluate import test_batches
from adatape.train.folder import environment, load_config, load_run, with_budget, write
from adatape.train.lock import writing

LARGE_BATCH = 64
SINGLES = 8  # samples that are timed one by one
SEARCHED = 5000  # samples that a search looks at, at most
Batches = Callable[[], Iterator[Labelled]]


class HeldOut(NamedTuple):
    """What a budget is chosen on, and what its accuracy is then reported on."""

    chosen_on: Batches
    reported_on: Batches
    said: str


def print_budgets(
    folder: Path, budgets: tuple[int, ...], device: str, out: Path | None = None, trust: bool = False
) -> dict[str, Any]:
    """Accuracy, length, work and measured time at each budget, as a table, a file and a picture."""
    experiment, model, place = _loaded(folder, device, trust)
    x = _first(test_batches(experiment, None, place), LARGE_BATCH)
    asked = [scaled_budget(model, steps) for steps in sorted(set(budgets))]
    possible, left_out = _possible(model, asked, x)
    with _warned_once(model, possible):
        times = _times(model, possible, x, (1, x.shape[0]))
        seen = [_seen(model, budget, test_batches(experiment, None, place)) for budget in possible]
        points = [point(*each) for each in zip(possible, seen, times, strict=True)]
        usual = _seen(model, trained_budget(model), test_batches(experiment, None, place))
    result = _as_dict(folder, device, model, points, usual, left_out)
    examples = examples_of(usual, test_batches(experiment, None, place))
    with writing(folder) if out is None else nullcontext():
        out = out or folder / "figures"
        out.mkdir(parents=True, exist_ok=True)
        write(out / "budgets.json", result)
        draw_elastic(out / "budgets.png", points, usual, examples, model.length_name)
    console = Console()
    console.print(_table(points, _notes(points, trained_budget(model))))
    for steps, reason in left_out.items():
        console.print(f"budget {steps} left out: {reason}", highlight=False, soft_wrap=True)
    console.print(f"picture: {out / 'budgets.png'}", highlight=False, soft_wrap=True)
    return result


def print_search(
    folder: Path, latency: str | None, gflops: float | None, accuracy: str | None, device: str, trust: bool = False
) -> dict[str, Any]:
    """The cheapest budget that meets a target on held-out data, stored in the run's config."""
    target, loaded = target_of(latency, gflops, accuracy), _loaded(folder, device, trust)
    with writing(folder):
        return _search(folder, target, *loaded)


def _search(
    folder: Path, target: Target, experiment: Experiment, model: Adaptive, place: torch.device
) -> dict[str, Any]:
    held = _held_out(experiment, place)
    x, settings = _first(held.chosen_on(), SINGLES), grid(model)
    times = _times(model, settings, x, (1,))
    points = [
        point(budget, _seen(model, budget, _limited(held.chosen_on())), time)
        for budget, time in zip(settings, times, strict=True)
    ]
    chosen = choose(points, target)
    reported = point(chosen.budget, _seen(model, chosen.budget, held.reported_on()), chosen.milliseconds)
    edge = frontier(points, COSTS[target.name])
    config = folder / "config.json"
    write(config, to_dict(with_budget(load_config(config), chosen.budget)))
    _print_choice(edge, chosen, reported, held.said, config)
    return {
        "target": target._asdict(),
        "chosen_on": held.said,
        "budget": to_dict(chosen.budget),
        **{name: value for name, value in _row(reported).items() if name not in ("steps", "threshold")},
        "accuracy_when_chosen": chosen.accuracy,
        "frontier": [_row(each) for each in edge],
        "settings": len(points),
    }


def _loaded(folder: Path, device: str, trust: bool) -> tuple[Experiment, Adaptive, torch.device]:
    place = torch.device(pick_device(device))
    experiment, model = load_run(folder, stored_budget=False, trust=trust)
    range_of(model)  # refuses a model without a budget
    return experiment, model.to(place).eval(), place


def _held_out(experiment: Experiment, place: torch.device) -> HeldOut:
    valid, workers = open_set(experiment.data, "validation"), experiment.engine.workers
    test: Batches = lambda: test_batches(experiment, None, place)  # noqa: E731
    if valid.split == "validation":
        said = "chosen on the validation set, accuracy reported on the test set"
        return HeldOut(lambda: valid.scored(valid.at_once, Part(), place, workers), test, said)
    said = "no validation split: chosen on every other test sample, accuracy reported on the others"
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


def _seen(model: Adaptive, budget: Budget, batches: Iterable[Labelled]) -> Rows:
    apply_budget(model, budget)
    return look(model, batches)


def _times(model: Adaptive, budgets: Sequence[Budget], x: Tensor, sizes: Sequence[int]) -> list[dict[int, float]]:
    """For each budget, milliseconds per image by the size of a batch."""
    columns = [milliseconds_per_image(model, budgets, x[: SINGLES if size == 1 else size], size) for size in sizes]
    return [dict(zip(sizes, row, strict=True)) for row in zip(*columns, strict=True)]


def _row(each: Point) -> dict[str, Any]:
    figures = {name: value for name, value in each._asdict().items() if name not in ("budget", "milliseconds")}
    times = {f"ms_batch{size}": value for size, value in each.milliseconds.items()}
    return {**to_dict(each.budget), **figures, **times}


def _as_dict(
    folder: Path, device: str, model: Adaptive, points: Sequence[Point], usual: Rows, left_out: dict[int, str]
) -> dict[str, Any]:
    trained = trained_budget(model)
    return {
        "run": str(folder),
        "environment": environment(pick_device(device)),
        "trained": to_dict(trained),
        "rows": [{**_row(each), "beyond_trained": each.budget.steps > trained.steps} for each in points],
        "lengths": torch.bincount(usual.length).tolist(),
        "lengths_wrong": torch.bincount(usual.length[~usual.right]).tolist(),
        "left_out": left_out,
    }


def _table(points: Sequence[Point], notes: dict[Budget, str]) -> Table:
    sizes = list(points[0].milliseconds)
    unit, scale = ("GFLOPs", 1) if max(each.gflops_mean for each in points) >= 0.1 else ("MFLOPs", 1000)
    times = ["ms alone" if size == 1 else f"ms of {size}" for size in sizes]
    table = Table(Column("budget", no_wrap=True), "halts at", "accuracy", "length", unit, "p50", "p95", *times, **TABLE)
    for each in points:
        budget, gflops = each.budget, (each.gflops_mean, each.gflops_p50, each.gflops_p95)
        table.add_row(
            f"{budget.steps} {notes.get(budget, '')}",
            "" if budget.threshold is None else f"{budget.threshold:.3g}",
            f"{each.accuracy:.2%}",
            f"{each.length_mean:.2f}",
            *(f"{value * scale:.3g}" for value in gflops),
            *(f"{each.milliseconds[size]:.3f}" for size in sizes),
        )
    return table


def _notes(points: Sequence[Point], trained: Budget) -> dict[Budget, str]:
    return {
        each.budget: "trained" if each.budget.steps == trained.steps else "beyond"
        for each in points
        if each.budget.steps >= trained.steps
    }


def _print_choice(edge: Sequence[Point], chosen: Point, reported: Point, said: str, config: Path) -> None:
    console = Console()
    console.print("frontier:", highlight=False)
    listed = list(edge) if chosen in edge else [*edge, chosen]
    console.print(_table(listed, {chosen.budget: "chosen"}))
    threshold = "" if chosen.budget.threshold is None else f", threshold {chosen.budget.threshold:.3g}"
    lines = (
        f"budget: steps {chosen.budget.steps}{threshold}; accuracy {reported.accuracy:.2%}, "
        f"{reported.gflops_mean:.4g} GFLOPs, {chosen.milliseconds[1]:.3f} ms for one image",
        said,
        f"stored in {config}",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
