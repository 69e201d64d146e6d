"""What a model costs by part, whichever it is; the formulas stand beside the models that they count."""

from __future__ import annotations

import copy

from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from adatape.macs import NoCostFormula, PartCost, total, vit_cost
from adatape.models.base import Adaptive

__all__ = ["NoCostFormula", "cost", "total"]


def cost(model: nn.Module, tape: int | None = None, image: tuple[int, int] | None = None) -> list[PartCost]:
    """The parts of a model for one sample that reads `tape` tokens; None is the bound, all that its budget allows.

    `image` is the sample's height and width, where they are not the model's (timm's `dynamic_img_size`).
    """
    if image is not None:
        model = copy.deepcopy(model).to("meta")
        model.set_input_size(image)  # type: ignore[operator]
    if isinstance(model, Adaptive):
        return model.cost(tape)
    if not isinstance(model, VisionTransformer | Eva):
        known = "timm's VisionTransformer and Eva, and their wrappers"
        raise NoCostFormula(f"no cost formula for {type(model).__name__}; known are {known}")
    if tape is not None:
        raise ValueError(f"tape is {tape}; {type(model).__name__} reads none")
    return vit_cost(model)
