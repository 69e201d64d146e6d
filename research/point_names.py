"""Names beside points, placed so that they cover neither each other nor what is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from adatape.report.pictures.style import INK

NEAR, RADII, ANGLES = 9, (9, 20, 34, 50, 70, 92), 16  # points of a distance that needs no line; distances; directions
ON_NAME, ON_MARK, OUTSIDE, FAR = 100.0, 4.0, 100.0, 0.05  # what a place costs: per name, mark and point of distance
APART = 3  # pixels between names
SAMPLES = 60  # of a line, each of which a name should not cover


def name_points(axes: Axes, points: Mapping[str, tuple[float, float]], size: float = 8) -> None:
    """Places names in a picture that is laid out, the most crowded first, each where it covers least."""
    marks, taken = _marks(axes), list[Bbox]()
    places = {name: axes.transData.transform(point) for name, point in points.items()}
    crowd = {name: sum(float(np.hypot(*(at - each))) < 80 for each in places.values()) for name, at in places.items()}
    for name in sorted(places, key=lambda name: -crowd[name]):
        best = min(_offsets(), key=lambda offset: _cost(axes, name, points[name], offset, size, marks, taken))
        text = _placed(axes, name, points[name], best, size)
        taken.append(text.get_window_extent().padded(APART))
        if math.hypot(*best) > NEAR:
            _lead(axes, places[name], taken[-1])


def _offsets() -> Iterator[tuple[float, float]]:
    for radius in RADII:
        for step in range(ANGLES):
            angle = 2 * math.pi * step / ANGLES
            yield radius * math.cos(angle), radius * math.sin(angle)


def _placed(axes: Axes, name: str, point: tuple[float, float], offset: tuple[float, float], size: float) -> Text:
    right, up = offset
    side = "left" if right > 1 else "right" if right < -1 else "center"
    height = "bottom" if up > 4 else "top" if up < -4 else "center"
    text = axes.annotate(name, point, offset, textcoords="offset points", ha=side, va=height, color=INK, fontsize=size)
    text.set_in_layout(False)
    return text


def _cost(
    axes: Axes,
    name: str,
    point: tuple[float, float],
    offset: tuple[float, float],
    size: float,
    marks: np.ndarray,
    taken: list[Bbox],
) -> float:
    text = _placed(axes, name, point, offset, size)
    box = text.get_window_extent()
    text.remove()
    covered = ((marks > (box.x0, box.y0)) & (marks < (box.x1, box.y1))).all(1).sum()
    frame = axes.get_window_extent()
    inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    names = sum(box.overlaps(other) for other in taken)
    return ON_NAME * names + ON_MARK * float(covered) + (0 if inside else OUTSIDE) + FAR * math.hypot(*offset)


def _marks(axes: Axes) -> np.ndarray:
    """(n, 2), pixels on the lines, points and bars of a picture."""
    lines = [np.asarray(line.get_xydata(), dtype=float) for line in axes.lines]
    paths = [axes.transData.transform(line) for line in lines if len(line)]
    for bars in axes.collections:
        paths += [bars.get_transform().transform(path.vertices) for path in bars.get_paths()]
    return np.concatenate([_sampled(path) for path in paths])


def _sampled(path: np.ndarray) -> np.ndarray:
    place = np.linspace(0, len(path) - 1, SAMPLES) if len(path) > 1 else np.zeros(3)
    return np.stack([np.interp(place, np.arange(len(path)), path[:, axis]) for axis in range(2)], 1)


def _lead(axes: Axes, point: np.ndarray, box: Bbox) -> None:
    """A thin line from a point to the nearest edge of its name, both in pixels."""
    end = np.clip(point, (box.x0, box.y0), (box.x1, box.y1))
    (x0, y0), (x1, y1) = (axes.transData.inverted().transform(each) for each in (point, end))
    axes.plot([x0, x1], [y0, y1], color=INK, linewidth=0.5, alpha=0.6, zorder=1, scalex=False, scaley=False)
