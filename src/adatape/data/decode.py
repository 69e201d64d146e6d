"""Decodes images from files and bytes; an unreadable one raises BrokenImage with the reason."""

from __future__ import annotations

import errno
import io
import math
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from PIL import ExifTags, Image, UnidentifiedImageError

from adatape.validation import one_line

Modes = Literal["convert", "refuse"]

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")  # some others start programs: EPS runs Ghostscript
MOST_PIXELS = 178_956_970 // 2  # where Pillow warns; it refuses only twice as many
MOST_BYTES = 4 * MOST_PIXELS + (1 << 20)  # that many pixels, uncompressed with alpha, and metadata
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
WIDE_MODES = ("I", "F")  # 16-bit and float values have no standard range to scale to 0..255
REFUSAL = "{name} has mode {mode}; with modes=refuse it must be RGB"


class BrokenImage(ValueError):  # noqa: N818
    """An image that cannot be read; the message is its name and the reason."""


class RefusedMode(ValueError):  # noqa: N818
    """An image that can be read but is not RGB, where `modes` is refuse."""


class Decoded(NamedTuple):
    image: Image.Image
    converted: bool  # whether it was not RGB


def decode(content: bytes, name: str, modes: Modes = "convert", exif_orientation: bool = False) -> Decoded:
    """Decodes to RGB without alpha, rotated by the EXIF orientation if `exif_orientation`."""
    return decode_opened(open_image(content, name), name, modes, exif_orientation)


def open_image(
    content: bytes, name: str, formats: tuple[str, ...] = FORMATS, most_pixels: int = MOST_PIXELS
) -> Image.Image:
    """Reads the header and checks size and mode; decodes no pixels."""
    try:
        image = Image.open(io.BytesIO(content), formats=formats)
    except Exception as error:  # decoders raise many kinds of errors on damaged files
        raise BrokenImage(f"{name}: {_reason(error, content)}") from error
    if math.prod(image.size) > most_pixels:
        raise BrokenImage(f"{name}: {image.width} × {image.height} pixels; at most {most_pixels:,} are decoded")
    if image.mode.split(";")[0] in WIDE_MODES:
        raise BrokenImage(f"{name}: mode {image.mode} has values of more than 8 bits")
    return image


def decode_opened(image: Image.Image, name: str, modes: Modes = "convert", exif_orientation: bool = False) -> Decoded:
    """Decodes an image that `open_image` returned; it can be called once."""
    mode = image.mode
    if modes == "refuse" and mode != "RGB":
        raise RefusedMode(REFUSAL.format(name=name, mode=mode))
    try:
        with image:
            # Pillow warns about a palette with transparency unless it passes RGBA.
            through = image.convert("RGBA") if mode == "P" and "transparency" in image.info else image
            rgb, turn = through.convert("RGB"), _turn(image) if exif_orientation else None
            return Decoded(rgb if turn is None else rgb.transpose(turn), mode != "RGB")
    except Exception as error:
        raise BrokenImage(f"{name}: {one_line(error)}") from error


def open_regular(path: str | Path, most: int = MOST_BYTES) -> BinaryIO:
    """Opens a regular file of at most `most` bytes; pipes, devices and sockets, which may block, are refused.

    Checked before opening too, since opening a device can have side effects.
    """
    _check_regular(os.stat(path), most)
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    try:
        _check_regular(os.fstat(file.fileno()), most)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: str | Path, most: int = MOST_BYTES) -> bytes:
    with open_regular(path, most) as file:
        return file.read(most)


def _check_regular(found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if found.st_size > most:
        raise OSError(errno.EFBIG, f"{found.st_size:,} bytes; at most {most:,} are read")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The transpose that makes a loaded image upright; None for damaged EXIF and for TIFF, which Pillow rotates."""
    try:
        return TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # many kinds of errors on damaged files
        return None


def _reason(error: Exception, content: bytes) -> str:
    if not content:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow can identify"
    return one_line(error)
