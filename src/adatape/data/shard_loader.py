"""A loader for shards: streams are distributed over processes and their workers, without effect on batches.

Every stream fills an equal part of each global batch. Mixup uses the next sample of the same stream, which may be in
the next batch, so that no process needs samples of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from adatape.counter_rng import key_of, keys_of
from adatape.data.augment import augment_image, scale_and_erase
from adatape.data.batch import Batch, Shard
from adatape.data.imageset import Tally
from adatape.data.loaders import (
    AUGMENT,
    Labelled,
    cropped,
    errors_as_values,
    from_workers,
    make_batch,
    mixing_of,
    neighbours,
    scored,
)
from adatape.data.shards import known_total, open_shards
from adatape.data.streams import ShardStream, ordered_samples, owned_streams, streams_of
from adatape.data_config import Images

CHANNELS = 3  # shards decode to RGB


class Rows(NamedTuple):
    """The rows of one stream for a step."""

    stream: int
    pixels: Tensor  # (n, c, h, w); with Mixup or CutMix the last is the first of the next step
    labels: Tensor
    position: Tensor
    broken: list[str]
    converted: int


class Layout(NamedTuple):
    """How streams are combined into a batch."""

    urls: list[str]
    streams: int
    batch: int
    seed: int
    repeats: int

    @property
    def slots(self) -> int:
        """Samples of a stream in every batch."""
        return self.batch // self.streams

    @property
    def distinct(self) -> int:
        """Distinct images of a stream per batch; if repeats do not divide its slots, the last have one copy less."""
        return -(-self.slots // self.repeats)

    def position(self, stream: int, step: int) -> Tensor:
        """Sample numbers over the whole run of a stream's slots."""
        first = step * self.batch + stream * self.slots
        return torch.arange(first, first + self.slots)


class ShardLoader:
    """Shards, read, decoded and augmented by worker processes."""

    channels = CHANNELS

    def __init__(self, data: Images, batch: int, seed: int, shard: Shard, device: torch.device, workers: int) -> None:
        if data.resident:
            raise ValueError("resident is true, but shards are streamed; it must be false or null")
        shard.bounds(batch)
        urls = open_shards(data, "train")
        self.layout = Layout(urls, streams_of(urls, batch), batch, seed, data.augment.repeats)
        self.own = owned_streams(self.layout.streams, shard.rank, shard.world)
        self.data, self.device, self.workers = data, device, min(workers, len(self.own))
        self.classes, self.samples = classes_of(data), data.samples or known_total(urls)
        self.tally = Tally(self.samples, data.broken)

    def batches(self, first: int) -> Iterator[Batch]:
        streams = _Streams(self.layout, self.data, self.own, first, self.classes)
        with closing(from_workers(streams, self.workers, self.device)) as decoded:
            for step in itertools.count(first):
                given = itertools.chain.from_iterable(next(decoded) for _ in range(max(1, self.workers)))
                rows = sorted(given, key=lambda each: each.stream)
                for each in rows:
                    self.tally.add(self.layout.distinct, each.broken, each.converted)
                yield self._batch(rows, step)

    def epoch(self, step: int) -> float | None:
        """Epochs completed before a step; None if the number of samples is unknown."""
        return step * self.layout.distinct * self.layout.streams / self.samples if self.samples else None

    def _batch(self, rows: list[Rows], step: int) -> Batch:
        parts = [torch.cat([getattr(each, name) for each in rows]) for name in ("pixels", "labels", "position")]
        pixels, labels, position = (each.to(self.device, non_blocking=True) for each in parts)
        seed = self.layout.seed
        x = scale_and_erase(pixels, keys_of(key_of(seed, AUGMENT), position), self.data.augment)
        mixing = mixing_of(self.data, seed, step, self.device)
        return make_batch(x, labels, position, seed, mixing, self.data, self.classes, len(rows))


class _Streams(IterableDataset[Any]):
    """The streams of one process; each worker reads some of them."""

    def __init__(self, layout: Layout, data: Images, own: range, first: int, classes: int) -> None:
        self.layout, self.data, self.own, self.first, self.classes = layout, data, own, first, classes
        self.key = key_of(layout.seed, AUGMENT)

    def __iter__(self) -> Iterator[list[Rows] | Exception]:
        info = get_worker_info()
        mine = self.own if info is None else self.own[info.id :: info.num_workers]
        running = [self._rows(stream) for stream in mine]
        next_rows = errors_as_values(lambda: [next(rows) for rows in running])
        while True:
            yield next_rows()

    def _rows(self, stream: int) -> Iterator[Rows]:
        if not neighbours(self.data.augment):
            return self._own_rows(stream)
        return itertools.starmap(_with_neighbour, itertools.pairwise(self._own_rows(stream)))

    def _own_rows(self, stream: int) -> Iterator[Rows]:
        layout, data = self.layout, self.data
        source = ShardStream(
            layout.urls,
            stream,
            layout.streams,
            layout.seed,
            modes=data.modes,
            classes=self.classes,
            exif_orientation=data.exif_orientation,
        ).samples(self.first * layout.distinct)
        for step in itertools.count(self.first):
            position = layout.position(stream, step)
            keys = keys_of(self.key, position).tolist()
            pixels, labels, converted = [torch.empty(0)] * layout.slots, [0] * layout.slots, 0
            broken: list[str] = []
            for number, sample in enumerate(itertools.islice(source, layout.distinct)):
                for slot in range(number, layout.slots, layout.distinct):
                    pixels[slot] = augment_image(sample.image, keys[slot], data.augment, data.size)
                    labels[slot] = sample.label
                broken.extend(sample.broken)
                converted += sample.converted
            yield Rows(stream, torch.stack(pixels), torch.tensor(labels), position, broken, converted)


def _with_neighbour(rows: Rows, after: Rows) -> Rows:
    pixels, labels, position = (torch.cat([a, b[:1]]) for a, b in zip(rows[1:4], after[1:4], strict=True))
    return rows._replace(pixels=pixels, labels=labels, position=position)


class _CroppedImages(Dataset[Any]):
    """Centre crops of test samples, by number."""

    def __init__(self, urls: list[str], data: Images, classes: int) -> None:
        self.urls, self.data, self.classes = urls, data, classes

    @errors_as_values
    def __getitems__(self, numbers: range) -> tuple[Tensor, Tensor, list[str]]:
        data, stretch = self.data, (numbers.start, numbers.stop)
        samples = ordered_samples(self.urls, *stretch, data.modes, self.classes, data.exif_orientation)
        return cropped(samples, data.size)


def labelled_shards(
    urls: list[str], data: Images, chunks: list[range], device: torch.device, workers: int, total: int
) -> Iterator[Labelled]:
    """Yields these chunks of `total` samples without augmentation, streamed in order."""
    decoded = from_workers(_CroppedImages(urls, data, classes_of(data)), workers, device, chunks)
    return scored(decoded, device, Tally(total, data.broken))


def classes_of(data: Images) -> int:
    if data.classes is None:
        raise ValueError("classes is None; shards do not store the number of classes, so set data.classes")
    return data.classes
