"""The parity task: uniform symbols -1, 0, 1; the label is the number of ones mod 2."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

TRAINING, VALIDATION, TEST = range(3)  # first words of the keys, so that the streams are independent


class Sequences(NamedTuple):
    symbols: Tensor  # (b, n) int64
    label: Tensor  # (b,) int64


def parity_of(symbols: Int[Tensor, "b n"]) -> Int[Tensor, "b"]:
    return (symbols == 1).sum(-1) % 2


def training_batch(length: int, size: int, seed: int, step: int) -> Sequences:
    """The random sequences of one step, a function of seed and step on any machine."""
    return _draw(length, size, (TRAINING, seed, step))


def validation_set(length: int, size: int = 6400) -> Sequences:
    """Fixed sequences, used to decide when a run stops."""
    return _draw(length, size, (VALIDATION, length))


def held_out_set(length: int, size: int = 6400) -> Sequences:
    """Fixed test sequences, used for the result only."""
    return _draw(length, size, (TEST, length))


def _draw(length: int, size: int, key: tuple[int, ...]) -> Sequences:
    if length < 1 or size < 1:
        raise ValueError(f"length is {length} and size {size}; both must be at least 1")
    symbols = torch.from_numpy(np.random.default_rng(key).integers(-1, 2, (size, length)))
    return Sequences(symbols, parity_of(symbols))
