"""Rescale: converts images from this package's range, -1 … 1, to what a pretrained ViT was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

HALF = 0.5


class Rescale(nn.Module):
    """(pixels - mean) / std, with pixels from 0 to 1; both are saved with the weights, so they belong to the run."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, x: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b ch height width"]:
        return (((x + 1) / 2 - self.mean) / self.std).to(x.dtype)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation by channel, without the digits that float32 adds."""
        mean, std = (
            tuple(float(str(value)) for value in each.float().cpu().numpy().flatten()) for each in self.buffers()
        )
        return mean, std


def rescale_as(settings: Mapping[str, Any], channels: int) -> Rescale | None:
    """What a `pretrained_cfg` asks for; None where it is -1 … 1. Other channels than its three get their average."""
    missing = [name for name in ("mean", "std") if not settings.get(name)]
    if missing:
        raise ValueError(f"model.scaling is 'backbone', but the model's pretrained_cfg has no {missing[0]}")
    mean, std = (_by_channel(settings[name], channels) for name in ("mean", "std"))
    return None if {*mean, *std} == {HALF} else Rescale(mean, std)


def _by_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
