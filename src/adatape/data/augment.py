"""Augmentation (crop, flip, RandAugment, scaling, erasing) of batches on any device, or of one image at a time.

All random numbers are functions of a sample's key, so a sample is the same in any batch, process and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image
from torch import Tensor

from adatape import counter_rng
from adatape.data import randaug
from adatape.data_config import Augment

BOX = 4  # draws of a box: area, aspect, row, column
LEAD = BOX + 1  # draws of crop and flip, before those of RandAugment
JITTER, ERASING, NOISE = range(1, 4)  # further random streams of a key
CROP_ASPECT, ERASE_ASPECT = 3 / 4, 0.3  # smallest aspect ratio; the largest is its inverse
ERASE_AREA = (0.02, 1 / 3)
# DeiT's noise has standard deviation 1 in standardised pixels, about 0.5 on our range from -1 to 1.
NOISE_SCALE = 0.5
SHORT_SIDE = 256 / 224  # short side before the centre crop, relative to the crop


def augment_images(
    images: UInt8[Tensor, "n c h w"], keys: Int[Tensor, "n"], augment: Augment, size: int
) -> Float[Tensor, "n c s s"]:
    """Augments a batch and scales it to -1 … 1, by a fixed sequence of kernels without synchronisation."""
    draws = counter_rng.uniform(keys, _draws(augment)).double()
    own = _own_size(images.shape[-2], images.shape[-1], size)
    images = _cropped(images, draws[:, :BOX].unbind(1), augment, own)
    if augment.flip:
        images = torch.where((draws[:, BOX] < 0.5)[:, None, None, None], images.flip(-1), images)
    for layer, magnitude in enumerate(_magnitudes(keys, augment)):
        images = randaug.apply(images, randaug.operation(draws[:, _span(layer)].unbind(1), magnitude, own))
    return scale_and_erase(_resized(images, size, size), keys, augment)


def augment_image(
    image: UInt8[Tensor, "c h w"] | Image.Image, key: int, augment: Augment, size: int
) -> UInt8[Tensor, "c s s"]:
    """Augments one image on the CPU with the same draws; `scale_and_erase` then scales and erases the batch."""
    alone = torch.tensor([key])
    draws = counter_rng.uniform(alone, _draws(augment))[0].tolist()
    picture = _picture(image)
    own = _own_size(picture.height, picture.width, size)
    picture = _cropped_one(picture, draws[:BOX], augment, own)
    if augment.flip and draws[BOX] < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for layer, magnitude in enumerate(_magnitudes(alone, augment)):
        picture = randaug.apply_one(picture, randaug.operation(draws[_span(layer)], float(magnitude), own))
    return _tensor(_resized_one(picture, size, size))


def scaled(pixels: UInt8[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Pixels from -1 to 1, as models take them."""
    return pixels.float() / 127.5 - 1


def scale_and_erase(
    images: UInt8[Tensor, "n c h w"], keys: Int[Tensor, "n"], augment: Augment
) -> Float[Tensor, "n c h w"]:
    """Scales to -1 … 1 and erases: the last step of both `augment_images` and `augment_image`."""
    x = scaled(images)
    if not augment.erase:
        return x
    noise = counter_rng.normal(counter_rng.keys_of(NOISE, keys), x[0].numel()).view_as(x)
    return torch.where(_erased(x, keys, augment.erase), (noise * NOISE_SCALE).clamp(-1, 1), x)


def center_crop(images: UInt8[Tensor, "n c h w"], size: int) -> UInt8[Tensor, "n c s s"]:
    """The centre crop of each image, for evaluation."""
    height, width = _resized_shape(images.shape[-2], images.shape[-1], size)
    top, left = (height - size) // 2, (width - size) // 2
    return _resized(images, height, width)[..., top : top + size, left : left + size]


def center_crop_image(image: UInt8[Tensor, "c h w"] | Image.Image, size: int) -> UInt8[Tensor, "c s s"]:
    """`center_crop` for one image on the CPU."""
    picture = _picture(image)
    height, width = _resized_shape(picture.height, picture.width, size)
    top, left = (height - size) // 2, (width - size) // 2
    return _tensor(_resized_one(picture, height, width).crop((left, top, left + size, top + size)))


def uncropped(box: Sequence[float], height: int, width: int, size: int) -> list[float]:
    """Top, left, height and width on the square of `center_crop_image`, in pixels of the image."""
    tall, wide = _resized_shape(height, width, size)
    down, across = height / tall, width / wide
    top, left = box[0] + (tall - size) // 2, box[1] + (wide - size) // 2
    return [top * down, left * across, box[2] * down, box[3] * across]


def box_of(draws: Any, height: int, width: int, area: tuple[float, float], narrowest: float) -> tuple[Any, ...]:
    """Top, left, height and width in pixels of a random box, from four floats or four columns of a batch.

    Area is uniform and aspect log-uniform. A box that does not fit has its aspect clamped at equal area, instead of
    being redrawn.
    """
    share, aspect, row, column = draws
    pixels = (area[0] + (area[1] - area[0]) * share) * (height * width)
    ratio = _clamped(narrowest ** (1 - 2 * aspect), pixels / height**2, width**2 / pixels)
    wide = _clamped(((pixels * ratio) ** 0.5 + 0.5) // 1, 1, width)
    tall = _clamped(((pixels / ratio) ** 0.5 + 0.5) // 1, 1, height)
    return row * (height - tall + 1) // 1, column * (width - wide + 1) // 1, tall, wide


def _own_size(height: int, width: int, size: int) -> int:
    """The side at which images are augmented: small images are enlarged last, which is faster and loses no detail."""
    return min(height, width, size)


def _draws(augment: Augment) -> int:
    return LEAD + randaug.DRAWS * augment.randaug


def _span(layer: int) -> slice:
    return slice(LEAD + randaug.DRAWS * layer, LEAD + randaug.DRAWS * (layer + 1))


def _magnitudes(keys: Int[Tensor, "n"], augment: Augment) -> list[Any]:
    """The magnitude of each operation: one per sample, or one float for all without jitter."""
    if not augment.jitter:
        return [augment.magnitude] * augment.randaug
    offsets = counter_rng.normal(counter_rng.keys_of(JITTER, keys), augment.randaug).double()
    return list((augment.magnitude + augment.jitter * offsets).clamp(min=0).unbind(1))


def _clamped(value: Any, low: Any, high: Any) -> Any:
    return value.clamp(low, high) if isinstance(value, Tensor) else min(max(value, low), high)


def _cropped(
    images: UInt8[Tensor, "n c h w"], draws: tuple[Tensor, ...], augment: Augment, size: int
) -> UInt8[Tensor, "n c s s"]:
    match augment.crop:
        case "inception":
            height, width = images.shape[-2:]
            return _crop_box(images, box_of(draws, height, width, augment.area, CROP_ASPECT), size)
        case "pad":
            return _shifted(_resized(images, size, size), _shift(draws, augment.pad), augment.pad)
        case "none":
            return _resized(images, size, size)
    raise _unknown_crop(augment)


def _cropped_one(image: Image.Image, draws: list[float], augment: Augment, size: int) -> Image.Image:
    match augment.crop:
        case "inception":
            return _crop_box_image(image, box_of(draws, image.height, image.width, augment.area, CROP_ASPECT), size)
        case "pad":
            return _shifted_one(_resized_one(image, size, size), _shift(draws, augment.pad), augment.pad)
        case "none":
            return _resized_one(image, size, size)
    raise _unknown_crop(augment)


def _unknown_crop(augment: Augment) -> ValueError:
    return ValueError(f"crop is {augment.crop!r}; it must be none, inception or pad")


def _crop_box(images: UInt8[Tensor, "n c h w"], box: tuple[Any, ...], size: int) -> UInt8[Tensor, "n c s s"]:
    """Crops boxes and resizes them bilinearly without antialiasing, as the paper does; only pixels inside are used."""
    middles = (torch.arange(size, device=images.device, dtype=torch.float64) + 0.5) / size
    axes = []
    for start, length, whole in zip(box[:2], box[2:], images.shape[-2:], strict=True):
        inside = (middles * length[:, None] - 0.5).clamp(torch.zeros_like(length)[:, None], length[:, None] - 1)
        axes.append(((start[:, None] + inside) * 2 + 1) / whole - 1)
    rows, columns = (axis.float() for axis in axes)
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), -1)
    sampled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return sampled.round().to(torch.uint8)


def _crop_box_image(image: Image.Image, box: tuple[Any, ...], size: int) -> Image.Image:
    top, left, tall, wide = (int(value) for value in box)
    pixels = _batch_of_one(image.crop((left, top, left + wide, top + tall)))
    # torch's resize, since PIL's always antialiases; on uint8 it is also three times as fast.
    resized = F.interpolate(pixels, (size, size), mode="bilinear", align_corners=False)[0]
    return _picture(resized)


def _shift(draws: Any, pad: int) -> tuple[Any, Any]:
    return draws[2] * (2 * pad + 1) // 1, draws[3] * (2 * pad + 1) // 1


def _shifted(images: UInt8[Tensor, "n c s s"], shift: tuple[Tensor, Tensor], pad: int) -> UInt8[Tensor, "n c s s"]:
    """Crops of padded images; the padding is RandAugment's mid-grey fill, close to 0 once scaled."""
    count, channels, size, _ = images.shape
    device = images.device
    bordered = F.pad(images, (pad,) * 4, value=randaug.FILL)
    rows, columns = (start.long()[:, None] + torch.arange(size, device=device) for start in shift)
    sample = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return bordered[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _shifted_one(image: Image.Image, shift: tuple[float, float], pad: int) -> Image.Image:
    framed = Image.new(image.mode, image.size, (randaug.FILL,) * len(image.getbands()))
    framed.paste(image, (pad - int(shift[1]), pad - int(shift[0])))
    return framed


def _resized_shape(height: int, width: int, size: int) -> tuple[int, int]:
    """The shape to resize to before the crop: its short side is SHORT_SIDE × size, or `size` for smaller images."""
    short = min(height, width)
    target = round(size * SHORT_SIDE) if short > size else size
    return round(height * target / short), round(width * target / short)


def _resized(images: UInt8[Tensor, "n c h w"], height: int, width: int) -> UInt8[Tensor, "n c a b"]:
    if images.shape[-2:] == (height, width):
        return images
    smooth = F.interpolate(images.float(), (height, width), mode="bilinear", align_corners=False, antialias=True)
    return smooth.round().clamp(0, 255).to(torch.uint8)


def _resized_one(image: Image.Image, height: int, width: int) -> Image.Image:
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)


def _erased(x: Float[Tensor, "n c h w"], keys: Int[Tensor, "n"], chance: float) -> Bool[Tensor, "n 1 h w"]:
    draws = counter_rng.uniform(counter_rng.keys_of(ERASING, keys), 1 + BOX).double().unbind(1)
    box = box_of(draws[1:], x.shape[-2], x.shape[-1], ERASE_AREA, ERASE_ASPECT)
    within = []
    for start, length, whole in zip(box[:2], box[2:], x.shape[-2:], strict=True):
        pixels = torch.arange(whole, device=x.device)
        within.append((pixels >= start[:, None]) & (pixels < (start + length)[:, None]))
    hit = draws[0] < chance
    return (hit[:, None, None] & within[0][:, :, None] & within[1][:, None, :])[:, None]


def as_image(pixels: UInt8[Tensor, "c h w"]) -> Image.Image:
    rows = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(rows[..., 0] if rows.shape[2] == 1 else rows)


def _picture(image: UInt8[Tensor, "c h w"] | Image.Image) -> Image.Image:
    if isinstance(image, Tensor):
        return as_image(image)
    if image.mode not in ("L", "RGB"):
        raise ValueError(f"image has mode {image.mode}; it must be L or RGB")
    return image


def _tensor(image: Image.Image) -> UInt8[Tensor, "c h w"]:
    return _batch_of_one(image)[0]


def _batch_of_one(image: Image.Image) -> UInt8[Tensor, "1 c h w"]:
    """A batch of one image in channels-last memory format, as PIL stores it."""
    return torch.from_numpy(np.array(image)).view(1, image.height, image.width, -1).permute(0, 3, 1, 2)
