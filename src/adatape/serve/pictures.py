"""From an uploaded file to what the model sees; nothing is decoded whose header already says too much."""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image, UnidentifiedImageError
from starlette.exceptions import HTTPException
from torch import Tensor

from adatape.data.augment import center_crop_image
from adatape.data.decode import BrokenImage, decode_opened, open_image
from adatape.data.letterbox import letterboxed

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow knows more, some of which start other programs
MOST_PIXELS = 40_000_000
MOST_RATIO = 100  # of the sides: the short one is resized to the model's, and the long one with it


class Picture(NamedTuple):
    pixels: Tensor  # (c, h, w) uint8
    width: int
    height: int

    @property
    def shape(self) -> dict[str, int]:
        return {"width": self.width, "height": self.height}


def open_upload(content: bytes, name: str) -> Image.Image:
    """An upload whose header says that it may be decoded; else an error with the status that says whose fault it is."""
    try:
        image = open_image(content, name, FORMATS, MOST_PIXELS)
    except BrokenImage as error:
        if content and isinstance(error.__cause__, UnidentifiedImageError):
            raise HTTPException(415, f"{name}: not an image; known are {', '.join(FORMATS)}") from error
        raise HTTPException(422, str(error)) from error
    width, height = image.size
    if not 0 < max(width, height) <= MOST_RATIO * min(width, height):
        raise HTTPException(422, f"{name}: {width} × {height} pixels; a side may be {MOST_RATIO} times the other")
    return image


def picture(
    upload: Image.Image, name: str, channels: int, size: int | tuple[int, int], exif_orientation: bool = False
) -> Picture:
    """An upload at the model's size and in its colours."""
    try:
        image = decode_opened(upload, name, exif_orientation=exif_orientation).image
    except BrokenImage as error:
        raise HTTPException(422, str(error)) from error
    return Picture(seen(image, channels, size), image.width, image.height)


def seen(image: Image.Image, channels: int, size: int | tuple[int, int]) -> Tensor:
    """The centre square for a side, or the whole image, resized and padded, for height and width."""
    image = image.convert("L" if channels == 1 else "RGB")
    return center_crop_image(image, size) if isinstance(size, int) else letterboxed(image, size)
