"""Large images with several labels each: training batches, which flip and recolour them, and evaluation batches."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from adatape.counter_rng import key_of, keys_of, uniform
from adatape.data.augment import scaled
from adatape.data.batch import Batch, Shard
from adatape.data.images import Split
from adatape.data.imageset import Files, ImageSet, Tally, read_or_next
from adatape.data.label_table import read_table
from adatape.data.letterbox import letterboxed
from adatape.data.loaders import (
    AUGMENT,
    MODEL,
    BatchSampler,
    Labelled,
    errors_as_values,
    even_chunks,
    from_workers,
)
from adatape.data.sampler import Order
from adatape.data_config import Scenes

CHANNELS = 3
MOST_RESIDENT = 4_000_000_000  # bytes of decoded images that stay on the device
DECODED_AT_ONCE = 16
Slots = Iterable[list[tuple[int, int]]]  # image and position of the samples of each batch
TINT = 0.3  # of the strength of brightness: how much channels may differ


class Fitted(NamedTuple):
    """A batch of images at the model's size."""

    pixels: Tensor  # (n, 3, h, w) uint8
    labels: Tensor  # (n, classes), 1 or 0
    position: Tensor  # (n,) sample numbers over the whole run
    broken: Sequence[str] = ()  # a note for each unreadable image that was replaced
    converted: int = 0


def open_scenes(config: Scenes, split: Split) -> Files:
    """The images of a split; their labels are (n, classes), 1 or 0."""
    table = read_table(config, split)
    return Files(table.names, table.labels, table.files, config.exif_orientation)


def augmented(
    pixels: UInt8[Tensor, "n 3 h w"], keys: Int[Tensor, "n"], flip: bool, jitter: float
) -> Float[Tensor, "n 3 h w"]:
    """Flips, changes contrast, brightness and tint, and scales to -1 … 1; a function of each image's key."""
    turned, gain, shift, *tint = (uniform(keys, 3 + CHANNELS)[:, n, None, None, None] for n in range(3 + CHANNELS))
    x = scaled(pixels)
    if flip:
        x = torch.where(turned < 0.5, x.flip(-1), x)
    if jitter:
        colour = _signed(shift) + TINT * _signed(torch.cat(tint, 1))
        x = (x * (1 + jitter * _signed(gain)) + jitter * colour).clamp(-1, 1)
    return x


def _signed(draws: Tensor) -> Tensor:
    return 2 * draws - 1


class SceneLoader:
    """Training batches: images are decoded by workers, once if they stay on the device, and augmented there."""

    def __init__(
        self, images: ImageSet, data: Scenes, order: Order, shard: Shard, device: torch.device, workers: int
    ) -> None:
        self.images, self.data, self.order, self.shard, self.device = images, data, order, shard, device
        self.workers, self.tally = workers, Tally(len(images), data.broken)
        small = len(images) * CHANNELS * math.prod(data.size) <= MOST_RESIDENT
        self.resident = small if data.resident is None else data.resident

    def batches(self, first: int) -> Iterator[Batch]:
        plan = BatchSampler(self.order, first, *self.shard.bounds(self.order.batch))
        with closing(self._kept(plan) if self.resident else self._decoded(plan)) as found:
            for each in found:
                keys = keys_of(key_of(self.order.seed, AUGMENT), each.position)
                x = augmented(each.pixels, keys, self.data.flip, self.data.jitter)
                yield Batch(x, each.labels, keys_of(key_of(self.order.seed, MODEL), each.position))

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def _kept(self, plan: Slots) -> Generator[Fitted, None, None]:
        """Rows of the whole set, which is decoded first."""
        count = len(self.images)
        pixels = torch.empty(count, CHANNELS, *self.data.size, dtype=torch.uint8, device=self.device)
        labels = torch.empty(self.images.labels.shape, device=self.device)
        with closing(self._decoded(_in_order(even_chunks(count, DECODED_AT_ONCE, Shard())))) as found:
            for each in found:
                pixels[each.position], labels[each.position] = each.pixels, each.labels
        for slots in plan:
            ids, position = (torch.tensor(column, device=self.device) for column in zip(*slots, strict=True))
            yield Fitted(pixels[ids], labels[ids], position)

    def _decoded(self, plan: Slots) -> Generator[Fitted, None, None]:
        return _fitted(self.images, self.data.size, plan, self.device, self.workers, self.tally)


def labelled_scenes(
    images: ImageSet, data: Scenes, chunks: list[range], device: torch.device, workers: int
) -> Iterator[Labelled]:
    """Yields these chunks of a set without augmentation."""
    tally = Tally(len(images), data.broken)
    with closing(_fitted(images, data.size, _in_order(chunks), device, workers, tally)) as found:
        for each in found:
            yield Labelled(scaled(each.pixels), each.labels)


def _in_order(chunks: list[range]) -> Slots:
    return [[(n, n) for n in chunk] for chunk in chunks]


def _fitted(
    images: ImageSet, size: tuple[int, int], plan: Slots, device: torch.device, workers: int, tally: Tally
) -> Generator[Fitted, None, None]:
    """Batches that workers decode, on the device; `plan` has the image and the position of every sample."""
    with closing(from_workers(_FittedImages(images, size), workers, device, plan)) as found:
        for each in found:
            tally.add(len(each.labels), each.broken, each.converted)
            pixels, labels, position = (part.to(device, non_blocking=True) for part in each[:3])
            yield Fitted(pixels, labels, position)


class _FittedImages(Dataset[Any]):
    """Reads a whole batch in one worker."""

    def __init__(self, images: ImageSet, size: tuple[int, int]) -> None:
        self.images, self.size = images, size

    @errors_as_values
    def __getitems__(self, slots: list[tuple[int, int]]) -> Fitted:
        reads = [read_or_next(self.images, i) for i, _ in slots]
        return Fitted(
            torch.stack([letterboxed(read.image, self.size) for read in reads]),
            torch.from_numpy(np.stack([read.label for read in reads])),
            torch.tensor([position for _, position in slots]),
            [note for read in reads for note in read.broken],
            sum(read.converted for read in reads),
        )
