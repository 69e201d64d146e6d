"""From an uploaded file to what the model sees; nothing is decoded whose header already says too much."""

from __future__ import annotations

import io
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError
from starlette.exceptions import HTTPException
from torch import Tensor

from adatape.data.augment import centre_one
from adatape.data.decode import BrokenImage, decode

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow knows more, some of which start other programs
MOST_PIXELS = 40_000_000
MOST_RATIO = 100  # of the sides: the short one is resized to the model's, and the long one with it


class Picture(NamedTuple):
    pixels: Tensor  # (c, s, s) uint8
    width: int
    height: int


def picture(content: bytes, name: str, channels: int, size: int, exif_orientation: bool = False) -> Picture:
    """An upload at the model's size and in its colours; else an error with the status that says whose fault it is."""
    checked_pixels(content, name)
    try:
        image = decode(content, name, exif_orientation=exif_orientation).image
    except BrokenImage as error:
        raise HTTPException(422, str(error)) from error
    return Picture(seen(image, channels, size), image.width, image.height)


def seen(image: Image.Image, channels: int, size: int) -> Tensor:
    return centre_one(image.convert("L" if channels == 1 else "RGB"), size)


def checked_pixels(content: bytes, name: str) -> int:
    """The pixels that a header announces, where they are such as are decoded."""
    if not content:
        raise HTTPException(422, f"{name}: the file is empty")
    width, height = _size(content, name)
    if width * height > MOST_PIXELS:
        raise HTTPException(422, f"{name}: {width} × {height} pixels; at most {MOST_PIXELS:,} are decoded")
    if not 0 < max(width, height) <= MOST_RATIO * min(width, height):
        raise HTTPException(422, f"{name}: {width} × {height} pixels; a side may be {MOST_RATIO} times the other")
    return width * height


def _size(content: bytes, name: str) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return image.size
    except UnidentifiedImageError as error:
        raise HTTPException(415, f"{name}: not an image; known are {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise HTTPException(422, f"{name}: far more than the {MOST_PIXELS:,} pixels that are decoded") from error
    except Exception as error:  # decoders raise whatever a damaged header leads them to
        raise HTTPException(422, f"{name}: damaged: {type(error).__name__}") from error
