"""What a loader hands the training loop, and which part of it a process takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """A process's part of one step's samples."""

    x: Tensor  # (b, …), what the model takes
    target: Tensor  # (b,) int64 labels, or (b, classes) shares of each class
    key: Tensor  # (b,) int64, what the model's own randomness for each sample depends on


class Part(NamedTuple):
    """One process of several: it takes an equal, contiguous part of every global batch."""

    rank: int = 0
    world: int = 1

    def bounds(self, batch: int) -> tuple[int, int]:
        if batch % self.world:
            raise ValueError(f"batch is {batch}; {self.world} processes cannot share it equally")
        size = batch // self.world
        return self.rank * size, (self.rank + 1) * size
