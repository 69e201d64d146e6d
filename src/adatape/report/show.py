"""show_tape: what a model reads of one image, for a notebook or a figure of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from adatape.extras import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL import Image
    from torch import Tensor

    from adatape.models.base import Adaptive


def show_tape(model: Adaptive, image: Tensor | Image.Image | str | Path, ax: Axes | None = None) -> Axes:
    """Draws what the model reads of an image, numbered in reading order, and returns matplotlib's axes.

    Windows of a large image and patches of an input bank are outlined on the image; each tape token of an input bank
    has `merge` (K) patches, of which the heaviest has the number. Tokens of a learned bank lie nowhere, and those of
    sequences on no image: their weights are drawn as bars with their index in the bank. A tensor is passed to the model
    as it is; a PIL image or a path is resized to the model's size and scaled as its `pretrained_cfg` says.
    """
    try:
        from adatape.report.pictures.tape import draw_tape
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(how_to_install(error.name) or str(error), name=error.name) from error
    return draw_tape(model, image, ax)
