"""Images that need not fit in memory: `open_image` reads only the pixels that are asked for.

A source is an array or a uint8 tensor, a `.npy` file (memory-mapped), a tiled TIFF, or the finest level of a DeepZoom
pyramid (`name.dzi` beside `name_files/level/column_row.png`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from xml.etree import ElementTree

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from adatape.data.decode import BrokenImage, one_line, open_regular, read_regular
from adatape.data.decode import open_image as open_encoded
from adatape.extras import how_to_install

MOST_CHANNELS = 16  # an array with more has its channels first, or is no image
CACHED_BYTES = 64 << 20  # of decoded tiles, for each image
MOST_FILE = 1 << 50
MOST_DZI = 1 << 16
DZI_FORMATS = ("png", "jpg", "jpeg")
DZI_CHANNELS = {"L": 1, "RGB": 3}

Pixels = UInt8[np.ndarray, "h w c"]


@runtime_checkable
class PixelSource(Protocol):
    """Pixels of an image of `shape`, (height, width, channels)."""

    shape: tuple[int, int, int]

    def crop(self, top: int, left: int, height: int, width: int) -> Pixels:
        """A rectangle that lies within the image."""


class LargeImage:
    """An opened image, of `shape` (channels, height, width).

    A model standardises its pixels by `mean` and `std` (as torchvision's Normalize: of values from 0 to 1) and scans it
    in tiles of about `tile` pixels.
    """

    def __init__(
        self, source: PixelSource, mean: float | Sequence[float], std: float | Sequence[float], tile: int
    ) -> None:
        height, width, channels = source.shape
        self.source, self.shape, self.tile = source, (channels, height, width), tile
        self.mean, self.std = _by_channel("mean", mean, channels), _by_channel("std", std, channels)
        if min(self.shape) < 1:
            raise BrokenImage(f"shape is {self.shape}; an image has at least one pixel")
        if min(self.std) <= 0 or tile < 1:
            raise ValueError(f"std is {std} and tile {tile}; both must be above 0")

    def read(self, top: int, left: int, height: int, width: int) -> UInt8[np.ndarray, "ch h w"]:
        """Pixels of a rectangle, zero outside the image."""
        _, rows, columns = self.shape
        y0, x0 = min(max(top, 0), rows), min(max(left, 0), columns)
        y1, x1 = max(y0, min(top + height, rows)), max(x0, min(left + width, columns))
        inside = self.source.crop(y0, x0, y1 - y0, x1 - x0)
        if inside.shape[:2] != (height, width):
            around = ((y0 - top, top + height - y1), (x0 - left, left + width - x1))
            outside = inside.shape[0] == 0 or inside.shape[1] == 0
            blank = np.zeros((height, width, self.shape[0]), np.uint8)
            inside = blank if outside else np.pad(inside, (*around, (0, 0)))
        return np.moveaxis(inside, -1, 0)


class ArrayPixels:
    """An array in memory or memory-mapped."""

    def __init__(self, array: np.ndarray, name: str) -> None:
        if array.dtype != np.uint8:
            raise BrokenImage(f"{name} has dtype {array.dtype}; it must be uint8")
        if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] > MOST_CHANNELS):
            raise BrokenImage(
                f"{name} has shape {array.shape}; it must be height × width, or height × width × channels with at most "
                f"{MOST_CHANNELS} channels"
            )
        self.array = array[..., None] if array.ndim == 2 else array
        self.shape = self.array.shape

    def crop(self, top: int, left: int, height: int, width: int) -> Pixels:
        return np.array(self.array[top : top + height, left : left + width])  # a copy: pages are read here, not later


class TilePixels(ABC):
    """Pixels stored in tiles, of which those that were used last stay decoded."""

    def __init__(self, shape: tuple[int, int, int], tile: tuple[int, int]) -> None:
        self.shape, self.tile = shape, tile
        self.kept = lru_cache(max(4, CACHED_BYTES // (tile[0] * tile[1] * shape[2])))(self.decode)

    @abstractmethod
    def decode(self, row: int, column: int) -> Pixels:
        """The tile, cut off at the image's edge."""

    def size(self, row: int, column: int) -> tuple[int, int]:
        """Height and width of a tile; those at the far edges are cut off."""
        (height, width), (rows, columns) = self.shape[:2], self.tile
        return min(rows, height - row * rows), min(columns, width - column * columns)

    def crop(self, top: int, left: int, height: int, width: int) -> Pixels:
        out = np.empty((height, width, self.shape[2]), np.uint8)
        rows, columns = self.tile
        for row in range(top // rows, -(-(top + height) // rows)):
            for column in range(left // columns, -(-(left + width) // columns)):
                y, x = row * rows, column * columns
                tile = self.kept(row, column)[max(0, top - y) : top + height - y, max(0, left - x) : left + width - x]
                y, x = max(0, y - top), max(0, x - left)
                out[y : y + tile.shape[0], x : x + tile.shape[1]] = tile
        return out


class TiffPixels(TilePixels):
    """The first page of a TIFF, in tiles or strips, with its channels together."""

    def __init__(self, path: Path) -> None:
        try:
            import tifffile
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(how_to_install(error.name) or error.msg, name=error.name) from error
        self.path = path
        try:
            with open_regular(path, MOST_FILE) as file, tifffile.TiffFile(file, name=path.name) as tiff:
                page: Any = tiff.pages[0]
                self.decode_segment, self.tables = page.decode, page.jpegtables  # may read from the file
                self.offsets, self.counts = page.dataoffsets, page.databytecounts
        except Exception as error:  # a damaged header raises many kinds of errors
            raise BrokenImage(f"{path}: {one_line(error)}") from error
        if page.dtype != np.uint8 or page.axes not in ("YX", "YXS"):
            raise BrokenImage(
                f"{path} has dtype {page.dtype} and axes {page.axes!r}; they must be uint8 and 'YX' or 'YXS'"
            )
        super().__init__((*page.shape, 1)[:3], page.chunks[:2])
        self.columns = -(-self.shape[1] // self.tile[1])
        wanted = self.columns * -(-self.shape[0] // self.tile[0])
        if not len(self.offsets) == len(self.counts) == wanted:
            raise BrokenImage(f"{path} lists {len(self.offsets)} tiles; its size needs {wanted}")

    def decode(self, row: int, column: int) -> Pixels:
        index = row * self.columns + column
        name = f"{self.path}, tile {index}"
        with open_regular(self.path, MOST_FILE) as file:
            file.seek(self.offsets[index])
            content = file.read(self.counts[index])
        if not content or len(content) < self.counts[index]:
            raise BrokenImage(f"{name} has {len(content)} bytes of {self.counts[index]}")
        try:
            tile = self.decode_segment(content, index, jpegtables=self.tables)[0][0]
        except Exception as error:
            raise BrokenImage(f"{name}: {one_line(error)}") from error
        height, width = self.size(row, column)
        if tile.dtype != np.uint8 or tile.shape[0] < height or tile.shape[1] < width or tile.shape[2] != self.shape[2]:
            raise BrokenImage(f"{name} has shape {tile.shape}; it must be at least {height} × {width}")
        return tile[:height, :width]


class DeepZoomPixels(TilePixels):
    """The finest level of a DeepZoom pyramid."""

    def __init__(self, path: Path) -> None:
        try:
            root = ElementTree.fromstring(read_regular(path, MOST_DZI))
            size = next(each for each in root if each.tag.endswith("Size"))
            width, height = int(size.attrib["Width"]), int(size.attrib["Height"])
            tile, self.overlap = int(root.attrib["TileSize"]), int(root.attrib["Overlap"])
            self.format = root.attrib["Format"]
        except (OSError, ElementTree.ParseError, StopIteration, KeyError, ValueError) as error:
            raise BrokenImage(f"{path} is not a DeepZoom description: {one_line(error)}") from error
        if self.format not in DZI_FORMATS:
            raise BrokenImage(f"{path} has Format {self.format!r}; it must be one of {', '.join(DZI_FORMATS)}")
        if min(width, height, tile) < 1 or not 0 <= self.overlap < tile:
            raise BrokenImage(f"{path}: Width {width}, Height {height}, TileSize {tile}, Overlap {self.overlap}")
        self.folder = path.with_name(f"{path.stem}_files") / str(math.ceil(math.log2(max(width, height))))
        names = [self._name(r, c) for r in range(-(-height // tile)) for c in range(-(-width // tile))]
        there = {each.name for each in self.folder.iterdir()} if self.folder.is_dir() else set()
        missing = [name for name in names if name not in there]
        if missing:
            raise BrokenImage(f"{self.folder} lacks {len(missing)} of {len(names)} tiles, {missing[0]} first")
        super().__init__((height, width, 1), (tile, tile))
        self.mode = self._open(0, 0).mode
        if self.mode not in DZI_CHANNELS:
            raise BrokenImage(f"{path} has tiles of mode {self.mode}; it must be one of {', '.join(DZI_CHANNELS)}")
        super().__init__((height, width, DZI_CHANNELS[self.mode]), (tile, tile))

    def decode(self, row: int, column: int) -> Pixels:
        name = self.folder / self._name(row, column)
        image = self._open(row, column)
        above, before = self.overlap * (row > 0), self.overlap * (column > 0)
        height, width = self.size(row, column)
        rows = min(self.tile[0] + above + self.overlap, self.shape[0] - row * self.tile[0] + above)
        columns = min(self.tile[1] + before + self.overlap, self.shape[1] - column * self.tile[1] + before)
        if image.size != (columns, rows) or image.mode != self.mode:
            raise BrokenImage(f"{name} is {image.size} of mode {image.mode}; it must be {(columns, rows)}, {self.mode}")
        try:
            pixels = np.asarray(image).reshape(rows, columns, -1)
        except Exception as error:  # decoders raise many kinds of errors on damaged files
            raise BrokenImage(f"{name}: {one_line(error)}") from error
        return pixels[above : above + height, before : before + width]

    def _open(self, row: int, column: int) -> Any:
        path = self.folder / self._name(row, column)
        try:
            return open_encoded(read_regular(path), str(path), ("PNG", "JPEG"))
        except OSError as error:
            raise BrokenImage(f"{path}: {one_line(error)}") from error

    def _name(self, row: int, column: int) -> str:
        return f"{column}_{row}.{self.format}"


def open_image(
    source: str | Path | np.ndarray | Tensor,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
    tile: int = 1024,
) -> LargeImage:
    """Opens an image of uint8 pixels for a model that reads windows.

    An array is height × width (× channels), a tensor channels × height × width.
    """
    return LargeImage(_source(source), mean, std, tile)


def _source(source: str | Path | np.ndarray | Tensor) -> PixelSource:
    if isinstance(source, Tensor):
        if source.dim() != 3:
            raise BrokenImage(f"the tensor has shape {tuple(source.shape)}; it must be channels × height × width")
        return ArrayPixels(source.detach().cpu().movedim(0, -1).numpy(), "the tensor")
    if isinstance(source, np.ndarray):
        return ArrayPixels(source, "the array")
    path = Path(source)
    opened = FORMATS.get(path.suffix.lower())
    if opened is None:
        raise BrokenImage(f"{path} has suffix {path.suffix!r}; it must be one of {', '.join(FORMATS)}, or an array")
    return opened(path)


def _memory_mapped(path: Path) -> ArrayPixels:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        raise BrokenImage(f"{path}: {one_line(error)}") from error
    return ArrayPixels(array, str(path))


FORMATS: dict[str, Callable[[Path], PixelSource]] = {
    ".npy": _memory_mapped,
    ".tif": TiffPixels,
    ".tiff": TiffPixels,
    ".dzi": DeepZoomPixels,
}


def _by_channel(name: str, value: float | Sequence[float], channels: int) -> tuple[float, ...]:
    values = (value,) * channels if isinstance(value, (int, float)) else tuple(value)
    if len(values) != channels:
        raise ValueError(f"{name} has {len(values)} values; the image has {channels} channels")
    return values
