"""Tiles of a large image: which there are, reading them ahead, and summing up a resized image from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

AHEAD = 4  # tiles that are read while the device works on one


class Box(NamedTuple):
    """A rectangle of cells or pixels."""

    top: int
    left: int
    height: int
    width: int

    def within(self, outer: Box) -> tuple[slice, slice]:
        """Rows and columns of this box in what is stored for `outer`."""
        top, left = self.top - outer.top, self.left - outer.left
        return slice(top, top + self.height), slice(left, left + self.width)

    def in_pixels(self, cell: int, size: tuple[int, int]) -> Box:
        """The pixels of cells that lie in an image of this size."""
        top, left = self.top * cell, self.left * cell
        return Box(top, left, min(self.height * cell, size[0] - top), min(self.width * cell, size[1] - left))


class Tile(NamedTuple):
    """The cells whose scores are kept, and those with which these scores must be computed."""

    kept: Box
    around: Box


def tiles_of(rows: int, columns: int, side: int, halo: int = 0) -> list[Tile]:
    """Tiles row by row, computed on at most `side` × `side` cells each, of which `halo` at every cut are not kept.

    They are of one size wherever the image is larger, so that memory does not depend on its size.
    """
    spans = [(down, across) for down in _spans(rows, side, halo) for across in _spans(columns, side, halo)]
    return [Tile(*(Box(y, x, h, w) for (y, h), (x, w) in zip(down, across, strict=True))) for down, across in spans]


def _spans(count: int, side: int, halo: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """First cell and number of those kept and of those computed, tile by tile along one axis."""
    side, spans, first = max(side, 2 * halo + 1), [], 0
    while first < count:
        start = max(0, first - halo)
        stop = min(count, start + side)
        kept = count if stop == count else stop - halo
        spans.append(((first, kept - first), (start, stop - start)))
        first = kept
    return spans


class TileReader:
    """Tiles on a device by their number; the next ones in the order of calls, forward or backward, are read ahead."""

    def __init__(
        self,
        read: Callable[[Box], UInt8[Tensor, "h w ch"]],
        boxes: Sequence[Box],
        readers: Executor,
        device: torch.device,
    ) -> None:
        self.read, self.boxes, self.readers, self.device = read, boxes, readers, device
        self.pending: dict[int, Future[Tensor]] = {}
        self.last, self.tile = -1, torch.empty(0)

    def __getitem__(self, n: int) -> UInt8[Tensor, "ch h w"]:
        if n != self.last:
            step = 1 if n > self.last else -1
            soon = [i for i in range(n, n + step * (AHEAD + 1), step) if 0 <= i < len(self.boxes)]
            submit = self.readers.submit
            self.pending = {i: self.pending.get(i) or submit(self.read, self.boxes[i]) for i in soon}
            self.tile = self.pending.pop(n).result().to(self.device, non_blocking=True).movedim(-1, 0)
            self.last = n
        return self.tile


class ViewSum:
    """An image resized as by F.interpolate(mode="bilinear", antialias=True), summed up from disjoint parts of it."""

    def __init__(self, size: tuple[int, int], of: tuple[int, int], channels: int, device: torch.device) -> None:
        self.size, self.of = size, of
        self.total = torch.zeros(channels, *size, device=device)

    @torch.no_grad()
    def add(self, pixels: UInt8[Tensor, "ch h w"], box: Box) -> None:
        rows, down = resize_weights(box.top, box.height, self.of[0], self.size[0], self.total.device)
        columns, across = resize_weights(box.left, box.width, self.of[1], self.size[1], self.total.device)
        with torch.autocast(self.total.device.type, enabled=False):
            self.total[:, rows, columns] += down @ pixels.float() @ across.T


def resize_weights(
    first: int, count: int, of: int, to: int, device: torch.device
) -> tuple[slice, Float[Tensor, "outputs count"]]:
    """Which outputs depend on pixels `first` … of an axis of `of` pixels that is resized to `to`, and by what weights.

    A weight falls linearly with the distance from the output's centre, over one output or one pixel, the larger.
    """
    scale = of / to
    reach = max(scale, 1.0)
    start = max(0, math.floor((first - reach) / scale - 0.5))
    stop = min(to, math.ceil((first + count + reach) / scale - 0.5) + 1)
    centre = (torch.arange(start, stop, device=device, dtype=torch.float64)[:, None] + 0.5) * scale

    def weights(pixels: Tensor) -> Tensor:
        near = (1 - (pixels + 0.5 - centre).abs() / reach).clamp(min=0)
        return near * ((pixels >= 0) & (pixels < of))

    seen = (centre - reach).floor() + torch.arange(math.ceil(2 * reach) + 1, device=device)
    own = torch.arange(first, first + count, device=device, dtype=torch.float64)
    return slice(start, stop), (weights(own) / weights(seen).sum(1, keepdim=True)).float()
