"""Quality against cost: one model at several budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from adatape.evaluate.result import FIGURE_NAMES, main_figure, work_unit
from adatape.report.pictures.style import BLUE, GREEN, INK, picture, tidy

COSTS = {"gflops_mean": "GFLOPs, mean", "ms_batch1": "milliseconds for one sample"}
NEAR = 0.1  # of an axis, within which labels would lie on each other
# Of a legend: on the axes, where nothing is drawn.
ABOVE: dict[str, Any] = {
    "frameon": False,
    "loc": "lower right",
    "bbox_to_anchor": (1, 1),
    "ncols": 2,
    "borderaxespad": 0,
}


def draw_budgets(path: Path, rows: list[dict[str, Any]]) -> Path | None:
    """A panel for work and one for time, where they were measured; None where fewer than two budgets were."""
    costs = [name for name in COSTS if sum(_has(row, name) for row in rows) > 1]
    if not costs:
        return None
    with picture(path, 4.0) as figure:
        every = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
        for axes, name in zip(every, costs, strict=True):
            _draw(axes, sorted((row for row in rows if _has(row, name)), key=lambda row: row[name]), name)
        error = " ± error" if any(_error(row) for row in rows if _has(row, costs[0])) else ""
        every[0].set_ylabel(f"{FIGURE_NAMES[main_figure(rows[0])]}{error} (%)")
        every[0].set_title("One model at several budgets; numbers: tape steps allowed")
    return path


def _draw(axes: Axes, rows: list[dict[str, Any]], name: str) -> None:
    unit, scale = work_unit(rows[-1][name]) if name.startswith("gflops") else ("", 1)
    quality = [100 * row[main_figure(row)] for row in rows]
    lines, label = {"": [scale * row[name] for row in rows]}, COSTS[name].replace("GFLOPs", unit)
    draw_curve(axes, [row.get("steps") for row in rows], quality, list(map(_error, rows)), lines, label)


def draw_curve(
    axes: Axes,
    steps: Sequence[int | None],
    quality: Sequence[float],
    errors: Sequence[float],
    lines: dict[str, list[float]],
    label: str,
) -> None:
    """A line for each cost with bars of one standard error; budgets that cost about the same share a label."""
    place: Callable[[float], float] = math.log if len(lines) > 1 else float
    every = [place(x) for cost in lines.values() for x in cost]
    apart = NEAR * (max(every) - min(every))
    for (name, cost), colour in zip(lines.items(), (GREEN, BLUE), strict=False):
        axes.errorbar(cost, quality, errors, color=colour, linewidth=2, elinewidth=1, marker="o", label=name)
        for group in near([place(x) for x in cost], apart):
            text = ", ".join(map(str, sorted({step for n in group if (step := steps[n]) is not None})))
            spot = (sum(cost[n] for n in group) / len(group), max(quality[n] + errors[n] for n in group))
            axes.annotate(text, spot, (0, 4), textcoords="offset points", ha="center", color=INK)
    if len(lines) > 1:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.legend(**ABOVE)
    axes.set_xlabel(label)
    axes.margins(0.1, 0.2)
    tidy(axes, "both")


def near(values: Sequence[float], apart: float) -> list[list[int]]:
    """Places of values, smallest first, those in one group that lie within `apart` of the next."""
    groups: list[list[int]] = []
    for n in sorted(range(len(values)), key=lambda n: values[n]):
        if groups and values[n] - values[groups[-1][-1]] <= apart:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def accuracy_error(accuracy: float, samples: int | None, mean_ap: float | None = None) -> float:
    """Standard error of an accuracy, in points; 0 where the number of samples is not known, and of a mean AP."""
    return 100 * math.sqrt(accuracy * (1 - accuracy) / samples) if samples and mean_ap is None else 0.0


def _error(row: dict[str, Any]) -> float:
    return accuracy_error(row.get("accuracy", 0.0), row.get("samples"), row.get("mean_ap"))


def _has(row: dict[str, Any], name: str) -> bool:
    return all(isinstance(row.get(each), int | float) and math.isfinite(row[each]) for each in (name, main_figure(row)))
