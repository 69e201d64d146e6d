"""The order of samples as a function of seed and step: nothing to save, nothing to restore."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SHUFFLE = 101  # first word of the order's key


class Slots(NamedTuple):
    """Samples of a stretch of one global batch."""

    ids: np.ndarray  # (k,) which image
    position: np.ndarray  # (k,) the how-manieth sample of the whole run; unlike the id it never repeats


@dataclass(frozen=True)
class Order:
    """Epoch after epoch without a gap, each a permutation of its own; a batch may span two.

    With `repeats`, a batch holds that many copies of each image, as far apart as they can be: a neighbour to be mixed
    with is another image.
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
        """Images per batch; where repeats do not divide it, the last ones have a copy less."""
        return -(-self.batch // self.repeats)

    def slots(self, step: int, start: int, stop: int) -> Slots:
        """Slots start to stop of a step's batch; past its end they begin again at 0, for the last one's neighbour."""
        slot = np.arange(start, stop) % self.batch
        place = step * self.distinct + slot % self.distinct
        epoch, within = np.divmod(place, self.samples)
        ids = np.empty_like(within)
        for each in np.unique(epoch):
            here = epoch == each
            ids[here] = _permutation(self.samples, self.seed, int(each))[within[here]]
        return Slots(ids, step * self.batch + slot)

    def epoch(self, step: int) -> float:
        """Epochs done before a step."""
        return step * self.distinct / self.samples


@functools.lru_cache(maxsize=4)
def _permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((SHUFFLE, seed, epoch)).permutation(samples)
