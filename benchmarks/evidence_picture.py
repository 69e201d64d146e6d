"""Accuracy against measured cost, a panel for each set of images."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence_cells import OURS, PLAIN, Cell, by_set, with_budgets
from evidence_margins import best_of
from matplotlib.backends.backend_agg import FigureCanvasAgg

from adatape.show.pictures.style import FAINT, INK, ORANGE, PURPLE, picture, tidy

PLACES = [(7, 4), (7, -11), (-7, 4), (-7, -11), (7, 16), (-7, 16), (7, -23), (-7, -23), (7, 28), (-7, 28), (7, -35)]


def draw(path: Path, every: Sequence[Cell]) -> None:
    """Plain ViTs are joined, since more of one buys the next; so are the smaller budgets of one model."""
    sets = by_set(every)
    with picture(path, 0.4 + 5.0 * len(sets)) as figure:
        panels = figure.subplots(len(sets), 1, squeeze=False)[:, 0]
        named = [(axes, _panel(axes, of_set)) for axes, of_set in zip(panels, sets, strict=True)]
        FigureCanvasAgg(figure).draw()  # places are known only now
        for axes, points in named:
            _name(axes, points)


def _panel(axes: Any, every: Sequence[Cell]) -> list[tuple[str, float, float]]:
    """Its points, yet to be named."""
    points = []
    for cell in every:
        x, y = _point(cell)
        spread = [100 * value for value in cell.values("accuracy")]
        bar = statistics.stdev(spread) if len(spread) > 1 else 0.0
        axes.errorbar(x, y, bar, fmt="o", color=_colour(cell), markersize=6)
        points.append((cell.name, x, y))
        cheaper = [each for each in with_budgets([cell]) if "haste" not in each.name]
        axes.plot(*zip(*sorted(map(_point, cheaper)), strict=True), color=_colour(cell), lw=1, ls=":", marker=".")
    best = best_of([cell for cell in every if cell.name.startswith(PLAIN)])
    axes.plot(*zip(*map(_point, best), strict=True), color=FAINT, linewidth=1)
    axes.set_xlabel("GFLOPs per image, measured mean")
    axes.set_ylabel("accuracy (%)")
    axes.set_title(every[0].recipe)
    axes.margins(0.16, 0.14)
    tidy(axes, "both")
    return points


def _point(cell: Cell) -> tuple[float, float]:
    return cell.mean("gflops_mean"), 100 * cell.mean("accuracy")


def _colour(cell: Cell) -> str:
    return PURPLE if cell.name.startswith(OURS) else FAINT if cell.name.startswith(PLAIN) else ORANGE


def _name(axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Each name beside its point, at the first place where it covers no other name and no point."""
    dots = [axes.transData.transform((x, y)) for _, x, y in points]
    taken: list[Any] = []
    for name, x, y in points:
        for n, (right, up) in enumerate(PLACES):
            side = "left" if right > 0 else "right"
            text = axes.annotate(name, (x, y), (right, up), textcoords="offset points", ha=side, color=INK, fontsize=8)
            text.set_in_layout(False)
            box = text.get_window_extent()
            free = not any(box.overlaps(other) for other in taken) and not any(box.contains(*dot) for dot in dots)
            if free or n == len(PLACES) - 1:
                taken.append(box)
                break
            text.remove()
