"""Speed against FLOPs: is a model as fast as its multiply-adds promise?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from adatape.report.pictures.style import ALERT, BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, picture, tidy

Row = dict[str, Any]
COLOURS = (GREEN, PURPLE, ORANGE, BLUE, ALERT, INK, FAINT, "#17a2b8", "#e377c2", "#8c6d1f", "#a3c14a")
MARKERS = "osD^vP*X"
ACROSS = 2  # panels, and columns of the legend
TITLES = {"train": "Training", "inference": "Inference"}


def draw_speed(path: Path, rows: Sequence[Row]) -> Path | None:
    """A panel for each mode, a colour for each model, a shape for each batch; None where no row has both ratios."""
    rows = [row for row in rows if row.get("ratio") and row.get("flops_ratio")]
    if not rows:
        return None
    panels = distinct(rows, title_of)
    colours = {model: COLOURS[n % len(COLOURS)] for n, model in enumerate(distinct(rows, model_of))}
    markers = {size: MARKERS[n % len(MARKERS)] for n, size in enumerate(sorted(distinct(rows, lambda r: r["batch"])))}
    down, across = -(-len(panels) // ACROSS), min(ACROSS, len(panels))
    with picture(path, 0.6 + 3.6 * down + 0.25 * (len(colours) + len(markers)) / ACROSS) as figure:
        every = figure.subplots(down, across, squeeze=False, sharey=True).flatten()
        for axes, title in zip(every, panels, strict=False):
            _draw(axes, [row for row in rows if title_of(row) == title], colours, markers, _limits(rows))
            axes.set(title=title, xlabel="FLOPs, reference ÷ model")
        for axes in every[len(panels) :]:
            axes.set_visible(False)
        for axes in every[::across]:
            axes.set_ylabel("time, reference ÷ model")
        figure.legend(
            handles=_legend(colours, markers), loc="outside lower left", frameon=False, ncols=ACROSS, fontsize=10
        )
    return path


def distinct(rows: Sequence[Row], of: Callable[[Row], Any]) -> list[Any]:
    return list(dict.fromkeys(of(row) for row in rows))


def title_of(row: Row) -> str:
    """What rows must share to stand in one panel."""
    return TITLES[row["mode"]] + (" with data" if row.get("data") else "") + f", {row['hardware']}"


def model_of(row: Row) -> str:
    return " ".join([row["model"], *(f"{key}={value}" for key, value in row["options"].items())])


def _draw(
    axes: Axes, rows: Sequence[Row], colours: dict[str, str], markers: dict[int, str], limits: tuple[float, float]
) -> None:
    axes.plot(limits, limits, color=FAINT, linewidth=1, linestyle="--", zorder=1)
    start = limits[0] + 0.03 * (limits[1] - limits[0])
    turned: dict[str, Any] = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
    axes.text(start, start, "as fast as its FLOPs", color=INK, verticalalignment="bottom", **turned)
    for row in rows:
        reach = [[row["ratio"] - row["ratio_min"]], [row["ratio_max"] - row["ratio"]]]
        look: dict[str, Any] = {"color": colours[model_of(row)], "marker": markers[row["batch"]]}
        axes.errorbar(row["flops_ratio"], row["ratio"], reach, markersize=7, elinewidth=1, **look)
    axes.set(xlim=limits, ylim=limits)
    tidy(axes, "both")


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """One range for both axes, so that the diagonal is one."""
    values = [row[name] for row in rows for name in ("flops_ratio", "ratio_min", "ratio_max")]
    room = 0.08 * (max(values) - min(values)) + 0.01
    return min(values) - room, max(values) + room


def _legend(colours: dict[str, str], markers: dict[int, str]) -> list[Line2D]:
    models = [Line2D([], [], color=colour, linewidth=5, label=model) for model, colour in colours.items()]
    look: dict[str, Any] = {"color": FAINT, "linestyle": "", "markersize": 7}
    return models + [Line2D([], [], marker=marker, label=f"batch {size}", **look) for size, marker in markers.items()]
