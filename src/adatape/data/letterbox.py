"""Fits an image into a rectangle: resized as a whole, then padded with grey, so that nothing is cut off.

Sizes and padding are those of timm's transform with crop_mode="border" and crop_pct=1, which a release names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

FILL = 128  # close to 0 once scaled to -1 … 1
LETTERBOX = {"crop_pct": 1.0, "crop_mode": "border"}  # the same in timm's words, except for the grey


def fitted_shape(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """The largest shape of the same aspect ratio, to the pixel, within `size`."""
    ratio = max(height / size[0], width / size[1])
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def unboxed(box: Sequence[float], height: int, width: int, size: tuple[int, int]) -> list[float]:
    """Top, left, height and width on the letterboxed image, in pixels of the original, outside of it too."""
    fitted = fitted_shape(height, width, size)
    down, across = height / fitted[0], width / fitted[1]
    top, left = box[0] - (size[0] - fitted[0]) // 2, box[1] - (size[1] - fitted[1]) // 2
    return [top * down, left * across, box[2] * down, box[3] * across]


def letterboxed(image: Image.Image, size: tuple[int, int]) -> UInt8[Tensor, "c h w"]:
    return torch.from_numpy(letterboxed_pixels(image, size)).permute(2, 0, 1).contiguous()


def letterboxed_pixels(image: Image.Image, size: tuple[int, int]) -> UInt8[np.ndarray, "h w c"]:
    height, width = fitted_shape(image.height, image.width, size)
    if (image.height, image.width) != (height, width):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.array(image).reshape(height, width, -1)
    if (height, width) == size:
        return pixels
    framed = np.full((*size, pixels.shape[2]), FILL, dtype=np.uint8)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    framed[top : top + height, left : left + width] = pixels
    return framed
