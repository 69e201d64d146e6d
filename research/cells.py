"""Groups the rows of a study by system and image set, for its tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

from rows import Row

PLAIN, OURS = "plain-", "adatape"
WORTH_SEEING = 8  # smaller budgets are shown if they lose fewer points than this
WORTH_SAVING = 0.9  # and if they cost less than this fraction of the full budget


class Cell(NamedTuple):
    """A system on a set of images, over its seeds."""

    recipe: str
    name: str
    rows: list[Row]
    results: list[dict[str, Any]]

    def values(self, name: str) -> list[float]:
        return [float(result[name]) for result in self.results if result.get(name) is not None]

    def told(self, name: str) -> list[Any]:
        """The values of a key, for the rows that have it."""
        return [row[name] for row in self.rows if name in row]

    def mean(self, name: str) -> float:
        found = self.values(name)
        return statistics.fmean(found) if found else math.nan

    def error(self, name: str) -> float:
        """Standard error of the mean over seeds."""
        found = self.values(name)
        return statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else math.nan

    @property
    def tape(self) -> str:
        """Mean tape length ± its deviation between images."""
        spread = statistics.fmean(value**0.5 for value in self.values("length_var"))
        return f"{self.mean('length_mean'):.1f} ± {spread:.1f}"


def score_of(row: Row) -> dict[str, Any]:
    """A run's result; for a run with held-out images, the score on those, since choices must not use the test set."""
    return row["result"] | row.get("held_out", {})


def cells(rows: Sequence[Row]) -> list[Cell]:
    """All systems of all sets by increasing cost, from runs named RECIPE/SYSTEM/seed-N that have a result."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: str(row["run"])):
        if "result" in row:
            recipe, name, _ = row["run"].split("/")
            groups.setdefault((recipe, name), []).append(row)
    found = [Cell(*place, group, [score_of(row) for row in group]) for place, group in groups.items()]
    return sorted(found, key=lambda cell: (cell.recipe, cell.mean("gflops_mean"), cell.name))


def by_set(every: Sequence[Cell]) -> list[list[Cell]]:
    return [
        [cell for cell in every if cell.recipe == recipe] for recipe in dict.fromkeys(cell.recipe for cell in every)
    ]


def comparable(every: Sequence[Cell], runs: Callable[[Cell], int] = lambda cell: len(cell.results)) -> list[Cell]:
    """Cells with at least two runs; a single run, which has no error, only if no cell of that set has more."""
    most = {group[0].recipe: max(map(runs, group)) for group in by_set(every)}
    return [cell for cell in every if runs(cell) >= min(2, most[cell.recipe])]


def with_budgets(every: Sequence[Cell]) -> list[Cell]:
    """The cells and, as further cells, the smaller budgets at which their models were evaluated.

    Budgets that save little (WORTH_SAVING) or lose much (WORTH_SEEING) are left out.
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
    """A cell for each budget at which all evaluated runs have a score and that reads `least` tokens or more."""
    scored = [row for row in cell.rows if "budgets" in row]
    told = [{setting_of(row): row for row in rows} for rows in cell.told("budgets")]
    settings = [name for name in told[0] if all(name in each for each in told)] if told else []
    found = [
        cell._replace(name=f"{cell.name} at {name}", rows=scored, results=[each[name] for each in told])
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


def rounded(value: float, digits: int) -> str:
    """Rounds half up, ignoring binary rounding errors beyond the ninth digit."""
    place = Decimal(1).scaleb(-digits)
    return str(Decimal(f"{value:.9f}").quantize(place, ROUND_HALF_UP))


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{spread}"
