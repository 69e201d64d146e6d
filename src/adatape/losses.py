"""The classification loss, shared by training, `bench` and the models' `loss` methods."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

LossName = Literal["softmax", "sigmoid"]


def class_loss(logits: Float[Tensor, "b c"], target: Tensor, kind: LossName = "softmax") -> Float[Tensor, ""]:
    """Softmax cross-entropy, or sigmoid cross-entropy summed over classes; targets are indices or probabilities."""
    logits = logits.float()
    if kind == "softmax":
        return F.cross_entropy(logits, target)
    if kind != "sigmoid":
        raise ValueError(f"kind is {kind!r}; it must be 'softmax' or 'sigmoid'")
    shares = F.one_hot(target, logits.shape[1]).float() if target.dim() == 1 else target
    return F.binary_cross_entropy_with_logits(logits, shares, reduction="sum") / logits.shape[0]
