"""Canvases of a haystack with one to four digits, and the windows that a model read of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adatape.data.augment import scaled
from adatape.data.haystack import MOST_DIGITS, Haystack
from adatape.models.base import Adaptive
from adatape.report.pictures.style import ALERT, INK, picture
from adatape.report.pictures.tape import draw_tape, read

LOOKED_AT = 64  # canvases of each number of digits, to choose a typical one from


def draw_haystack(path: Path, model: Adaptive, canvases: Haystack) -> Path:
    """A typical canvas of each number of digits, its label and the answer; wrong answers are in red."""
    shown = [typical(model, canvases, count) for count in range(1, MOST_DIGITS + 1)]
    x = _batch(canvases, shown)
    with torch.inference_mode():
        answers = model.eval()(x).argmax(1).tolist()
    with picture(path, 7.9, pads=(0.06, 0.06)) as figure:
        for count, (axes, place) in enumerate(zip(figure.subplots(2, 2).flatten(), shown, strict=True), 1):
            draw_tape(model, x[count - 1], axes)
            label, answer = int(canvases.labels[place]), answers[count - 1]
            digits = f"{count} digit" if count == 1 else f"{count} digits"
            axes.set_title(f"{digits} of class {label}; answer {answer}", color=INK if label == answer else ALERT)
    return path


def typical(model: Adaptive, canvases: Haystack, count: int) -> int:
    """The first canvas of so many digits whose tape has the median length."""
    places = np.flatnonzero(canvases.digits == count)[:LOOKED_AT]
    lengths = read(model, _batch(canvases, places.tolist())).length
    return int(places[int((lengths == lengths.median()).nonzero()[0])])


def _batch(canvases: Haystack, places: list[int]) -> Tensor:
    return scaled(torch.from_numpy(canvases.images[places]).permute(0, 3, 1, 2))
