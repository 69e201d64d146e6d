"""Canvases of Megapixel MNIST that are all drawn at once and kept on the device, with the answers to all questions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from adatape.data.megapixel import DIGIT as DIGIT
from adatape.data.megapixel import answers, draw_stamps, line_patterns, render
from adatape.data_config import DrawOrder, MegapixelTask

DRAWN_AT_ONCE = 250


class Canvases(NamedTuple):
    """Canvases that have been drawn, and the answers to all questions about them."""

    images: UInt8[Tensor, "n side side"]
    majority: Int[Tensor, "n"]
    maximum: Int[Tensor, "n"]
    topmost: Int[Tensor, "n"]
    present: Float[Tensor, "n classes"]
    corners: Int[Tensor, "n five 2"]  # to measure hits with, not to train
    digits: Int[Tensor, "n five"]  # their classes


def make(
    digits: UInt8[np.ndarray, "m 28 28"],
    labels: Int[np.ndarray, "m"],
    count: int,
    *,
    split: int,
    seed: int = 0,
    side: int = 1500,
    noise: int = 50,
    order: DrawOrder = "under",
    device: str = "cpu",
) -> Canvases:
    """All canvases at once: 11 GB for 5,000 of 1500 pixels."""
    stamps = draw_stamps(labels, count, split, seed, side, noise)
    shown, pool = torch.from_numpy(digits).to(device), line_patterns(seed, split).to(device)
    images = torch.empty(count, side, side, dtype=torch.uint8, device=device)
    for start in range(0, count, DRAWN_AT_ONCE):
        part = slice(start, start + DRAWN_AT_ONCE)
        images[part] = render(stamps.at(part, device), shown, pool, side, order)
    tasks: tuple[MegapixelTask, ...] = ("majority", "maximum", "topmost", "all")
    majority, maximum, topmost, present = (answers(stamps, labels, task).to(device) for task in tasks)
    classes = torch.from_numpy(labels).long()[stamps.digits]
    corners, classes = stamps.corners.to(device), classes.to(device)
    return Canvases(images, majority, maximum, topmost, present, corners, classes)
