"""Runs that evidence.py left, by system and set: what its tables are made of."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PLAIN, OURS = "plain-", "adatape"
WORTH_SEEING = 8  # points below a model's best that its smaller budgets are shown down to
WORTH_SAVING = 0.9  # of a model's cost: a budget that saves less is no other budget


class Cell(NamedTuple):
    """A system on a set of images, over its seeds."""

    recipe: str
    name: str
    folders: list[Path]
    results: list[dict[str, Any]]

    def values(self, name: str) -> list[float]:
        return [float(result[name]) for result in self.results if result.get(name) is not None]

    def told(self, name: str) -> list[Any]:
        """What the runs that have such a file say in it."""
        return [json.loads(path.read_text()) for folder in self.folders if (path := folder / name).is_file()]

    def mean(self, name: str) -> float:
        found = self.values(name)
        return statistics.fmean(found) if found else math.nan

    def error(self, name: str) -> float:
        """Of the mean, over seeds."""
        found = self.values(name)
        return statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else math.nan

    @property
    def tape(self) -> str:
        """Mean length, and how much it varies between images."""
        spread = statistics.fmean(value**0.5 for value in self.values("length_var"))
        return f"{self.mean('length_mean'):.1f} ± {spread:.1f}"


def found_in(folder: Path) -> dict[str, Any]:
    """A run's result; of one that held images out its score on those, since nobody chooses by the test set."""
    result = json.loads((folder / "result.json").read_text())
    if json.loads((folder / "config.json").read_text())["data"].get("validate_on") is None:
        return result
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line.get("kind") == "validation"][-1]
    return result | {name: last[name] for name in ("accuracy", "length_mean", "length_var")}


def cells(out: Path) -> list[Cell]:
    """Every system of every set, dearest last."""
    found = []
    for place in sorted(path for path in out.glob("*/*") if path.is_dir()):
        folders = sorted(path.parent for path in place.glob("seed-*/result.json"))
        if folders:
            found.append(Cell(place.parent.name, place.name, folders, [found_in(folder) for folder in folders]))
    return sorted(found, key=lambda cell: (cell.recipe, cell.mean("gflops_mean"), cell.name))


def by_set(every: Sequence[Cell]) -> list[list[Cell]]:
    return [
        [cell for cell in every if cell.recipe == recipe] for recipe in dict.fromkeys(cell.recipe for cell in every)
    ]


def comparable(every: Sequence[Cell], runs: Callable[[Cell], int] = lambda cell: len(cell.results)) -> list[Cell]:
    """A single run has no error, so it is compared only where nobody on that set has more."""
    most = {group[0].recipe: max(map(runs, group)) for group in by_set(every)}
    return [cell for cell in every if runs(cell) >= min(2, most[cell.recipe])]


def with_budgets(every: Sequence[Cell]) -> list[Cell]:
    """And every smaller budget that a trained model was scored at, as a cell of its own: one model, many costs.

    Without those that save next to nothing, or are far below the model's best.
    """
    found = list(every)
    for cell in every:
        cost, best = cell.mean("gflops_mean"), cell.mean("accuracy")
        for smaller in at_budgets(cell):
            saves = smaller.mean("gflops_mean") < WORTH_SAVING * cost
            if saves and 100 * (best - smaller.mean("accuracy")) < WORTH_SEEING:
                found.append(smaller)
    return found


def at_budgets(cell: Cell, least: int = 1) -> list[Cell]:
    """A cell for each budget at which all runs were scored that were scored at any, and read so many tokens or more."""
    scored = [folder for folder in cell.folders if (folder / "budgets.json").is_file()]
    told = [{setting_of(row): row for row in rows} for rows in cell.told("budgets.json")]
    settings = [name for name in told[0] if all(name in each for each in told)] if told else []
    found = [
        cell._replace(name=f"{cell.name} at {name}", folders=scored, results=[each[name] for each in told])
        for name in settings
    ]
    return [each for each in found if each.mean("length_mean") >= least]


def setting_of(row: dict[str, Any]) -> str:
    if "haste" in row:
        return f"haste {row['haste']:g}"
    return f"{row['steps']} for all" if row.get("for_all") else str(row["steps"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), "|".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if n != 1 else f"|{line}|" for n, line in enumerate(lines))


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{spread}"
