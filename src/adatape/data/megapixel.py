"""Megapixel MNIST: five digits and fifty line patterns on a large empty canvas.

Canvas i is a function of (seed, split, i). Three digits are of one class, two of others; their boxes do not overlap.
Line patterns come from a pool of fifty per split, drawn under the digits (as in IPS) or over them (as in ATS). A canvas
of 1500 pixels has 2.25 MB, so that what is kept is where its stamps lie; it is drawn when it is needed, on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, UInt8
from torch import Tensor

from adatape.counter_rng import key_of, keys_of
from adatape.data.augment import scaled
from adatape.data.batch import Batch, Shard
from adatape.data.images import Split, mnist
from adatape.data.loaders import MODEL, Labelled
from adatape.data.sampler import Order
from adatape.data_config import DrawOrder, Megapixel, MegapixelTask

DIGIT, CLASSES = 28, 10
POOL = 50  # line patterns of a split
SPLITS: dict[Split, int] = {"train": 0, "test": 1, "validation": 2}  # second words of the seeds of canvases


class Stamps(NamedTuple):
    """What lies where on each canvas; corners are top and left in pixels."""

    digits: Int[Tensor, "n five"]  # numbers of MNIST's digits
    corners: Int[Tensor, "n five 2"]
    patterns: Int[Tensor, "n noise"]  # numbers of the pool's line patterns
    pattern_corners: Int[Tensor, "n noise 2"]

    def at(self, index: Int[Tensor, "m"] | slice, device: torch.device | str) -> Stamps:
        return Stamps(*(part[index].to(device) for part in self))


def draw_stamps(labels: Int[np.ndarray, "m"], count: int, split: int, seed: int, side: int, noise: int) -> Stamps:
    by_class = [np.flatnonzero(labels == c) for c in range(CLASSES)]
    drawn = [_draw(np.random.default_rng([seed, split, i]), by_class, side, noise) for i in range(count)]
    return Stamps(*(torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True)))


def render(
    stamps: Stamps, digits: UInt8[Tensor, "m 28 28"], pool: UInt8[Tensor, "p 28 28"], side: int, order: DrawOrder
) -> UInt8[Tensor, "n side side"]:
    """Draws canvases on the device of the stamps."""
    images = torch.zeros(len(stamps.digits), side, side, dtype=torch.uint8, device=stamps.digits.device)
    if order == "under":
        _stamp(images, pool, stamps.patterns, stamps.pattern_corners, over=False)
    _stamp(images, digits, stamps.digits, stamps.corners, over=True)
    if order == "over":
        _stamp(images, pool, stamps.patterns, stamps.pattern_corners, over=False)
    return images


def answers(stamps: Stamps, labels: Int[np.ndarray, "m"], task: MegapixelTask) -> Tensor:
    """(n,) the class of most digits, the highest one, that of the topmost digit; or (n, 10), 1 for those that occur."""
    classes = torch.from_numpy(labels).long()[stamps.digits]
    counts = F.one_hot(classes, CLASSES).sum(1)
    match task:
        case "majority":
            return counts.argmax(1)
        case "maximum":
            return classes.amax(1)
        case "topmost":
            return classes.gather(1, stamps.corners[..., 0].argmin(1, keepdim=True))[:, 0]
        case "all":
            return (counts > 0).float()


def line_patterns(seed: int, split: int) -> UInt8[Tensor, "p 28 28"]:
    """Two straight lines, one pixel wide, of an intensity of 0.8 to 1."""
    rng = np.random.default_rng([seed, split, 2**31])
    pool = np.zeros((POOL, DIGIT, DIGIT), np.uint8)
    for pattern in pool:
        for _ in range(2):
            ends = rng.integers(0, DIGIT, (2, 2))
            steps = max(1, np.abs(ends[1] - ends[0]).max())
            points = np.rint(ends[0] + np.arange(steps + 1)[:, None] / steps * (ends[1] - ends[0])).astype(int)
            pattern[points[:, 0], points[:, 1]] = rng.integers(204, 256)
    return torch.from_numpy(pool)


class Drawer:
    """The canvases of a split, drawn when asked for."""

    def __init__(self, config: Megapixel, split: Split) -> None:
        self.config, number = config, SPLITS[split]
        digits, labels = _digits_of(config, split)
        count = config.train if split == "train" else config.held_out
        self.stamps = draw_stamps(labels, count, number, config.seed, config.side, config.noise)
        self.labels = answers(self.stamps, labels, config.task)
        self.digits, self.pool = torch.from_numpy(digits), line_patterns(config.seed, number)

    def __len__(self) -> int:
        return len(self.labels)

    def draw(self, index: Int[Tensor, "n"] | slice, device: torch.device) -> UInt8[Tensor, "n 1 side side"]:
        self.digits, self.pool = self.digits.to(device), self.pool.to(device)  # copied once
        return render(self.stamps.at(index, device), self.digits, self.pool, self.config.side, self.config.order)[
            :, None
        ]

    def labelled(self, chunks: list[range], device: torch.device) -> Iterator[Labelled]:
        for chunk in chunks:
            part = slice(chunk.start, chunk.stop)
            yield Labelled(scaled(self.draw(part, device)), self.labels[part].to(device))


class CanvasLoader:
    """Training batches, drawn on the device."""

    tally = None

    def __init__(self, canvases: Drawer, order: Order, shard: Shard, device: torch.device) -> None:
        self.canvases, self.order, self.shard, self.device = canvases, order, shard, device

    def batches(self, first: int) -> Iterator[Batch]:
        start, stop = self.shard.bounds(self.order.batch)
        for step in itertools.count(first):
            ids, position = map(torch.from_numpy, self.order.slots(step, start, stop))
            x = scaled(self.canvases.draw(ids, self.device))
            key = keys_of(key_of(self.order.seed, MODEL), position)
            yield Batch(x, self.canvases.labels[ids].to(self.device), key.to(self.device))

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)


def _digits_of(config: Megapixel, split: Split) -> tuple[UInt8[np.ndarray, "m 28 28"], Int[np.ndarray, "m"]]:
    """Training and validation canvases show different digits of MNIST's training set."""
    digits, labels = mnist(config.path, train=split != "test")
    if digits.shape[1:] != (DIGIT, DIGIT):
        raise ValueError(f"{config.path} has digits of {digits.shape[1:]} pixels; they must have {DIGIT} × {DIGIT}")
    kept = len(digits) - round((config.validate_on or 0) * len(digits))
    part = {"train": slice(kept), "validation": slice(kept, None), "test": slice(None)}[split]
    missing = set(range(CLASSES)) - set(labels[part].tolist())
    if missing:
        raise ValueError(f"{config.path} has no digit of class {min(missing)} for the {split} canvases")
    return digits[part].copy(), labels[part]  # not memory-mapped


def _draw(rng: np.random.Generator, by_class: list[np.ndarray], side: int, noise: int) -> tuple[np.ndarray, ...]:
    main = rng.integers(CLASSES)
    others = rng.choice([c for c in range(CLASSES) if c != main], 2)
    chosen = [rng.choice(by_class[c]) for c in (main, main, main, *others)]
    corners: list[np.ndarray] = []
    while len(corners) < len(chosen):
        corner = rng.integers(0, side - DIGIT + 1, 2)
        if all(np.abs(corner - other).max() >= DIGIT for other in corners):
            corners.append(corner)
    lines = rng.integers(0, POOL, noise), rng.integers(0, side - DIGIT + 1, (noise, 2))
    return np.array(chosen), np.array(corners), *lines


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
