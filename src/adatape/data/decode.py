"""Images out of bytes; what cannot be read says why."""

from __future__ import annotations

import io
import math
from typing import Literal, NamedTuple

from PIL import Image, UnidentifiedImageError

Modes = Literal["convert", "refuse"]

# Pillow knows more by content, whatever a file is called, and some start other programs, as EPS does Ghostscript.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM", "TIFF")
MOST_PIXELS = 178_956_970 // 2  # what Pillow warns about; it refuses only twice as many
WIDE_MODES = ("I", "F")  # 16-bit and float values have no agreed range to scale to 0..255
REFUSAL = "{name} has mode {mode}; modes is refuse, which takes RGB alone"


class BrokenImage(ValueError):  # noqa: N818
    """An image that cannot be read; the text is its name and the reason."""


class RefusedMode(ValueError):  # noqa: N818
    """An image that can be read but is not RGB, where `modes` is refuse."""


class Decoded(NamedTuple):
    image: Image.Image
    converted: bool  # it was not RGB


def decode(content: bytes, name: str, modes: Modes = "convert") -> Decoded:
    """An RGB image of a file's content; alpha is dropped."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            mode = _checked_mode(image, name)
            if modes == "refuse" and mode != "RGB":
                raise RefusedMode(REFUSAL.format(name=name, mode=mode))
            # Pillow warns about a palette with transparency unless it passes RGBA.
            through = image.convert("RGBA") if mode == "P" and "transparency" in image.info else image
            return Decoded(through.convert("RGB"), mode != "RGB")
    except (BrokenImage, RefusedMode):
        raise
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise BrokenImage(f"{name}: {_reason(error, content)}") from error


def _checked_mode(image: Image.Image, name: str) -> str:
    if math.prod(image.size) > MOST_PIXELS:
        raise BrokenImage(f"{name}: {image.width} × {image.height} pixels; at most {MOST_PIXELS:,} are decoded")
    if image.mode.split(";")[0] in WIDE_MODES:
        raise BrokenImage(f"{name}: mode {image.mode} holds values beyond 8 bits")
    return image.mode


def _reason(error: Exception, content: bytes) -> str:
    if not content:
        return "the file is empty"
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"
    return one_line(error)


def one_line(error: Exception) -> str:
    """The reason in few words, for libraries that give paragraphs."""
    said = getattr(error, "strerror", None) or (error.args[0] if error.args else "")
    return " ".join(str(said).split())[:200] or type(error).__name__
