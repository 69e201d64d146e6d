"""What a model that reads windows refuses: options that cannot be, and images that do not suit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from adatape.windows.answers import ANSWERS
from adatape.windows.options import WindowOptions
from adatape.windows.sources import OpenedImage

LEAST = {
    **dict.fromkeys(("window", "steps", "layer", "cell", "scan_scale", "scan_fold", "scan_width"), 1),
    **dict.fromkeys(("search", "training_steps"), 0),
}


def check_options(vit: VisionTransformer, image: tuple[int, int], options: WindowOptions) -> None:
    for name, least in LEAST.items():
        _check_whole(name, getattr(options, name), least)
    check_floor("floor", options.floor)
    depth, patch, window = len(vit.blocks), vit.patch_embed.patch_size, options.window
    if options.layer is not None and not 0 < options.layer <= depth:
        raise ValueError(f"layer is {options.layer}; windows join before a block index from 1 to {depth}")
    if options.labels not in ANSWERS:
        raise ValueError(f"labels is {options.labels!r}; it must be one of {', '.join(ANSWERS)}")
    check_classes(vit.num_classes, options.labels)
    check_size(image, options, options.steps)
    if options.encoder == "vit" and (window % patch[0] or window % patch[1]):
        raise ValueError(f"window is {window}; the ViT encodes it, so its patches of {patch[0]} pixels must divide it")
    if options.view is not None and not _in_patches(options.view, patch):
        said = f"view is {options.view}; it must be a side, or height and width"
        raise ValueError(f"{said}, in patches of {patch[0]} pixels")
    reads, most = options.training_steps, most_apart(image, options.cell)
    if reads is not None and not 1 <= reads <= most:
        raise ValueError(f"training_steps is {reads}; it must be between 1 and {most}, a quarter of the image's cells")
    check_pooling(vit, options.view is not None)


def _check_whole(name: str, value: Any, least: int) -> None:
    if value is None and getattr(WindowOptions, name) is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def _in_patches(view: int | tuple[int, int], patch: tuple[int, int]) -> bool:
    sides = (view, view) if isinstance(view, int) else tuple(view)
    return len(sides) == 2 and all(side > 0 and side % by == 0 for side, by in zip(sides, patch, strict=True))


def check_floor(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}; it must be a probability from 0 to 1, below which reading stops")


def check_classes(classes: int, labels: str) -> None:
    if labels == "one" and classes == 1:
        raise ValueError("num_classes is 1 and labels 'one'; one label of one class says nothing: take 2, or 'several'")


def check_pooling(vit: VisionTransformer, view: bool) -> None:
    """Without a view the class token is the only row besides the tape, and the only one that the head may see."""
    if view:
        return
    if vit.cls_token is None:
        raise ValueError("view is None; the ViT has no class token to gather the tape, so give it a view")
    if vit.global_pool != "token":
        raise ValueError(
            f"view is None and global_pool {vit.global_pool!r}; there are no patches to pool, so give it a view, or a "
            "ViT with global_pool='token'"
        )


def most_apart(image: Sequence[int], cell: int) -> int:
    """Windows that any image of this size has room for, as no two neighbours are read: a quarter of its cells."""
    height, width = image
    return -(-height // cell) * -(-width // cell) // 4


def check_size(image: Sequence[int], options: WindowOptions, steps: int) -> None:
    height, width = image
    if min(height, width) < options.window:
        raise ValueError(f"window is {options.window}; it must fit the image, {height} × {width}")
    most = most_apart(image, options.cell)
    if steps > most:
        cells = f"{options.cell} × {options.cell} pixels"
        raise ValueError(f"steps is {steps}; an image of {height} × {width} has room for {most}, with cells of {cells}")


def check_batch(images: Tensor, channels: int, options: WindowOptions, steps: int) -> None:
    if images.dim() != 4 or images.shape[1] != channels or images.shape[0] == 0:
        shape = tuple(images.shape)
        raise ValueError(f"images have shape {shape}; they must have a batch, {channels} channels, height and width")
    if not images.is_floating_point():
        raise ValueError(f"images have dtype {images.dtype}; they must be floating point")
    check_size(images.shape[-2:], options, steps)


def check_listed(images: Sequence[Tensor | OpenedImage], channels: int, options: WindowOptions, steps: int) -> None:
    if not isinstance(images, Sequence):
        raise TypeError(f"images are a {type(images).__name__}; they must be a tensor or a list")
    if not len(images):
        raise ValueError("the list of images is empty; it must have at least one")
    for n, image in enumerate(images):
        if not isinstance(image, (Tensor, OpenedImage)):
            raise TypeError(f"image {n} is a {type(image).__name__}; it must be a tensor or from adatape.open_image")
        if isinstance(image, Tensor) and not image.is_floating_point():
            raise ValueError(f"image {n} has dtype {image.dtype}; it must be floating point")
        shape = tuple(image.shape)
        if len(shape) != 3 or shape[0] != channels:
            raise ValueError(f"image {n} has shape {shape}; it must have {channels} channels, height and width")
        check_size(shape[1:], options, steps)
