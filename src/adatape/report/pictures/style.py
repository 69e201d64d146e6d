"""One look for every picture: colours, type, and a frame without what says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from adatape.train.files import atomic_write

INK, FAINT, ALERT = "#30343B", "#8B9099", "#C8382E"
GREEN, PURPLE, ORANGE, BLUE = "#1B7F5C", "#8A5FBF", "#F2A93B", "#4C78A8"
HEAT = LinearSegmentedColormap.from_list("heat", ["#F7F8F7", "#A9D3BF", GREEN, "#0B3B2B"])
WIDTH, DPI = 7.5, 160  # 1,200 pixels; type of 11 points is 18 pixels high where it is shown 900 wide
TYPE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlepad": 9,
}


@contextmanager
def picture(path: Path, height: float, pads: tuple[float, float] = (0.12, 0.10)) -> Iterator[Figure]:
    """A figure that is saved whole once it has been drawn; `pads` are inches left and right, above and below axes."""
    with matplotlib.rc_context(TYPE):
        layout = ConstrainedLayoutEngine(w_pad=pads[0], h_pad=pads[1])
        figure = Figure(figsize=(WIDTH, height), layout=layout, facecolor="white")
        yield figure
        save(figure, path, DPI)


def save(figure: Figure, path: Path, dpi: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=dpi, format="png")
    return path


def tidy(axes: Axes, grid: str | None = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, alpha=0.25)  # type: ignore[arg-type]


def draw_image(axes: Axes, image: Float[Tensor, "c h w"], light: float = 1.0) -> None:
    """Pixels as they were before scaling to [-1, 1], dimmed to `light`; a single channel is grey."""
    pixels = ((image.float() + 1) / 2 * light).clamp(0, 1).permute(1, 2, 0).numpy()
    if pixels.shape[2] not in (1, 3):
        pixels = pixels.mean(2, keepdims=True)
    small = pixels.shape[0] < 100
    axes.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest" if small else "antialiased")


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def name_line(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """A name at the end of its line, in its colour, in place of a legend."""
    axes.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", color=colour, annotation_clip=False)
