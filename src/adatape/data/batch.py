"""Batch, the item of a training loader, and Shard, a process's share of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """A process's part of one step's samples."""

    x: Tensor  # (b, …), the model's input
    target: Tensor  # (b,) int64 labels, or (b, classes) probabilities
    key: Tensor  # (b,) int64, seeds the model's random numbers of each sample


class Shard(NamedTuple):
    """The rank of a process among `world`; each takes an equal, contiguous part of every global batch."""

    rank: int = 0
    world: int = 1

    def bounds(self, batch: int) -> tuple[int, int]:
        if batch % self.world:
            raise ValueError(f"batch is {batch}; it must be a multiple of the {self.world} processes")
        size = batch // self.world
        return self.rank * size, (self.rank + 1) * size
