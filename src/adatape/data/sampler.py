"""The order of training samples as a function of seed and step, so that there is no sampler state to save."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SHUFFLE = 101  # first word of the order's key


class Slots(NamedTuple):
    """Consecutive samples of one global batch."""

    ids: np.ndarray  # (k,) image indices
    position: np.ndarray  # (k,) sample numbers over the whole run, each of them unique


@dataclass(frozen=True)
class Order:
    """Consecutive epochs, each with its own permutation; a batch may span two.

    With `repeats`, a batch has that many copies of each image, spaced so that neighbours, which Mixup mixes, differ.
    """

    samples: int
    batch: int
    seed: int
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch < 1:
            raise ValueError(f"samples is {self.samples} and batch {self.batch}; both must be at least 1")
        if not 1 <= self.repeats <= self.batch:
            raise ValueError(f"repeats is {self.repeats}; it must be between 1 and the batch of {self.batch}")

    @property
    def distinct(self) -> int:
        """Distinct images per batch; if repeats do not divide the batch, the last ones have one copy less."""
        return -(-self.batch // self.repeats)

    def slots(self, step: int, start: int, stop: int) -> Slots:
        """Slots start to stop of a step's batch, wrapping around for the neighbour of the last one."""
        slot = np.arange(start, stop) % self.batch
        place = step * self.distinct + slot % self.distinct
        epoch, within = np.divmod(place, self.samples)
        ids = np.empty_like(within)
        for each in np.unique(epoch):
            here = epoch == each
            ids[here] = _permutation(self.samples, self.seed, int(each))[within[here]]
        return Slots(ids, step * self.batch + slot)

    def epoch(self, step: int) -> float:
        """Epochs completed before a step."""
        return step * self.distinct / self.samples


@functools.lru_cache(maxsize=4)
def _permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((SHUFFLE, seed, epoch)).permutation(samples)
