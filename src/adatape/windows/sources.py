"""Where a model of windows gets its pixels from: a tensor on its device, or an opened image that is read in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adatape.cuda_graphs import may_look_at
from adatape.windows.scan import Scan, Scanned, cut_windows, within_image
from adatape.windows.tiles import Box, TileReader, ViewSum, tiles_of

READERS = 4  # threads
SCANNED_AT_ONCE = 2**23  # pixels times channels


@runtime_checkable
class OpenedImage(Protocol):
    """What `adatape.open_image` returns; its documentation is there."""

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tile: int

    def read(self, top: int, left: int, height: int, width: int) -> UInt8[np.ndarray, "ch h w"]: ...


@runtime_checkable
class Source(Protocol):
    """Images of one size."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def scanned(self, scan: Scan) -> Scanned: ...

    def windows(self, centres: Int[Tensor, "b t 2"], size: int) -> Float[Tensor, "b t ch size size"]: ...

    def view(self, size: tuple[int, int]) -> Float[Tensor, "b ch height width"]: ...


class Images(NamedTuple):
    """Standardised images in one tensor."""

    pixels: Float[Tensor, "b ch height width"]
    listed: bool = False  # whether it is an image of a list, whose batch norms use their running statistics

    @property
    def shape(self) -> torch.Size:
        return self.pixels.shape

    def scanned(self, scan: Scan) -> Scanned:
        with running_statistics(scan) if self.listed else nullcontext():
            if scan.training or not may_look_at(self.pixels):
                return scan(self.pixels)
            # Of more at once, a CPU's allocator returns the memory to the system after every operation.
            at_once = max(1, SCANNED_AT_ONCE // max(1, self.pixels[:1].numel()))
            return _of_each(torch.cat, *map(scan, self.pixels.split(at_once)))

    def windows(self, centres: Tensor, size: int) -> Tensor:
        return cut_windows(self.pixels, centres, size)

    def view(self, size: tuple[int, int]) -> Tensor:
        if self.shape[-2:] == size:
            return self.pixels
        # In float32: for half precision there is no such resizing on a CPU.
        return F.interpolate(self.pixels.float(), size, mode="bilinear", antialias=True).to(self.pixels.dtype)


class TiledImage:
    """An opened image during one call of a model, with at most one tile of it on the device.

    The view is summed up while the image is scanned. In the backward pass, tiles are read and scanned again.
    """

    def __init__(
        self,
        image: OpenedImage,
        device: torch.device,
        view: tuple[int, int] | None,
        rescale: Callable[[Tensor], Tensor] = lambda pixels: pixels,  # of standardised pixels
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.image, self.device, self.view_size, self.rescale, self.dtype = image, device, view, rescale, dtype
        self.shape = (1, *image.shape)
        self.made_view: Tensor | None = None
        mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (image.mean, image.std))
        self.scale, self.shift = 255 * std, mean / std
        # A tensor's device has an index, which set_device needs; "cuda" alone has none.
        ready = partial(torch.cuda.set_device, self.scale.device) if device.type == "cuda" else None
        self.readers = ThreadPoolExecutor(READERS, "adatape-tiles", ready)

    def scanned(self, scan: Scan) -> Scanned:
        cell, size = scan.shape.cell, self.image.shape[1:]
        tiles = tiles_of(*scan.grid(*size), max(1, self.image.tile // cell), scan.shape.halo)
        reader = self._reader([tile.around.in_pixels(cell, size) for tile in tiles])
        view = None if self.view_size is None else self._view_sum(self.view_size)

        def scan_tile(n: int) -> Scanned:
            with running_statistics(scan):
                found = scan(self._standardised(reader[n][None]))
            rows, columns = tiles[n].kept.within(tiles[n].around)
            return _of_each(lambda fields: fields[0][:, rows, columns], found)

        parts = []
        for n, tile in enumerate(tiles):
            parts.append(_again_in_backward(scan_tile, n))
            if view is not None:
                kept = tile.kept.in_pixels(cell, size)
                view.add(reader[n][:, *kept.within(reader.boxes[n])], kept)
        self.made_view = None if view is None else self._standardised(view.total[None])
        columns = sum(tile.kept.top == 0 for tile in tiles)
        return _of_each(lambda fields: _joined(fields, columns), *parts)

    def windows(self, centres: Tensor, size: int) -> Tensor:
        corners = (centres[0] - size // 2).tolist()
        read = self.readers.map(lambda corner: self.image.read(corner[0], corner[1], size, size), corners)
        windows = self._standardised(torch.from_numpy(np.stack(list(read))).to(self.device))
        return windows[None] * within_image(centres, size, self.image.shape[1:])[:, :, None]

    def view(self, size: tuple[int, int]) -> Tensor:
        if self.made_view is None:
            view = self._view_sum(size)
            boxes = [tile.kept for tile in tiles_of(*self.image.shape[1:], self.image.tile)]
            reader = self._reader(boxes)
            for n, box in enumerate(boxes):
                view.add(reader[n], box)
            self.made_view = self._standardised(view.total[None])
        return self.made_view

    def _view_sum(self, size: tuple[int, int]) -> ViewSum:
        return ViewSum(size, self.image.shape[1:], self.image.shape[0], self.device)

    def _reader(self, boxes: list[Box]) -> TileReader:
        return TileReader(self._read, boxes, self.readers, self.device)

    def _read(self, box: Box) -> UInt8[Tensor, "h w ch"]:
        pixels = torch.from_numpy(np.ascontiguousarray(np.moveaxis(self.image.read(*box), 0, -1)))
        return pixels.pin_memory() if self.device.type == "cuda" else pixels

    def _standardised(self, pixels: Tensor) -> Float[Tensor, "n ch h w"]:
        # A tile as float32 is the largest tensor there is, so it is made once.
        return self.rescale((pixels / self.scale).sub_(self.shift)).to(self.dtype)


@contextmanager
def running_statistics(module: nn.Module) -> Iterator[None]:
    """Batch norms use their running statistics, also in training: those of a tile are not those of its image."""
    norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d) and each.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def _again_in_backward(function: Callable[[int], Scanned], n: int) -> Scanned:
    """Keeps no activations for the backward pass, which calls the function once more."""
    if not torch.is_grad_enabled():
        return function(n)
    return checkpoint(function, n, use_reentrant=False, preserve_rng_state=False)


def _of_each(function: Callable[[tuple[Tensor, ...]], Tensor], *scanned: Scanned) -> Scanned:
    """A function of each field that there is."""
    fields = zip(*scanned, strict=True)
    return Scanned(*(None if each[0] is None else function(each) for each in fields))  # type: ignore[arg-type]


def _joined(tiles: tuple[Tensor, ...], columns: int) -> Tensor:
    """(1, h, w, …) of a grid of tiles, row by row."""
    rows = [torch.cat(tiles[n : n + columns], 2) for n in range(0, len(tiles), columns)]
    return torch.cat(rows, 1)
