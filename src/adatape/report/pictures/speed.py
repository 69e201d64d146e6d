"""Speed against FLOPs: is a model as fast as its multiply-adds promise?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from adatape.report.pictures.style import FAINT, GREEN, ORANGE, picture, tidy

Row = dict[str, Any]
TITLES = {"train": "Training", "inference": "Inference"}
METHODS = {
    "adatape": "AdaTape",
    "avit": "A-ViT",
    "deit": "DeiT",
    "plainvit": "PlainViT",
    "ponder": "PonderNet",
    "u2t": "U2T",
    "ut": "UT",
    "uvit": "UViT",
    "vit": "ViT",
    "vit3ffn": "ViT-3FFN",
}
SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L"}
BANKS = {"learn": "learned bank", "input": "input bank"}
LINE, AROUND = 0.26, 0.8  # inches of a row, and around the rows of a panel


def draw_speed(path: Path, rows: Sequence[Row]) -> Path | None:
    """A panel for each mode and a line for each model and batch; None where no row has both ratios."""
    rows = [row for row in rows if row.get("ratio") and row.get("flops_ratio")]
    if not rows:
        return None
    titles = dict.fromkeys(map(title_of, rows))
    rows = sorted(rows, key=lambda row: (plain_name(row["model"], row["options"]), row["batch"]))
    panels = [[row for row in rows if title_of(row) == title] for title in titles]
    heights = [len(panel) + 0.4 for panel in panels]
    with picture(path, 0.7 + sum(AROUND + LINE * height for height in heights)) as figure:
        every = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axes, panel in zip(every, panels, strict=True):
            _draw(axes, panel)
        every[-1].set_xlabel("speed ÷ that of the plain ViT (below 1: slower)")
        figure.legend(handles=_legend(), loc="outside lower left", frameon=False, ncols=2, fontsize=10)
    return path


def title_of(row: Row) -> str:
    """What rows must share to stand in one panel."""
    tape = "" if row.get("full_tape", True) else ", tapes may halt"
    return TITLES[row["mode"]] + (" with data" if row.get("data") else "") + f"{tape}, {row['hardware']}"


def plain_name(model: str, options: dict[str, Any]) -> str:
    """As in papers: AdaTape-B/16, learned bank; a name that is none of ours stays as it is."""
    found = re.fullmatch(r"(\w+?)_(tiny|small|base|large)_patch(\d+)_224", model)
    if not found or found[1] not in METHODS:
        return " ".join([model, *(f"{key}={value}" for key, value in options.items())])
    banks = {"bank": "input", **options} if found[1] == "adatape" else options
    told = [BANKS.get(value, f"{key}={value}") if key == "bank" else f"{key}={value}" for key, value in banks.items()]
    return ", ".join([f"{METHODS[found[1]]}-{SIZES[found[2]]}/{found[3]}", *told])


def _draw(axes: Axes, rows: Sequence[Row]) -> None:
    axes.axvline(1, color=FAINT, linewidth=1)
    for place, row in enumerate(rows):
        reach = [[row["ratio"] - row["ratio_min"]], [row["ratio_max"] - row["ratio"]]]
        axes.plot(row["flops_ratio"], place, color=ORANGE, marker="D", markersize=6, zorder=3)
        axes.errorbar(row["ratio"], place, xerr=reach, color=GREEN, marker="o", markersize=6, elinewidth=1.5, zorder=4)
    names = [f"{plain_name(row['model'], row['options'])}, batch {row['batch']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=10)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.set_title(title_of(rows[0]))
    tidy(axes, "both")


def _legend() -> list[Line2D]:
    look: dict[str, Any] = {"linestyle": "", "markersize": 6}
    return [
        Line2D([], [], color=GREEN, marker="o", label="measured: median, fastest and slowest round", **look),
        Line2D([], [], color=ORANGE, marker="D", label="if time followed FLOPs", **look),
    ]
