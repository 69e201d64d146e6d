"""Data as training, scoring, figures and the server use it: one kind of set, however its samples are stored."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from adatape.config import Images, Parity
from adatape.data.batch import Batch, Part
from adatape.data.images import Split, open_images
from adatape.data.imageset import ImageSet, Tally
from adatape.data.loaders import (
    Chunks,
    DecodingLoader,
    Labelled,
    ParityLoader,
    ResidentLoader,
    even_chunks,
    labelled_images,
    labelled_sequences,
)
from adatape.data.parity import Sequences, held_out_set, validation_set
from adatape.data.sampler import Order
from adatape.data.shard_loader import CHANNELS, ShardLoader, classes_of, labelled_shards
from adatape.data.shards import count_of, known_total, local_path, open_shards
from adatape.data.tars import index_shards


class Loader(Protocol):
    """A process's part of every training batch."""

    @property
    def tally(self) -> Tally | None:
        """Of images that could not be read; None where none is decoded."""

    def batches(self, first: int) -> Iterator[Batch]:
        """From step `first` on, without end."""

    def epoch(self, step: int) -> float | None:
        """Epochs done before a step, where anything says how many samples there are."""


class LabelledSet(ABC):
    """The samples of one split, in a fixed order."""

    split: Split  # whose samples these are: validation is test where no share of train is kept for it
    shape: tuple[int, ...]  # of a sample: channels, height and width, or the length of a sequence
    names: list[str]  # of the classes; numbers where the data has no names
    at_once = 500  # samples that a finished run is scored on in one forward
    validated_at_once = 500  # and a run in training

    @property
    def classes(self) -> int:
        return len(self.names)

    @property
    def of_images(self) -> bool:
        return len(self.shape) == 3

    @property
    @abstractmethod
    def samples(self) -> int | None:
        """How many there are; None where that takes reading them all, or where they have no end."""

    @property
    def images(self) -> ImageSet | None:
        """The samples by number; None where they can only be read one after the other, or are no images."""
        return None

    def check_exists(self) -> None:  # noqa: B027  most sets are looked for when they are opened
        """Raises where files are missing that opening has not looked for."""

    @abstractmethod
    def scored(
        self, batch: int, part: Part, device: torch.device, workers: int = 0, chunks_of: Chunks = even_chunks
    ) -> Iterator[Labelled]:
        """One pass over a process's part of the set, unvaried, by no more workers than there are cores."""

    @abstractmethod
    def training(self, batch: int, seed: int, part: Part, device: torch.device, workers: int = 0) -> Loader:
        """Batches of varied samples; the number of workers changes nothing in them."""

    @abstractmethod
    def spread(self, count: int) -> LabelledSet:
        """At most `count` of the samples, so that all classes are met: sets are often sorted by class."""


def open_set(config: Images | Parity, split: Split) -> LabelledSet:
    """The split that `config` names."""
    if isinstance(config, Parity):
        return ParitySequences(config, split)
    return ShardedImages(config, split) if config.source == "shards" else IndexedImages(config, split)


class IndexedImages(LabelledSet):
    """Images that are read by number."""

    def __init__(self, config: Images, split: Split, images: ImageSet | None = None) -> None:
        self.config, self.split = config, _split_of(config, split)
        self._images = open_images(config, split) if images is None else images
        self.shape = (self._images.channels, config.size, config.size)
        self.names = self._images.names

    @property
    def samples(self) -> int:
        return len(self._images)

    @property
    def images(self) -> ImageSet:
        return self._images

    def scored(
        self, batch: int, part: Part, device: torch.device, workers: int = 0, chunks_of: Chunks = even_chunks
    ) -> Iterator[Labelled]:
        config = self.config
        return labelled_images(
            self._images, config.size, batch, part, device, _at_most_cores(workers), config.broken, chunks_of
        )

    def training(self, batch: int, seed: int, part: Part, device: torch.device, workers: int = 0) -> Loader:
        images, config = self._images, self.config
        order = Order(len(images), batch, seed, config.augment.repeats)
        if images.pixels is not None if config.resident is None else config.resident:
            return ResidentLoader(images, config, order, part, device)
        return DecodingLoader(images, config, order, part, device, _at_most_cores(workers))

    def spread(self, count: int) -> IndexedImages:
        return IndexedImages(self.config, self.split, self._images.part(evenly_apart(len(self._images), count)))


class ShardedImages(LabelledSet):
    """Images in tars: trained on as streams, and scored by number where the tars lie on this disk."""

    def __init__(self, config: Images, split: Split, most: int | None = None) -> None:
        self.config, self.split, self.most = config, _split_of(config, split), most
        self.shape = (CHANNELS, config.size, config.size)
        self.names = [str(label) for label in range(classes_of(config))]

    @cached_property
    def urls(self) -> list[str]:
        """Looked for when they are needed: to build a model, its config says enough."""
        return open_shards(self.config, self.split)

    @property
    def samples(self) -> int | None:
        unknown = known_total(self.urls) is None and None in map(local_path, self.urls)
        return None if unknown else self._total()

    @cached_property
    def images(self) -> ImageSet | None:
        found = index_shards(self.urls, self.config, self.names)
        return found if found is None or self.most is None else found.part(np.arange(min(self.most, len(found))))

    def check_exists(self) -> None:
        _ = self.urls

    def scored(
        self, batch: int, part: Part, device: torch.device, workers: int = 0, chunks_of: Chunks = even_chunks
    ) -> Iterator[Labelled]:
        config, workers = self.config, _at_most_cores(workers)
        if self.images is not None:
            return labelled_images(self.images, config.size, batch, part, device, workers, config.broken, chunks_of)
        return labelled_shards(self.urls, self._total(), config, batch, part, device, workers, chunks_of)

    def training(self, batch: int, seed: int, part: Part, device: torch.device, workers: int = 0) -> Loader:
        return ShardLoader(self.config, batch, seed, part, device, _at_most_cores(workers))

    def spread(self, count: int) -> ShardedImages:
        """The first ones: shards are mixed already."""
        return ShardedImages(self.config, self.split, count)

    def _total(self) -> int:
        total = sum(map(count_of, self.urls))
        return total if self.most is None else min(total, self.most)


class ParitySequences(LabelledSet):
    """Sequences of symbols: the same ones in validation and test, fresh ones at every step of training."""

    at_once, validated_at_once = 400, 1600

    def __init__(self, config: Parity, split: Split) -> None:
        self.config, self.split = config, split
        self.shape, self.names = (config.length,), ["even", "odd"]

    @cached_property
    def sequences(self) -> Sequences:
        if self.split == "train":
            raise ValueError("split is train; parity has fresh sequences at every step, so score validation or test")
        draw = validation_set if self.split == "validation" else held_out_set
        return draw(self.config.length, self.config.held_out)

    @property
    def samples(self) -> int | None:
        return None if self.split == "train" else self.config.held_out

    def scored(
        self,
        batch: int,
        part: Part,
        device: torch.device,
        workers: int = 0,  # noqa: ARG002  nothing is decoded
        chunks_of: Chunks = even_chunks,
    ) -> Iterator[Labelled]:
        return labelled_sequences(self.sequences, batch, part, device, chunks_of)

    def training(self, batch: int, seed: int, part: Part, device: torch.device, workers: int = 0) -> Loader:  # noqa: ARG002
        return ParityLoader(self.config, batch, seed, part, device)

    def spread(self, count: int) -> ParitySequences:
        """The first ones: they are drawn at random."""
        return ParitySequences(dataclasses.replace(self.config, held_out=min(count, self.config.held_out)), self.split)


def evenly_apart(total: int, count: int) -> np.ndarray:
    """`count` places among `total`; all of them where there are no more."""
    return np.arange(total) if count >= total else np.arange(count) * total // count


def _split_of(config: Images, split: Split) -> Split:
    return "test" if split == "validation" and config.validate_on is None else split


def _at_most_cores(workers: int) -> int:
    return min(workers, os.cpu_count() or 1)
