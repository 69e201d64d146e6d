"""The docs' pictures of studies: accuracy against measured cost, parity by training step, speed against FLOPs.

python research/pictures.py                draws evidence.png, parity.png and speed.png in docs/images
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from cells import OURS, PLAIN, Cell, by_set, cells, with_budgets
from margins import best_of
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D
from parity_tables import ADATAPE, FIGURE, LENGTHS, Run, figure_runs, runs_in
from point_names import name_points
from rows import RESULTS, read_rows

from adatape.report.pictures.speed import METHODS, draw_speed
from adatape.report.pictures.style import ALERT, BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, picture, tidy

IMAGES = RESULTS.parent / "docs" / "images"
NAMES = {**METHODS, "adatape-input": "input bank", "adatape-learn": "learned bank", "adatape-paper": "coarse input"}
PUBLISHED = ("adatape-input", "adatape-learn", "adatape-paper")
KINDS = {
    "plain ViTs, tuned; the line joins the best": FAINT,
    "AdaTape as published": GREEN,
    "changed tapes, since removed": PURPLE,
    "other systems": ORANGE,
}
PARITY = {
    ADATAPE: ("AdaTape", GREEN),
    "transformer": ("Transformer", PURPLE),
    "ut": ("Universal Transformer", BLUE),
    "singles": ("control: symbols singly", ORANGE),
    "random": ("control: random pairs", ALERT),
    "order": ("control: pairs in order", FAINT),
}


def draw_costs(path: Path, every: Sequence[Cell]) -> None:
    """A panel for each set of images, accuracy against cost, with every system named."""
    sets = by_set(every)
    with picture(path, 0.9 + 5.4 * len(sets)) as figure:
        panels = figure.subplots(len(sets), 1, squeeze=False)[:, 0]
        named = [(axes, _panel(axes, of_set)) for axes, of_set in zip(panels, sets, strict=True)]
        figure.legend(handles=_legend(), loc="outside lower left", ncols=2, frameon=False, fontsize=10)
        FigureCanvasAgg(figure).draw()  # positions are known only after drawing
        figure.set_layout_engine("none")
        for axes, points in named:
            name_points(axes, points)


def _panel(axes: Axes, every: Sequence[Cell]) -> dict[str, tuple[float, float]]:
    """Draws a panel; returns where each system lies, to be named."""
    for cell in every:
        spread = [100 * value for value in cell.values("accuracy")]
        bar = statistics.stdev(spread) if len(spread) > 1 else 0.0
        axes.errorbar(*_point(cell), bar, fmt="o", color=_colour(cell), markersize=6)
        cheaper = [each for each in with_budgets([cell]) if "haste" not in each.name]
        axes.plot(*zip(*sorted(map(_point, cheaper)), strict=True), color=_colour(cell), lw=1, ls=":", marker=".")
    best = best_of([cell for cell in every if cell.name.startswith(PLAIN)])
    axes.plot(*zip(*map(_point, best), strict=True), color=FAINT, linewidth=1)
    axes.set(
        xlabel="GFLOPs per image, measured mean",
        ylabel="accuracy (%)",
        title=every[0].recipe.replace("cifar", "CIFAR-"),
    )
    axes.margins(0.1, 0.08)
    tidy(axes, "both")
    return {label_of(cell.name): _point(cell) for cell in every}


def label_of(name: str) -> str:
    """`plain-4-depth-3` is depth 3, `adatape-still` is still; `NAMES` has those that need other words."""
    return NAMES.get(name) or name.removeprefix("plain-4-").removeprefix("adatape-").replace("-", " ")


def _legend() -> list[Line2D]:
    entries = [Line2D([], [], color=colour, marker="o", linestyle="", label=text) for text, colour in KINDS.items()]
    dotted = Line2D([], [], color=PURPLE, marker=".", linestyle=":", label="the same model with a smaller budget")
    bar = Line2D([], [], color=INK, marker="|", markersize=12, linestyle="", label="± standard deviation over seeds")
    return [*entries, dotted, bar]


def _point(cell: Cell) -> tuple[float, float]:
    return cell.mean("gflops_mean"), 100 * cell.mean("accuracy")


def _colour(cell: Cell) -> str:
    if cell.name in PUBLISHED:
        return GREEN
    return PURPLE if cell.name.startswith(OURS) else FAINT if cell.name.startswith(PLAIN) else ORANGE


def draw_parity(path: Path, runs: Sequence[Run], lengths: Sequence[int] = LENGTHS) -> None:
    """Validation accuracy, a panel for each length. A run that was stopped is drawn as far as its curve goes."""
    lines = math.ceil(len(lengths) / 2)
    rates = ", three rates" if any(run.lr for run in runs if run.length in lengths) else ""
    with picture(path, 0.8 + 2.4 * lines) as figure:
        panels = figure.subplots(lines, 2, sharey=True, sharex=True)
        for axes in panels.flat[len(lengths) :]:
            axes.axis("off")
        for axes, length in zip(panels.flat, lengths, strict=False):
            for system, (name, colour) in PARITY.items():
                mine = [run for run in runs if (run.system, run.length) == (system, length)]
                _curves(axes, mine, name + rates * (system == "transformer"), colour)
            axes.axhline(50, color=FAINT, linewidth=0.8, linestyle=":")
            axes.set(title=f"N = {length}", ylim=(40, 103))
            tidy(axes)
        for axes in panels[-1]:
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
    lengths = sorted({*LENGTHS, *(run.length for run in runs_in(FIGURE))})
    draw_parity(arguments.into / "parity.png", figure_runs(), lengths)
    timed = [row for row in read_rows(RESULTS / "speed.jsonl") if row["device"] == "cuda"]
    draw_speed(arguments.into / "speed.png", [row | {"hardware": row["environment"]["hardware"]} for row in timed])


if __name__ == "__main__":
    main()
