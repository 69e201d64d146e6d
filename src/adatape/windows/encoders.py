"""Encoders of windows: a window of pixels becomes one feature vector."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class WindowConvolutions(nn.Module):
    """Three convolutions, each halving the window, and their maximum over all places: for small images of few kinds."""

    def __init__(self, channels: int, width: int, widths: tuple[int, int, int] = (32, 64, 128)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o in zip((channels, *widths[:-1]), widths, strict=True):
            layers += [nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.project = nn.Linear(widths[-1], width)
        self.num_features = width

    def forward(self, windows: Float[Tensor, "n ch size size"]) -> Float[Tensor, "n width"]:
        x = self.layers(windows.contiguous(memory_format=torch.channels_last))
        return self.project(x.amax((2, 3)))

    def macs(self, size: int) -> int:
        total = self.project.weight.numel()
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                size = -(-size // 2)
                total += size * size * layer.weight.numel()
        return total


class WindowHead(nn.Module):
    """How much a window's evidence counts, and its evidence for each class, both as logits."""

    def __init__(self, width: int, classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.hidden, self.gelu = nn.Linear(width, hidden), nn.GELU()
        self.reset_classes(classes)

    def reset_classes(self, classes: int) -> None:
        self.out = nn.Linear(self.hidden.out_features, 1 + classes).to(self.hidden.weight)
        nn.init.zeros_(self.out.bias)
        # Gates start shut: the evidence of many shut windows adds up to little, so that one open window stands out.
        nn.init.constant_(self.out.bias[:1], -3.0)

    def forward(self, features: Float[Tensor, "*n width"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n classes"]]:
        out = self.out(self.gelu(self.hidden(self.norm(features)))).float()
        return out[..., 0], out[..., 1:]
