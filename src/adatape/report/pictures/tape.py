"""One image and what a model read of it: boxes on the image in reading order, or weights by index of the bank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from adatape.data.decode import decode, read_regular
from adatape.data.letterbox import LETTERBOX, letterboxed
from adatape.models.base import Adaptive
from adatape.records import Tape
from adatape.report.pictures.style import GREEN

STEPS = colormaps["plasma"]
SIDE = 5.0  # inches of a figure's longer side
Picture = Tensor | Image.Image | str | Path


def draw_tape(model: Adaptive, image: Picture, ax: Axes | None = None) -> Axes:
    if not hasattr(model, "tape_boxes"):
        raise TypeError(f"the model is a {type(model).__name__}, which reads no tape; adatape.wrap gives a ViT one")
    x = _as_batch(model, image)
    tape = read(model, x)
    boxes = model.tape_boxes(tape.index, (x.shape[-2], x.shape[-1])) if x.dim() == 4 else None
    if ax is None:
        aspect = x.shape[-2] / x.shape[-1] if boxes is not None else 0.4
        size = (SIDE, SIDE * aspect) if aspect <= 1 else (SIDE / aspect, SIDE)
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    if boxes is None:
        _draw_weights(ax, tape)
    else:
        _draw_scene(ax, x[0])
        _draw_boxes(ax, tape, boxes[0])
    return ax


def read(model: Adaptive, x: Tensor) -> Tape:
    """The tape of a batch, read as in inference."""
    training = {part: part.training for part in model.modules()}  # a part may be frozen in a model that trains
    try:
        with torch.inference_mode():
            output = model.eval()(x, output=True)
    finally:
        for part, mode in training.items():
            part.training = mode
    if output.tape is None:
        budget = " at a budget of 0" if model.adapts == "sequence" else ""
        raise ValueError(f"this model, {type(model).__name__}, reads no tape{budget}; there is nothing to show")
    return output.tape


def _as_batch(model: Adaptive, image: Picture) -> Tensor:
    like = next(model.parameters())
    if not isinstance(image, Tensor):
        return _scaled(model, image).to(like.device, like.dtype)
    batch = image if image.dim() in (2, 4) else image[None]  # a sequence is (n,), an image (channels, height, width)
    if batch.shape[0] != 1:
        raise ValueError(f"image has shape {tuple(image.shape)}; it must be one image")
    return batch.to(like.device)


def _scaled(model: Adaptive, image: Image.Image | str | Path) -> Float[Tensor, "1 ch height width"]:
    """A picture resized, or letterboxed, and scaled as the pretrained settings of the model or of its ViT say."""
    known: Any = getattr(model, "pretrained_cfg", None) or getattr(model.vit, "pretrained_cfg", None) or {}
    if "mean" not in known or "std" not in known:
        raise ValueError(f"image is a {type(image).__name__} and the model has no pretrained_cfg with mean and std; "
                         "pass a tensor as the model takes it")  # fmt: skip
    found = (
        image if isinstance(image, Image.Image) else decode(read_regular(image), str(image), exif_orientation=True)[0]
    )
    height, width = model.image_size
    channels = model.vit.in_chans
    if channels not in (1, 3):
        said = f"image is a {type(image).__name__} and the model takes {channels} channels, not 1 or 3"
        raise ValueError(f"{said}; pass a tensor as the model takes it")
    found = found.convert("L" if channels == 1 else "RGB")
    if known.get("crop_mode") != LETTERBOX["crop_mode"]:
        found = found.resize((width, height), Image.Resampling.BILINEAR)
    pixels = letterboxed(found, (height, width)).float() / 255
    mean, std = (torch.tensor(known[name])[:channels, None, None] for name in ("mean", "std"))
    return ((pixels - mean) / std)[None]


def _draw_scene(ax: Axes, x: Float[Tensor, "ch height width"]) -> None:
    """Pixels from the darkest to the brightest value, since scaling differs from model to model."""
    pixels = x.float().cpu()
    pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-6)
    pixels = pixels if len(pixels) in (1, 3) else pixels.mean(0, keepdim=True)
    near = "nearest" if max(pixels.shape) < 300 else "antialiased"
    ax.imshow(pixels.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", interpolation=near)
    ax.set_xticks([])
    ax.set_yticks([])


def _draw_boxes(ax: Axes, tape: Tape, boxes: Float[Tensor, "t k 4"]) -> None:
    """Lines are thicker where more of a token's weight lies; the heaviest box of a token has its number."""
    length = int(tape.length[0])
    for step in range(length):
        colour = STEPS(0.2 + 0.6 * step / max(1, length - 1))
        weights = tape.weight[0, step].tolist()
        heaviest = max(range(len(weights)), key=weights.__getitem__)
        for n, (top, left, height, width) in enumerate(boxes[step].tolist()):
            thick = 1 + 1.5 * weights[n] / max(weights[heaviest], 1e-6)
            corner = (left - 0.5, top - 0.5)
            ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=colour, linewidth=thick))
            if n == heaviest:
                within = (max(left, 0) - 0.5, max(top, 0) - 0.5)  # of a window that reaches beyond the image
                label = {"boxstyle": "circle,pad=0.15", "facecolor": colour, "edgecolor": "none"}
                ax.annotate(str(step + 1), within, (4, -4), textcoords="offset points", ha="center", va="center",
                            fontsize=8, color="white", bbox=label)  # fmt: skip


def _draw_weights(ax: Axes, tape: Tape) -> None:
    """A bar for each bank token that was read, in reading order; those of one tape token stand together."""
    length, merged = int(tape.length[0]), tape.index.shape[2]
    index, weight = tape.index[0, :length].tolist(), tape.weight[0, :length].tolist()
    for step in range(length):
        colour = STEPS(0.2 + 0.6 * step / max(1, length - 1)) if length > 1 else GREEN
        places = [step * (merged + 1) + n for n in range(merged)]
        ax.bar(places, weight[step], 0.8, color=colour)
        ax.annotate(str(step + 1), (places[0] + (merged - 1) / 2, max(weight[step])), (0, 3),
                    textcoords="offset points", ha="center", fontsize=8, color=colour)  # fmt: skip
    ticks = [step * (merged + 1) + n for step in range(length) for n in range(merged)]
    ax.set_xticks(ticks, [str(each) for step in index for each in step], rotation=90, fontsize=7)
    ax.set_xlabel("index in the bank, by tape token in reading order")
    ax.set_ylabel("weight")
    ax.set_ylim(0, 1.2 * max((max(each) for each in weight), default=1.0))
    ax.spines[["top", "right"]].set_visible(False)
