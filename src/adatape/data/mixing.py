"""Mixup and CutMix with the next sample of the global batch, and their soft labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from adatape.data_config import Augment


class Mixing(NamedTuple):
    """The mixing parameters of one step, of fixed shapes, so that applying it needs no synchronisation."""

    share: Tensor  # () float32, weight of the sample itself
    box: Tensor  # (4,) int64: top, left, bottom, right of the neighbour's patch; empty for Mixup


def draw_mixing(augment: Augment, size: int, key: int) -> Mixing:
    """Draws the Mixing of one step, a function of the key."""
    draws = np.random.default_rng(key & (2**63 - 1))
    if augment.cutmix and (not augment.mixup or draws.random() < 0.5):
        return _cutmix(augment.cutmix, size, draws)
    if augment.mixup:
        share = draws.beta(augment.mixup, augment.mixup)
        return _mixing(max(share, 1 - share), (0, 0, 0, 0))
    return _mixing(1.0, (0, 0, 0, 0))


def targets(labels: Int[Tensor, "n"], classes: int, smoothing: float = 0.0) -> Float[Tensor, "n k"]:
    """One-hot labels with label smoothing."""
    hot = labels[:, None] == torch.arange(classes, device=labels.device)
    return hot * (1 - smoothing) + smoothing / classes


def mixed(
    x: Float[Tensor, "m c h w"], y: Float[Tensor, "m k"], mixing: Mixing
) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n k"]]:
    """Mixes each of n samples with the next one, given n + 1; the last belongs to the next process."""
    rows, columns = (torch.arange(length, device=x.device) for length in x.shape[-2:])
    top, left, bottom, right = mixing.box
    pasted = ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))
    # The weight of the sample's own pixels, for Mixup or CutMix.
    own = torch.where((bottom > top) & (right > left), (~pasted).to(x.dtype), mixing.share.to(x.dtype))
    return torch.lerp(x[1:], x[:-1], own), torch.lerp(y[1:], y[:-1], mixing.share.to(y.dtype))


def _cutmix(alpha: float, size: int, draws: np.random.Generator) -> Mixing:
    half = size * (1 - draws.beta(alpha, alpha)) ** 0.5 / 2
    row, column = draws.uniform(0, size, 2)
    edges = (row - half, column - half, row + half, column + half)
    top, left, bottom, right = (round(min(max(edge, 0), size)) for edge in edges)
    return _mixing(1 - (bottom - top) * (right - left) / size**2, (top, left, bottom, right))


def _mixing(share: float, box: tuple[int, int, int, int]) -> Mixing:
    return Mixing(torch.tensor(share, dtype=torch.float32), torch.tensor(box))
