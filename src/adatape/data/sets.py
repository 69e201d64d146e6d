"""LabelledSet, one interface to all data sets for training, evaluation, figures and the server."""

from __future__ import annotations

import dataclasses
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from adatape.data.batch import Batch, Shard
from adatape.data.images import Split, open_images, split_of
from adatape.data.imageset import ImageSet, Tally
from adatape.data.loaders import (
    Chunks,
    DecodingLoader,
    Labelled,
    ParityLoader,
    ResidentLoader,
    even_chunks,
    labelled_images,
)
from adatape.data.megapixel import CanvasLoader, Drawer
from adatape.data.parity import held_out_set, validation_set
from adatape.data.sampler import Order
from adatape.data.scenes import SceneLoader, labelled_scenes, open_scenes
from adatape.data.shard_loader import CHANNELS, ShardLoader, classes_of, labelled_shards
from adatape.data.shards import count_of, open_shards
from adatape.data.tars import index_shards
from adatape.data_config import Images, Megapixel, Parity, Scenes

EVAL_PIXELS = 1 << 24  # of a batch of large images in evaluation


class Loader(Protocol):
    """A process's part of every training batch."""

    @property
    def tally(self) -> Tally | None:
        """The counts of unreadable images; None if no image is decoded."""

    def batches(self, first: int) -> Iterator[Batch]:
        """Endless batches from step `first` on."""

    def epoch(self, step: int) -> float | None:
        """Epochs completed before a step; None if the number of samples is unknown."""


class LabelledSet(ABC):
    """The samples of one split, in a fixed order."""

    split: Split  # validation becomes test if no part of train is held out
    shape: tuple[int, ...]  # of a sample: channels, height and width, or the length of a sequence
    names: list[str]  # of the classes; numbers if the data has no names
    images: ImageSet | None = None  # random access; None for streams and for sequences
    eval_batch = 500  # batch size when a finished run is evaluated
    validation_batch = 500  # batch size of validation during training

    @property
    def classes(self) -> int:
        return len(self.names)

    @property
    def of_images(self) -> bool:
        return len(self.shape) == 3

    def check_exists(self) -> None:  # noqa: B027  most sets check when they are opened
        """Raises if files are missing that opening the set did not check."""

    def evaluation_batches(
        self, batch: int, shard: Shard, device: torch.device, workers: int = 0, chunks_of: Chunks = even_chunks
    ) -> Iterator[Labelled]:
        """One pass over a process's part of the set without augmentation, with at most one worker per core."""
        return self._read(chunks_of(self.samples, batch, shard), device, min(workers, os.cpu_count() or 1))

    @property
    @abstractmethod
    def samples(self) -> int:
        """The number of samples; remote tars without a shards.json are read to count them."""

    @abstractmethod
    def training_loader(self, batch: int, seed: int, shard: Shard, device: torch.device, workers: int = 0) -> Loader:
        """A loader of augmented batches, which do not depend on the number of workers."""

    @abstractmethod
    def evenly_spaced(self, count: int) -> LabelledSet:
        """At most `count` samples, evenly spaced over the set, since sets are often sorted by class."""

    @abstractmethod
    def _read(self, chunks: list[range], device: torch.device, workers: int) -> Iterator[Labelled]:
        """Yields these chunks of the set."""


def open_set(config: Images | Parity | Scenes | Megapixel, split: Split) -> LabelledSet:
    """Opens a split of the data set that `config` describes."""
    if isinstance(config, Scenes):
        return SceneImages(config, split, open_scenes(config, split))
    if isinstance(config, Megapixel):
        return MegapixelCanvases(config, split)
    if isinstance(config, Parity):
        return ParitySequences(config, split)
    if config.source == "shards":
        return ShardedImages(config, split)
    return IndexedImages(config, split, open_images(config, split))


class IndexedImages(LabelledSet):
    """Images with random access."""

    config: Any
    images: ImageSet

    def __init__(self, config: Images, split: Split, images: ImageSet) -> None:
        self.config, self.split, self.images = config, split_of(config, split), images
        self.shape, self.names = (images.channels, config.size, config.size), images.names

    @property
    def samples(self) -> int:
        return len(self.images)

    def training_loader(self, batch: int, seed: int, shard: Shard, device: torch.device, workers: int = 0) -> Loader:
        images, config = self.images, self.config
        order = Order(len(images), batch, seed, config.augment.repeats)
        if images.pixels is not None if config.resident is None else config.resident:
            return ResidentLoader(images, config, order, shard, device)
        return DecodingLoader(images, config, order, shard, device, min(workers, os.cpu_count() or 1))

    def evenly_spaced(self, count: int) -> IndexedImages:
        return type(self)(self.config, self.split, self.images.subset(evenly_apart(len(self.images), count)))

    def _read(self, chunks: list[range], device: torch.device, workers: int) -> Iterator[Labelled]:
        return labelled_images(self.images, self.config.size, chunks, device, workers, self.config.broken)


class SceneImages(IndexedImages):
    """Large images with several labels each, which are (n, classes), 1 or 0."""

    def __init__(self, config: Scenes, split: Split, images: ImageSet) -> None:
        self.config, self.split, self.images = config, split_of(config, split), images
        self.shape, self.names = (CHANNELS, *config.size), images.names
        most = max(1, EVAL_PIXELS // math.prod(config.size))
        self.eval_batch = self.validation_batch = min(LabelledSet.eval_batch, most)

    def training_loader(self, batch: int, seed: int, shard: Shard, device: torch.device, workers: int = 0) -> Loader:
        order = Order(len(self.images), batch, seed)
        return SceneLoader(self.images, self.config, order, shard, device, min(workers, os.cpu_count() or 1))

    def _read(self, chunks: list[range], device: torch.device, workers: int) -> Iterator[Labelled]:
        return labelled_scenes(self.images, self.config, chunks, device, workers)


class MegapixelCanvases(LabelledSet):
    """Canvases of Megapixel MNIST, drawn on the device."""

    def __init__(self, config: Megapixel, split: Split, most: int | None = None) -> None:
        self.config, self.split, self.most = config, split_of(config, split), most
        self.shape, self.names = (1, config.side, config.side), [str(digit) for digit in range(10)]
        batch = max(1, EVAL_PIXELS // config.side**2)
        self.eval_batch = self.validation_batch = min(LabelledSet.eval_batch, batch)

    @cached_property
    def canvases(self) -> Drawer:
        """Made on first use: building a model does not need them."""
        return Drawer(self.config, self.split)

    @property
    def samples(self) -> int:
        count = self.config.train if self.split == "train" else self.config.held_out
        return count if self.most is None else min(self.most, count)

    def check_exists(self) -> None:
        _ = self.canvases

    def training_loader(self, batch: int, seed: int, shard: Shard, device: torch.device, workers: int = 0) -> Loader:  # noqa: ARG002
        return CanvasLoader(self.canvases, Order(self.samples, batch, seed), shard, device)

    def evenly_spaced(self, count: int) -> MegapixelCanvases:
        """The first samples: they are random."""
        return MegapixelCanvases(self.config, self.split, count)

    def _read(self, chunks: list[range], device: torch.device, workers: int) -> Iterator[Labelled]:  # noqa: ARG002
        return self.canvases.labelled(chunks, device)


class ShardedImages(LabelledSet):
    """Images in tars: streamed for training, and read with random access for evaluation if the tars are local."""

    def __init__(self, config: Images, split: Split, most: int | None = None) -> None:
        self.config, self.split, self.most = config, split_of(config, split), most
        self.shape = (CHANNELS, config.size, config.size)
        self.names = [str(label) for label in range(classes_of(config))]

    @cached_property
    def urls(self) -> list[str]:
        """Resolved on first use: building a model does not need them."""
        return open_shards(self.config, self.split)

    @cached_property
    def images(self) -> ImageSet | None:  # type: ignore[override]  # computed on first use
        found = index_shards(self.urls, self.config, self.names)
        return found if found is None or self.most is None else found.subset(np.arange(min(self.most, len(found))))

    @property
    def samples(self) -> int:
        if self.images is not None:
            return len(self.images)
        total = sum(map(count_of, self.urls))
        return total if self.most is None else min(total, self.most)

    def check_exists(self) -> None:
        _ = self.urls

    def training_loader(self, batch: int, seed: int, shard: Shard, device: torch.device, workers: int = 0) -> Loader:
        return ShardLoader(self.config, batch, seed, shard, device, min(workers, os.cpu_count() or 1))

    def evenly_spaced(self, count: int) -> ShardedImages:
        """The first samples: shards are shuffled when written."""
        return ShardedImages(self.config, self.split, count)

    def _read(self, chunks: list[range], device: torch.device, workers: int) -> Iterator[Labelled]:
        config = self.config
        if self.images is None:
            return labelled_shards(self.urls, config, chunks, device, workers, self.samples)
        return labelled_images(self.images, config.size, chunks, device, workers, config.broken)


class ParitySequences(LabelledSet):
    """Symbol sequences: fixed for validation and test, new ones at every training step."""

    eval_batch, validation_batch = 400, 1600

    def __init__(self, config: Parity, split: Split) -> None:
        self.config, self.split, self.shape, self.names = config, split, (config.length,), ["even", "odd"]

    @property
    def samples(self) -> int:
        if self.split == "train":
            raise ValueError("split is train; parity has fresh sequences at every step, so score validation or test")
        return self.config.held_out

    def training_loader(self, batch: int, seed: int, shard: Shard, device: torch.device, workers: int = 0) -> Loader:  # noqa: ARG002
        return ParityLoader(self.config, batch, seed, shard, device)

    def evenly_spaced(self, count: int) -> ParitySequences:
        """The first samples: they are random."""
        fewer = dataclasses.replace(self.config, held_out=min(count, self.config.held_out))
        return ParitySequences(fewer, self.split)

    def _read(self, chunks: list[range], device: torch.device, workers: int) -> Iterator[Labelled]:  # noqa: ARG002
        draw = validation_set if self.split == "validation" else held_out_set
        drawn = draw(self.config.length, self.samples)
        for chunk in chunks:
            yield Labelled(*(each[chunk.start : chunk.stop].to(device) for each in drawn))


def evenly_apart(total: int, count: int) -> np.ndarray:
    """`count` evenly spaced indices below `total`, or all if there are no more."""
    return np.arange(total) if count >= total else np.arange(count) * total // count
