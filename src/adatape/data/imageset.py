"""Labelled image sets with random access; an unreadable image is reported and replaced by the next one."""

from __future__ import annotations

import io
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, UInt8
from PIL import Image

from adatape.data.decode import BrokenImage, Decoded, decode, read_regular

TRIES = 100  # unreadable images in a row after which reading stops with an error
EARLIEST = 100  # reads before the fraction of unreadable images is checked
KEPT_NOTES = 20
Labels = Int64[np.ndarray, "n"] | Float32[np.ndarray, "n classes"]


class Read(NamedTuple):
    image: Image.Image
    label: Any  # a row of the set's labels
    broken: tuple[str, ...]  # a note for each unreadable image that this one replaces
    converted: bool


class ImageSet(ABC):
    """A labelled set with random access; `labels` are classes, or (n, classes) 1 or 0 where there may be several."""

    channels: int = 3

    def __init__(self, names: list[str], labels: Labels) -> None:
        self.names = names
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        return len(self.names)

    @property
    def pixels(self) -> UInt8[np.ndarray, "n h w c"] | None:
        return None

    @abstractmethod
    def load(self, i: int) -> Decoded:
        """The image, and whether it had to be converted."""

    def read(self, i: int) -> Image.Image:
        return self.load(i).image

    def file(self, i: int) -> tuple[str, bytes]:
        """Suffix and content of an image file; PNG by default."""
        content = io.BytesIO()
        self.read(i).save(content, "PNG")
        return "png", content.getvalue()

    @abstractmethod
    def subset(self, rows: Int64[np.ndarray, "m"]) -> ImageSet:
        """The subset of these rows."""


class Pixels(ImageSet):
    """Images of one size as one array, in memory or memory-mapped, with 1 or 3 channels."""

    def __init__(
        self,
        names: list[str],
        labels: Int64[np.ndarray, "n"],
        stored: UInt8[np.ndarray, "all h w c"],
        rows: Int64[np.ndarray, "n"] | None = None,
    ) -> None:
        super().__init__(names, labels)
        self.stored, self.rows = stored, rows
        self.channels = stored.shape[-1]

    @cached_property
    def pixels(self) -> UInt8[np.ndarray, "n h w c"]:
        """All images; copied once if the set is a subset."""
        return self.stored if self.rows is None else self.stored[self.rows]

    def load(self, i: int) -> Decoded:
        row = self.stored[i if self.rows is None else self.rows[i]]
        return Decoded(Image.fromarray(row[..., 0] if self.channels == 1 else row), False)

    def subset(self, rows: Int64[np.ndarray, "m"]) -> Pixels:
        return Pixels(self.names, self.labels[rows], self.stored, rows if self.rows is None else self.rows[rows])


class Files(ImageSet):
    """Image files, decoded when read."""

    def __init__(
        self,
        names: list[str],
        labels: Labels,
        paths: Iterable[str | bytes | Path],
        exif_orientation: bool = False,
    ) -> None:
        super().__init__(names, labels)
        self.exif_orientation = exif_orientation
        # One array instead of a list of strings, whose reference counts would make workers copy memory pages.
        self.paths = np.array([os.fsencode(path) for path in paths])

    def path(self, i: int) -> str:
        return os.fsdecode(self.paths[i].item())

    def load(self, i: int) -> Decoded:
        return decode(*self._content(i), exif_orientation=self.exif_orientation)

    def file(self, i: int) -> tuple[str, bytes]:
        suffix = Path(self.path(i)).suffix[1:].lower()
        return (suffix, self._content(i)[0]) if suffix in ("jpg", "jpeg", "png", "webp") else super().file(i)

    def subset(self, rows: Int64[np.ndarray, "m"]) -> Files:
        return Files(self.names, self.labels[rows], self.paths[rows].tolist(), self.exif_orientation)

    def _content(self, i: int) -> tuple[bytes, str]:
        try:
            return read_regular(self.path(i)), self.path(i)
        except OSError as error:
            raise BrokenImage(f"{self.path(i)}: {error.strerror}") from error


def read_or_next(images: ImageSet, i: int) -> Read:
    """Image `i`, or the first readable one after it, with a note for each that was skipped."""
    notes: list[str] = []
    for row in (np.arange(i, i + min(TRIES, len(images))) % len(images)).tolist():
        try:
            image, converted = images.load(row)
        except BrokenImage as error:
            notes.append(str(error))
        else:
            return Read(image, images.labels[row], tuple(notes), converted)
    raise ValueError(f"{len(notes)} images in a row could not be read: first {notes[0]}")


class Tally:
    """Counts images read and unreadable; raises once more than the fraction `allowed` of `total` is unreadable."""

    def __init__(self, total: int | None, allowed: float) -> None:
        if not 0 <= allowed <= 1:
            raise ValueError(f"broken is {allowed}; it must be a fraction from 0 to 1")
        self.allowed, self.total = allowed, total
        self.reads = self.converted = 0
        self.broken: set[str] = set()
        self.first: list[str] = []

    def add(self, reads: int, broken: Iterable[str], converted: int = 0) -> None:
        self.reads += reads
        self.converted += converted
        for note in broken:
            if note not in self.broken and len(self.first) < KEPT_NOTES:
                self.first.append(note)
            self.broken.add(note)
        if len(self.broken) > self._most():
            raise ValueError(self._verdict())

    @property
    def seen(self) -> int:
        """Distinct images read so far: reads up to the size of the set."""
        return self.reads if self.total is None else min(self.reads, self.total)

    def _most(self) -> float:
        """The limit so far: the expected count plus three standard deviations, at most the limit of the whole set."""
        if self.allowed == 0:
            return 0.0
        expected = self.allowed * self.seen
        so_far = expected + 3 * math.sqrt(expected) if self.reads >= EARLIEST else math.inf
        return max(1.0, min(so_far, math.inf if self.total is None else self.allowed * self.total))

    def _verdict(self) -> str:
        count, seen = len(self.broken), max(self.seen, len(self.broken))
        return (
            f"{count:,} of {seen:,} images could not be read, {100 * count / seen:.1f} %; "
            f"broken allows {100 * self.allowed:.1f} %: first {self.first[0]}"
        )
