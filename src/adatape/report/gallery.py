"""Easy and hard samples: images with the patches that were read outlined in reading order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from adatape.evaluate.reading import Reads
from adatape.report.pictures.style import ALERT, FAINT, INK, draw_image, picture, shortened

COLUMNS, ROWS = 4, 3
NUMBERED = 16  # patches along a side above which only the heaviest of a step has its number
DIMMED = 0.6  # so that thin outlines are seen
STEPS = colormaps["plasma"]


Boxes = Callable[[Tensor, tuple[int, int]], Tensor | None]  # as `Adaptive.tape_boxes`


class Grid(NamedTuple):
    """How bank tokens lie on an image."""

    rows: int
    columns: int


SMALLEST = Grid(NUMBERED + 1, NUMBERED + 1)  # the grid whose numbers are smallest


def easiest_first(reads: Reads) -> list[int]:
    """Cheapest first, and of equal cost the surest: for fixed models certainty alone decides."""
    order = np.lexsort((-reads.certainty.numpy(), reads.macs.numpy()))
    return [int(place) for place in order]


def varied(order: Sequence[int], labels: Int[Tensor, "n"], count: int) -> list[int]:
    """`count` of an order, each class's first before any class's second, in the order given."""
    seen: dict[int, int] = {}
    turns = []
    for rank, place in enumerate(order):
        label = int(labels[place])
        seen[label] = seen.get(label, -1) + 1
        turns.append((seen[label], rank))
    return [order[rank] for rank in sorted(rank for _, rank in sorted(turns)[:count])]


def draw_gallery(
    path: Path,
    title: str,
    places: Sequence[int],
    images: dict[int, Float[Tensor, "c h w"]],
    reads: Reads,
    names: Sequence[str],
    grid: Grid | None,
    windows: Boxes | None = None,
) -> Path:
    """`grid` is None where what is read is no part of the image, or a window of it, which `windows` finds."""
    rows = -(-len(places) // COLUMNS)
    with picture(path, 0.5 + 2.25 * rows, pads=(0.06, 0.06)) as figure:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
        every = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for axes in every:
            axes.axis("off")
        for axes, place in zip(every, places, strict=False):
            draw_image(axes, images[place], 1.0 if grid is None or grid.columns <= NUMBERED else DIMMED)
            if grid is not None:
                _outline(axes, reads, place, images[place], grid)
            if windows is not None:
                _outline_windows(axes, reads, place, images[place], windows)
            _caption(axes, reads, place, names)
    return path


def _outline(axes: Axes, reads: Reads, place: int, image: Tensor, grid: Grid) -> None:
    height, width = image.shape[1] / grid.rows, image.shape[2] / grid.columns
    inset = 0.06 * width
    for step in range(int(reads.length[place])):
        colour = STEPS(0.25 + 0.55 * step / max(1, reads.taken.shape[1] - 1))
        weights = reads.weight[place, step]
        heaviest = int(weights.argmax())
        for n, token in enumerate(reads.taken[place, step].tolist()):
            if token < 0:
                continue
            left, top = token % grid.columns * width - 0.5, token // grid.columns * height - 0.5
            thick = 0.8 + 2.2 * float(weights[n])
            axes.add_patch(Rectangle((left + inset, top + inset), width - 2 * inset, height - 2 * inset, fill=False,
                                     edgecolor=colour, linewidth=thick))  # fmt: skip
            if grid.columns <= NUMBERED or n == heaviest:
                _number(axes, left + width / 2, top + height / 2, step + 1, colour, grid)


def _outline_windows(axes: Axes, reads: Reads, place: int, image: Tensor, windows: Boxes) -> None:
    """What is outside of the image is cut off."""
    length, shape = int(reads.length[place]), (image.shape[1], image.shape[2])
    boxes = windows(reads.taken[place, :length, 0], shape)
    assert boxes is not None
    axes.set(xlim=(-0.5, shape[1] - 0.5), ylim=(shape[0] - 0.5, -0.5))
    for step, (top, left, height, width) in enumerate(boxes.tolist()):
        colour = STEPS(0.25 + 0.55 * step / max(1, reads.taken.shape[1] - 1))
        axes.add_patch(Rectangle((left - 0.5, top - 0.5), width, height, fill=False, edgecolor=colour, linewidth=1.5))
        _number(axes, max(left, 0.0), max(top, 0.0), step + 1, colour, SMALLEST)


def _number(axes: Axes, x: float, y: float, number: int, colour: tuple[float, ...], grid: Grid) -> None:
    size = 9 if grid.columns <= 8 else 7 if grid.columns <= NUMBERED else 5.5
    label = {"boxstyle": "circle,pad=0.15", "facecolor": colour, "edgecolor": "none"}
    axes.text(x, y, str(number), ha="center", va="center", fontsize=size, color="white", bbox=label)


def _caption(axes: Axes, reads: Reads, place: int, names: Sequence[str]) -> None:
    label, answer = (shortened(names[int(each[place])], 18) for each in (reads.label, reads.answer))
    right = bool(reads.right[place])
    axes.set_title(label if right else f"{label}\n→ {answer}", color=INK if right else ALERT, loc="center",
                   fontsize=11, fontweight="normal", pad=3)  # fmt: skip
    tokens = f"{int(reads.length[place])} tokens, " if reads.taken.shape[1] else ""
    certainty = f"{100 * float(reads.certainty[place]):.0f} %"
    below = f"{tokens}{certainty} sure" if right else f"{tokens}true class {certainty}"
    axes.text(0.5, -0.02, below, transform=axes.transAxes, ha="center", va="top", fontsize=9, color=FAINT)
