"""The docs' pictures of studies: accuracy against measured cost, parity by training step, speed against FLOPs.

python research/pictures.py                draws evidence.png, parity.png and speed.png in docs/images
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cells import OURS, PLAIN, Cell, by_set, cells, with_budgets
from margins import best_of
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from parity_tables import ADATAPE, LENGTHS, Run, runs_in
from rows import RESULTS, read_rows

from adatape.report.pictures.speed import draw_speed
from adatape.report.pictures.style import ALERT, BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, picture, tidy

IMAGES = RESULTS.parent / "docs" / "images"
BESIDE = [(7, 4), (7, -11), (-7, 4), (-7, -11)]
FARTHER = [(side * right, up) for right in (14, 40) for up in (18, -24, 32, -38, 46, -52) for side in (1, -1)]
PARITY = {
    ADATAPE: ("AdaTape", GREEN),
    "transformer": ("Transformer, three rates", PURPLE),
    "ut": ("Universal Transformer", BLUE),
    "singles": ("control: symbols singly", ORANGE),
    "random": ("control: random pairs", ALERT),
    "order": ("control: pairs in order", FAINT),
}


def draw_costs(path: Path, every: Sequence[Cell]) -> None:
    """A panel for each set of images.

    Lines join plain ViTs by cost, and the budgets of one model.
    """
    sets = by_set(every)
    with picture(path, 0.4 + 5.0 * len(sets)) as figure:
        panels = figure.subplots(len(sets), 1, squeeze=False)[:, 0]
        named = [(axes, _panel(axes, of_set)) for axes, of_set in zip(panels, sets, strict=True)]
        FigureCanvasAgg(figure).draw()  # positions are known only after drawing
        for axes, points in named:
            _name(axes, points)


def _panel(axes: Any, every: Sequence[Cell]) -> list[tuple[str, float, float]]:
    """Draws a panel; returns its points, to be labelled."""
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
    """Places each label at the first position that overlaps no other label or point, with a line if it is far away."""
    dots = [axes.transData.transform((x, y)) for _, x, y in points]
    taken: list[Any] = []
    for name, x, y in points:
        for right, up in BESIDE + FARTHER:
            side = "left" if right > 0 else "right"
            text = axes.annotate(name, (x, y), (right, up), textcoords="offset points", ha=side, color=INK, fontsize=8)
            text.set_in_layout(False)
            box = text.get_window_extent()
            room = box.padded(2)
            free = not any(room.overlaps(other) for other in taken) and not any(room.contains(*dot) for dot in dots)
            if free or (right, up) == FARTHER[-1]:
                taken.append(box)
                if (right, up) in FARTHER:
                    _lead(axes, (x, y), (box.x0 if right > 0 else box.x1, (box.y0 + box.y1) / 2))
                break
            text.remove()


def _lead(axes: Any, point: tuple[float, float], name: tuple[float, float]) -> None:
    """A thin line from a point (data coordinates) to its label (pixel coordinates)."""
    (x0, y0), (x1, y1) = point, axes.transData.inverted().transform(name)
    axes.plot([x0, x1], [y0, y1], color=INK, linewidth=0.5, alpha=0.6, zorder=1, scalex=False, scaley=False)


def draw_parity(path: Path, runs: Sequence[Run]) -> None:
    """Validation accuracy, a panel for each length. A run that was stopped is drawn as far as its curve goes."""
    with picture(path, 5.6) as figure:
        panels = figure.subplots(2, 2, sharey=True, sharex=True)
        for axes, length in zip(panels.flat, LENGTHS, strict=True):
            for system in PARITY:
                _curves(axes, [run for run in runs if (run.system, run.length) == (system, length)], *PARITY[system])
            axes.axhline(50, color=FAINT, linewidth=0.8, linestyle=":")
            axes.set(title=f"N = {length}", ylim=(40, 103))
            tidy(axes)
        for axes in panels[1]:
            axes.set_xlabel("training step")
        for axes in panels[:, 0]:
            axes.set_ylabel("validation accuracy (%)")
        handles = {
            text: line for axes in panels.flat for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)


def _curves(axes: Axes, runs: Sequence[Run], name: str, colour: str) -> None:
    """Draws curves with one legend entry; a run with a single point is a dot."""
    for n, run in enumerate(runs):
        steps, accuracy = zip(*run.row["curve"], strict=True)
        marker, label = "o" if len(steps) == 1 else "", name if n == 0 else None
        points = [100 * share for share in accuracy]
        axes.plot(steps, points, color=colour, linewidth=1.5, marker=marker, markersize=5, label=label)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=IMAGES)
    arguments = parser.parse_args(given)
    arguments.into.mkdir(parents=True, exist_ok=True)
    draw_costs(arguments.into / "evidence.png", cells(read_rows(RESULTS / "evidence.jsonl")))
    draw_parity(arguments.into / "parity.png", runs_in("parity"))
    timed = [row for row in read_rows(RESULTS / "speed.jsonl") if row["device"] == "cuda"]
    draw_speed(arguments.into / "speed.png", [row | {"hardware": row["environment"]["hardware"]} for row in timed])


if __name__ == "__main__":
    main()
