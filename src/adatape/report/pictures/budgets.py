"""Quality against cost: one model at several budgets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from adatape.evaluate.result import FIGURE_NAMES, main_figure, work_unit
from adatape.report.pictures.style import GREEN, INK, picture, tidy

COSTS = {
    "gflops_mean": "GFLOPs, mean",
    "gflops": "GFLOPs, bound",
    "ms_batch1": "milliseconds for one sample",
    "ms": "milliseconds",
    "seconds": "seconds",
}
SHOWN = 2
NEAR = 0.06  # of the axis


def draw_budgets(path: Path, rows: list[dict[str, Any]]) -> Path | None:
    """A panel for work and one for time, where they were measured; None where fewer than two budgets were."""
    costs = [name for name in COSTS if sum(_has(row, name) for row in rows) > 1]
    if {"gflops_mean", "gflops"} <= set(costs):
        costs.remove("gflops")
    costs = costs[:SHOWN]
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
    label = COSTS[name]
    if name.startswith("gflops"):
        unit, scale = work_unit(rows[-1][name])
        rows = [{**row, name: scale * row[name]} for row in rows]
        label = label.replace("GFLOPs", unit)
    cost, quality = [row[name] for row in rows], [100 * row[main_figure(row)] for row in rows]
    errors = [_error(row) for row in rows]
    axes.errorbar(cost, quality, errors, color=GREEN, linewidth=2, elinewidth=1, marker="o", markersize=6)
    for text, x, y in _labels(rows, name):
        axes.annotate(text, (x, y), (0, 8), textcoords="offset points", ha="center", color=INK)
    axes.set_xlabel(label)
    axes.margins(0.1, 0.18)
    tidy(axes, "both")


def _labels(rows: list[dict[str, Any]], name: str) -> list[tuple[str, float, float]]:
    """Budgets at their points; those whose numbers would lie on each other share one place."""
    apart = NEAR * (rows[-1][name] - rows[0][name])
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if groups and row[name] - groups[-1][0][name] <= apart:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [
        (
            ", ".join(str(step) for step in sorted({row["steps"] for row in group if "steps" in row})),
            sum(row[name] for row in group) / len(group),
            max(100 * row[main_figure(row)] + _error(row) for row in group),
        )
        for group in groups
    ]


def _error(row: dict[str, Any]) -> float:
    """Standard error of an accuracy, in points; 0 where the number of samples is not known, and of a mean AP."""
    if main_figure(row) != "accuracy" or not row.get("samples"):
        return 0.0
    return 100 * math.sqrt(row["accuracy"] * (1 - row["accuracy"]) / row["samples"])


def _has(row: dict[str, Any], name: str) -> bool:
    return all(isinstance(row.get(each), int | float) and math.isfinite(row[each]) for each in (name, main_figure(row)))
