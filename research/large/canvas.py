"""Megapixel MNIST: five digits and fifty line patterns on a large empty canvas.

Canvas i is a function of (seed, split, i). Three digits are of one class, two of others; their boxes do not overlap.
Line patterns come from a pool of fifty per split, drawn under the digits (as in IPS) or over them (as in ATS).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

DIGIT = 28
POOL = 50
Order = Literal["under", "over"]


class Canvases(NamedTuple):
    images: Tensor  # (n, side, side) uint8
    majority: Tensor  # (n,)
    maximum: Tensor  # (n,)
    topmost: Tensor  # (n,)
    present: Tensor  # (n, 10) float
    corners: Tensor  # (n, digits, 2) top, left: for measuring hits only
    digits: Tensor  # (n, digits)


def make(
    digits: np.ndarray,  # (m, 28, 28) uint8
    labels: np.ndarray,  # (m,)
    count: int,
    *,
    split: int,
    seed: int = 0,
    side: int = 1500,
    noise: int = 50,
    order: Order = "under",
    device: str = "cpu",
) -> Canvases:
    by_class = [np.flatnonzero(labels == c) for c in range(10)]
    drawn = [_draw(np.random.default_rng([seed, split, i]), by_class, side, noise) for i in range(count)]
    chosen, corners, patterns, pattern_corners = (torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True))
    pool = torch.from_numpy(_patterns(np.random.default_rng([seed, split, 2**31]))).to(device)
    stamps = torch.from_numpy(digits).to(device)
    images = torch.zeros(count, side, side, dtype=torch.uint8, device=device)
    for start in range(0, count, 250):
        part = slice(start, start + 250)
        lines = (images[part], pool, patterns[part].to(device), pattern_corners[part].to(device))
        if order == "under":
            _stamp(*lines, over=False)
        _stamp(images[part], stamps, chosen[part].to(device), corners[part].to(device), over=True)
        if order == "over":
            _stamp(*lines, over=False)
    classes = torch.from_numpy(labels).long()[chosen]
    counts = torch.nn.functional.one_hot(classes, 10).sum(1)
    return Canvases(
        images,
        counts.argmax(1).to(device),
        classes.amax(1).to(device),
        classes.gather(1, corners[..., 0].argmin(1, keepdim=True))[:, 0].to(device),
        (counts > 0).float().to(device),
        corners.to(device),
        classes.to(device),
    )


def _draw(rng: np.random.Generator, by_class: list[np.ndarray], side: int, noise: int) -> tuple[np.ndarray, ...]:
    main = rng.integers(10)
    others = rng.choice([c for c in range(10) if c != main], 2)
    chosen = [rng.choice(by_class[c]) for c in (main, main, main, *others)]
    corners: list[np.ndarray] = []
    while len(corners) < len(chosen):
        corner = rng.integers(0, side - DIGIT + 1, 2)
        if all(np.abs(corner - other).max() >= DIGIT for other in corners):
            corners.append(corner)
    lines = rng.integers(0, POOL, noise), rng.integers(0, side - DIGIT + 1, (noise, 2))
    return np.array(chosen), np.array(corners), *lines


def _patterns(rng: np.random.Generator) -> np.ndarray:
    """Two straight lines, one pixel wide, of an intensity of 0.8 to 1."""
    pool = np.zeros((POOL, DIGIT, DIGIT), np.uint8)
    for pattern in pool:
        for _ in range(2):
            ends = rng.integers(0, DIGIT, (2, 2))
            steps = max(1, np.abs(ends[1] - ends[0]).max())
            points = np.rint(ends[0] + np.arange(steps + 1)[:, None] / steps * (ends[1] - ends[0])).astype(int)
            pattern[points[:, 0], points[:, 1]] = rng.integers(204, 256)
    return pool


def _stamp(images: Tensor, stamps: Tensor, chosen: Tensor, corners: Tensor, over: bool) -> None:
    """Draws the chosen stamps at their corners, replacing pixels (`over`) or taking the maximum."""
    n, side, _ = images.shape
    flat = images.view(-1)
    inside = torch.arange(DIGIT, device=images.device)
    for j in range(chosen.shape[1]):
        rows, columns = corners[:, j, 0, None] + inside, corners[:, j, 1, None] + inside
        base = torch.arange(n, device=images.device)[:, None, None] * side * side
        at = (base + rows[:, :, None] * side + columns[:, None, :]).view(-1)
        new = stamps[chosen[:, j]].view(-1)
        flat[at] = new if over else torch.maximum(flat[at], new)
