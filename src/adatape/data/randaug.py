"""RandAugment with the paper's 16 operations and magnitudes, for batches on a device and for single PIL images."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

OPERATIONS = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "color", "contrast"),
    *("brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y", "cutout", "solarize_add"),
)
MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
DRAWS = 4  # random numbers per operation: its number, its sign, and the centre of a cutout
FILL = 128
STATED_AT = 224  # image side for which the paper states pixel amounts
ENHANCERS = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}

# A float for one image or a float64 tensor for a batch, so that both use the same formulas.
Value = Any


class Strength(NamedTuple):
    """The parameters of all operations at one magnitude."""

    rotate: Value  # degrees
    shear: Value  # pixels per pixel
    translate: Value  # pixels
    factor: Value  # of colour, contrast, brightness and sharpness; 1 changes nothing
    bits: Value  # kept by posterize
    threshold: Value  # solarize inverts levels from here on
    added: Value  # by solarize-add to levels below 128
    cutout: Value  # pixels, half the side of the square


class Operation(NamedTuple):
    """One drawn operation, for one image or for each image of a batch."""

    number: Value
    choice: tuple[Value, ...]  # for each of OPERATIONS, whether it was drawn
    strength: Strength
    sign: Value
    centre: tuple[Value, Value]  # row and column

    def chosen(self, name: str) -> Value:
        return self.choice[NUMBER[name]]


def strength(magnitude: Value, size: int) -> Strength:
    """Parameters at a magnitude on the paper's scale, where 10 is the maximum; pixel amounts scale with `size`."""
    share, pixels = magnitude / 10, size / STATED_AT
    return Strength(
        rotate=30 * share,
        shear=0.3 * share,
        translate=100 * share * pixels,
        factor=1.8 * share + 0.1,
        bits=4 * magnitude / 10 // 1,
        threshold=256 * magnitude / 10 // 1,
        added=110 * magnitude / 10 // 1,
        cutout=(40 * share * pixels + 0.5) // 1,
    )


def operation(draws: Value, magnitude: Value, size: int) -> Operation:
    """The operation given by DRAWS numbers in [0, 1), floats or columns of a batch."""
    which, sign, row, column = draws
    number = which * len(OPERATIONS) // 1
    place = (row * size // 1, column * size // 1)
    return Operation(number, _choice(number), strength(magnitude, size), 1 - 2 * (sign < 0.5), place)


def _choice(number: Value) -> tuple[Value, ...]:
    if isinstance(number, Tensor):
        return (number == torch.arange(len(OPERATIONS), device=number.device)[:, None]).unbind(0)
    return tuple(number == other for other in range(len(OPERATIONS)))


def apply(images: UInt8[Tensor, "n c s s"], drawn: Operation) -> UInt8[Tensor, "n c s s"]:
    """Applies each image's operation; all operations are computed and one is selected, so shapes are static."""
    x = _moved(_enhanced(images.float(), drawn), drawn)
    x = x.masked_fill(_per_pixel(drawn.chosen("cutout")) & _square(drawn, x.shape[-1]), FILL)
    return _looked_up(x.to(torch.uint8), drawn)


def apply_one(image: Image.Image, drawn: Operation) -> Image.Image:
    """Applies the operation to one square image, by PIL."""
    name = OPERATIONS[int(drawn.number)]
    match name:
        case "autocontrast" | "equalize" | "invert":
            return getattr(ImageOps, name)(image)
        case _ if name in ENHANCERS:
            return ENHANCERS[name](image).enhance(drawn.strength.factor)
        case "posterize" | "solarize" | "solarize_add":
            far = drawn.strength
            amount = {"posterize": far.bits, "solarize": far.threshold, "solarize_add": far.added}[name]
            return image.point(_table(name, amount) * len(image.getbands()))
        case "cutout":
            return _cut(image, drawn)
    coefficients = _pixel_coefficients(_warp(drawn, image.width), image.width)
    fill = (FILL,) * len(image.getbands())
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR, fillcolor=fill)


def _per_pixel(value: Tensor) -> Tensor:
    return value[:, None, None, None]


def _per_level(value: Value) -> Value:
    return value[:, None, None] if isinstance(value, Tensor) else value


def _warp(drawn: Operation, size: int) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The affine map from output to input points in coordinates from -1 to 1; the identity for other operations."""
    far, chosen, sign = drawn.strength, drawn.chosen, drawn.sign
    angle = math.radians(1) * far.rotate * (sign * chosen("rotate"))
    on_tensor = isinstance(angle, Tensor)
    cos, sin = (angle.cos(), angle.sin()) if on_tensor else (math.cos(angle), math.sin(angle))
    shear_x, shear_y = (far.shear * (sign * chosen(name)) for name in ("shear_x", "shear_y"))
    shift = far.translate * 2 / size
    shift_x, shift_y = (shift * (sign * chosen(name)) for name in ("translate_x", "translate_y"))
    # A shear keeps the first row or column in place, as in the original, and so shifts the centre.
    return (cos, shear_x - sin, shear_x + shift_x), (shear_y + sin, cos, shear_y + shift_y)


def _pixel_coefficients(warp: tuple[tuple[float, ...], tuple[float, ...]], size: int) -> tuple[float, ...]:
    """PIL's six affine coefficients, in pixels from the corner."""
    return tuple(value for a, b, c in warp for value in (a, b, (c + 1 - a - b) * size / 2))


def _moved(x: Float[Tensor, "n c s s"], drawn: Operation) -> Float[Tensor, "n c s s"]:
    size = x.shape[-1]
    points = (torch.arange(size, device=x.device, dtype=torch.float32) * 2 + 1) / size - 1
    # Elementwise, since affine_grid's matmul loses precision under TF32 or autocast.
    axes = [
        _per_level(a.float()) * points + _per_level(b.float()) * points[:, None] + _per_level(c.float())
        for a, b, c in _warp(drawn, size)
    ]
    grid = torch.stack(axes, -1)
    inside = ((grid >= -1) & (grid < 1)).all(-1)[:, None]
    sampled = F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False).round()
    moving = torch.stack([drawn.chosen(name) for name in MOVES]).any(0)
    return torch.where(_per_pixel(moving), torch.where(inside, sampled, FILL), x)


def _square(drawn: Operation, size: int) -> Bool[Tensor, "n 1 s s"]:
    pixels = torch.arange(size, device=drawn.number.device)
    near = [
        (pixels >= (middle - drawn.strength.cutout)[:, None]) & (pixels < (middle + drawn.strength.cutout)[:, None])
        for middle in drawn.centre
    ]
    return (near[0][:, :, None] & near[1][:, None, :])[:, None]


def _cut(image: Image.Image, drawn: Operation) -> Image.Image:
    far, (row, column) = drawn.strength.cutout, drawn.centre
    edges = (column - far, row - far, column + far, row + far)
    left, top, right, bottom = (int(min(max(edge, 0), image.width)) for edge in edges)
    image = image.copy()
    image.paste((FILL,) * len(image.getbands()), (left, top, right, bottom))
    return image


def _enhanced(x: Float[Tensor, "n c h w"], drawn: Operation) -> Float[Tensor, "n c h w"]:
    """PIL's ImageEnhance: extrapolates from a grey, constant, smoothed or black image, truncating fractions."""
    grey = _grey(x)
    flat = (grey.mean((1, 2, 3), keepdim=True) + 0.5).floor()
    dull = torch.where(_per_pixel(drawn.chosen("contrast")), flat, 0.0)
    dull = torch.where(_per_pixel(drawn.chosen("color")), grey, dull)
    dull = torch.where(_per_pixel(drawn.chosen("sharpness")), _smooth(x), dull)
    chosen = torch.stack([drawn.chosen(name) for name in ENHANCERS]).any(0)
    factor = _per_pixel(torch.where(chosen, drawn.strength.factor, 1.0).float())
    return (dull + factor * (x - dull)).clamp(0, 255).floor()


def _grey(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 1 h w"]:
    """ITU-R 601 luma in PIL's fixed-point arithmetic, which is exact in float32."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.split(1, 1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor()


def _smooth(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """A 3 × 3 mean with weight 5 for the centre; the border is unchanged."""
    if min(x.shape[-2:]) < 3:
        return x
    around = F.avg_pool2d(x, 3, stride=1) * 9
    inner = ((around + 4 * x[..., 1:-1, 1:-1]) / 13 + 0.5).floor()
    smooth = x.clone()
    smooth[..., 1:-1, 1:-1] = inner
    return smooth


def _looked_up(images: UInt8[Tensor, "n c h w"], drawn: Operation) -> UInt8[Tensor, "n c h w"]:
    """Applies the operations that map pixel levels, by one lookup table per channel."""
    flat = images.flatten(2).long()
    levels = torch.arange(256, device=images.device)
    low, high = flat.amin(-1, keepdim=True), flat.amax(-1, keepdim=True)
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    far = drawn.strength
    tables = {
        "autocontrast": _stretched(levels, low, high),
        "equalize": _equalized(levels, counts, high),
        "invert": 255 - levels,
        "posterize": posterized(levels, _per_level(far.bits)),
        "solarize": torch.where(levels < _per_level(far.threshold), levels, 255 - levels),
        "solarize_add": torch.where(levels < 128, (levels + _per_level(far.added)).clamp(max=255), levels),
    }
    table = levels.to(torch.uint8)
    for name, other in tables.items():
        table = torch.where(_per_level(drawn.chosen(name)), other.to(torch.uint8), table)
    return table.expand(*flat.shape[:2], 256).gather(2, flat).view_as(images)


def posterized(level: Value, bits: Value) -> Value:
    """The level with its lowest 8 - bits bits cleared."""
    step = 2 ** (8 - bits)
    return level // step * step


def _stretched(
    levels: Int[Tensor, "256"], low: Int[Tensor, "n c 1"], high: Int[Tensor, "n c 1"]
) -> Int[Tensor, "n c 256"]:
    wide = ((levels - low) * 255 // (high - low).clamp(min=1)).clamp(0, 255)
    return torch.where(high > low, wide, levels)


def _equalized(
    levels: Int[Tensor, "256"], counts: Int[Tensor, "n c 256"], high: Int[Tensor, "n c 1"]
) -> Int[Tensor, "n c 256"]:
    step = (counts.sum(-1, keepdim=True) - counts.gather(2, high)) // 255
    before = counts.cumsum(-1) - counts
    even = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, even, levels)


@cache
def _table(name: str, amount: float) -> list[int]:
    """What each pixel level becomes."""
    match name:
        case "posterize":
            return [int(posterized(level, amount)) for level in range(256)]
        case "solarize":
            return [level if level < amount else 255 - level for level in range(256)]
    return [min(level + int(amount), 255) if level < 128 else level for level in range(256)]
