"""Streams of samples from shards: sample m of a stream is a function of the seed.

Shard k belongs to stream k % streams. A stream reads its shards in endless passes, each in a new order, and shuffles
samples within windows of a shard. Every stream fills an equal part of each batch. A resumed run starts every stream at
a sample number.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from PIL import Image

from adatape.counter_rng import key_of
from adatape.data.decode import BrokenImage, Decoded, Modes, decode
from adatape.data.imageset import TRIES
from adatape.data.shards import Raw, count_of, permutation, raws_from, raws_of

STREAMS = 16
WINDOW = 128  # samples of a shard that are shuffled together, held in memory undecoded
SHARDS, WINDOWS = 201, 202  # first words of keys
Decode = Callable[[bytes, str], Decoded]


class ShardSample(NamedTuple):
    id: int  # unique over all streams
    image: Image.Image
    label: int
    broken: tuple[str, ...]  # a note for each unreadable image that this one replaces
    converted: bool


def streams_of(urls: Sequence[str], batch: int = 0) -> int:
    """The number of streams: a power of two, at most one per shard, that divides the batch."""
    return math.gcd(1 << (min(len(urls), STREAMS).bit_length() - 1), batch)


def owned_streams(streams: int, rank: int = 0, ranks: int = 1) -> range:
    """The streams of one process, which fill its part of a batch."""
    if streams % ranks:
        raise ValueError(
            f"{ranks} processes do not divide {streams} streams; the number of streams is a power of two that divides "
            f"the batch, at most {STREAMS} and at most one per shard"
        )
    own = streams // ranks
    return range(rank * own, (rank + 1) * own)


@dataclass(frozen=True)
class ShardStream:
    """The endless sequence of samples of one stream."""

    urls: Sequence[str]
    stream: int
    streams: int
    seed: int
    window: int = WINDOW
    modes: Modes = "convert"
    classes: int | None = None
    exif_orientation: bool = False

    def samples(self, first: int = 0) -> Iterator[ShardSample]:
        """Samples from number `first` on; earlier ones are not decoded, nor read if shards.json counts them."""
        ids = itertools.count(first * self.streams + self.stream, self.streams)
        decoder = partial(decode, modes=self.modes, exif_orientation=self.exif_orientation)
        return _readable(self._raws(first), ids, decoder)

    def order(self, turn: int) -> list[str]:
        """This stream's shards in the order of pass `turn`."""
        own = self.urls[self.stream :: self.streams]
        return [own[k] for k in permutation(key_of(SHARDS, self.seed, turn, self.stream), len(own))]

    def _raws(self, first: int) -> Iterator[Raw]:
        start, skip = self._place(first) if first else (0, 0)
        for turn in itertools.count(start):
            for url in self.order(turn):
                if skip and skip >= (count := count_of(url)):
                    skip -= count
                    continue
                yield from self._mixed(url, turn, skip)
                skip = 0

    def _place(self, first: int) -> tuple[int, int]:
        """The pass that contains sample `first`, and the sample's number in it."""
        passed = 0
        for url in self.order(0):
            passed += count_of(url)
            if first < passed:
                return 0, first
        return divmod(first, passed)

    def _mixed(self, url: str, turn: int, skip: int) -> Iterator[Raw]:
        first, inside = divmod(skip, self.window)
        raws = raws_of(url, first * self.window, self.classes)
        shard = self.urls.index(url)
        for block in itertools.count(first):
            held = list(itertools.islice(raws, self.window))
            if not held:
                return
            order = permutation(key_of(WINDOWS, self.seed, turn, shard, block), len(held))
            yield from (held[i] for i in order[inside:])
            inside = 0


def ordered_samples(
    urls: Sequence[str],
    start: int = 0,
    stop: int | None = None,
    modes: Modes = "convert",
    classes: int | None = None,
    exif_orientation: bool = False,
) -> Iterator[ShardSample]:
    """Samples start to stop in the order of the shards; an unreadable last sample is replaced by the first."""
    numbers = itertools.count(start) if stop is None else range(start, stop)
    decoder = partial(decode, modes=modes, exif_orientation=exif_orientation)
    return _readable(raws_from(urls, start, classes), numbers, decoder, lambda: raws_from(urls, 0, classes))


def _readable(
    raws: Iterator[Raw],
    ids: Iterable[int],
    decoder: Decode,
    beyond: Callable[[], Iterable[Raw]] = tuple,
) -> Iterator[ShardSample]:
    """Decoded samples; an unreadable one is replaced by the next readable one, or one of `beyond`, under its number."""
    ahead: deque[Raw] = deque()  # the sample whose turn it is, and those that were looked at in its place

    def from_here() -> Iterator[Raw]:
        yield from tuple(ahead)
        for raw in raws:
            ahead.append(raw)
            yield raw
        yield from beyond()

    for number in ids:
        ahead.extend(itertools.islice(raws, 0 if ahead else 1))
        if not ahead:
            return
        yield _first_readable(number, from_here(), decoder)
        ahead.popleft()


def _first_readable(number: int, raws: Iterable[Raw], decoder: Decode) -> ShardSample:
    notes: list[str] = []
    for raw in itertools.islice(raws, TRIES):
        try:
            image, converted = decoder(raw.content, raw.name)
        except BrokenImage as error:
            notes.append(str(error))
        else:
            return ShardSample(number, image, raw.label, tuple(notes), converted)
    raise ValueError(f"{len(notes)} images in a row could not be read: first {notes[0]}")
