"""Haystack: a few small digits of one class at random places of a large canvas, among distractors.

Canvas i is a function of the split and i. Distractors are digits cut into sixteen tiles and put together at random, so
that neither ink nor strokes tell them from digits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

SIDE, DIGIT, TILE = 128, 8, 2
MOST_DIGITS, DISTRACTORS = 4, 12
COUNTS = {"train": 16_000, "test": 1000}


class Haystack(NamedTuple):
    images: UInt8[np.ndarray, "n side side 1"]
    labels: Int64[np.ndarray, "n"]
    digits: Int64[np.ndarray, "n"]  # how many there are
    corners: Int64[np.ndarray, "n most 2"]  # top and left of each, -1 beyond the last: to measure with, not to train


def make_haystack(
    digits: UInt8[np.ndarray, "m 8 8"], labels: Int64[np.ndarray, "m"], count: int, seed: int
) -> Haystack:
    by_class = [np.flatnonzero(labels == label) for label in range(10)]
    made = [_canvas(np.random.default_rng([seed, i]), digits, by_class) for i in range(count)]
    return Haystack(*(np.stack(part) for part in zip(*made, strict=True)))


def _canvas(
    rng: np.random.Generator, digits: np.ndarray, by_class: list[np.ndarray]
) -> tuple[np.ndarray, int, int, np.ndarray]:
    label, count = int(rng.integers(len(by_class))), 1 + int(rng.integers(MOST_DIGITS))
    corners = _apart(rng, count + DISTRACTORS)
    canvas = np.zeros((SIDE, SIDE, 1), np.uint8)
    for n, (top, left) in enumerate(corners):
        stamp = digits[rng.choice(by_class[label])] if n < count else _in_tiles(rng, digits[rng.integers(len(digits))])
        canvas[top : top + DIGIT, left : left + DIGIT, 0] = stamp
    placed = np.full((MOST_DIGITS, 2), -1)
    placed[:count] = corners[:count]
    return canvas, label, count, placed


def _apart(rng: np.random.Generator, count: int) -> np.ndarray:
    """Corners of boxes that do not overlap."""
    corners: list[tuple[int, int]] = []
    while len(corners) < count:
        top, left = rng.integers(0, SIDE - DIGIT + 1, 2).tolist()
        if all(max(abs(top - other[0]), abs(left - other[1])) >= DIGIT for other in corners):
            corners.append((top, left))
    return np.array(corners)


def _in_tiles(rng: np.random.Generator, digit: np.ndarray) -> np.ndarray:
    side = DIGIT // TILE
    tiles = digit.reshape(side, TILE, side, TILE).swapaxes(1, 2).reshape(side * side, TILE, TILE)
    return rng.permutation(tiles).reshape(side, side, TILE, TILE).swapaxes(1, 2).reshape(DIGIT, DIGIT)
