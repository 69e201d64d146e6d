"""A cheap scan of a large image, and windows at full resolution at the few places that are read."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from adatape.windows import scan
from adatape.windows.answers import SeveralLabels


class Scan(scan.Scan):
    """The package's scan with one score for each cell, which both the mixture and the windows teach.

    It is given images at the resolution that it sees. With `classes`, a second map guesses the class at every cell.
    """

    def __init__(
        self,
        channels: int,
        fold: int = 4,
        widths: tuple[int, ...] = (16, 32, 48, 48),
        strides: tuple[int, ...] = (2, 2, 1),
        classes: int = 0,
    ) -> None:
        super().__init__(channels, scan.ScanShape(1, fold, widths, strides))
        self.guess = nn.Conv2d(widths[-1], classes, 1) if classes else None

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """(b, ch, H, W) -> scores (b, h, w), fp32"""
        return self.score(self.features(images))[:, 0].float()

    def scores_and_guesses(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(b, ch, H, W) -> scores (b, h, w) and class logits (b, h, w, classes), fp32"""
        assert self.guess is not None
        x = self.features(images)
        return self.score(x)[:, 0].float(), self.guess(x).movedim(1, -1).float()

    def centre(self, cells: Tensor) -> Tensor:
        """Pixel at the middle of what cell (row or column) `cells` sees."""
        return cells * self.shape.cell + self.shape.fold


def choose(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k highest cells of (b, h, w), neighbours of a higher one left out: rows, columns and scores, each (b, k)."""
    at, top = scan.highest_apart(scores, k)
    return at // scores.shape[2], at % scores.shape[2], top


def cut(images: Tensor, centres: Tensor, size: int) -> Tensor:
    """Windows (b, k, size, size[, channels]) of (b, H, W[, channels]) around centres (b, k, 2); zero outside."""
    if images.dim() == 3:
        return scan.cut_windows(images[:, None], centres, size)[:, :, 0]
    return scan.cut_windows(images.movedim(-1, 1), centres, size).movedim(2, -1)


class Convolutions(nn.Module):
    """A small encoder of grey windows."""

    def __init__(self, width: int, channels: tuple[int, int, int] = (32, 64, 128)) -> None:
        super().__init__()
        a, b, c = channels

        def conv(i: int, o: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.GELU())

        self.layers = nn.Sequential(conv(1, a), conv(a, b, 2), conv(b, b), conv(b, c, 2), conv(c, c), conv(c, c, 2))
        self.project = nn.Linear(c, width)

    def forward(self, windows: Tensor) -> Tensor:
        """(n, 1, s, s) -> (n, width)"""
        x = self.layers(windows.contiguous(memory_format=torch.channels_last))
        return self.project(x.amax((2, 3)))

    def macs(self, size: int) -> int:
        total = 0
        for conv in (layer for layer in self.modules() if isinstance(layer, nn.Conv2d)):
            size = -(-size // conv.stride[0])
            total += size * size * 9 * conv.in_channels * conv.out_channels
        return total + self.project.in_features * self.project.out_features


def waves(places: Tensor) -> Tensor:
    """(b, k, 2) in [0, 1] -> (b, k, 32): sines and cosines of eight frequencies of either coordinate."""
    angles = places[..., None] * math.pi * 2.0 ** torch.arange(8, device=places.device)
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)


def value(evidence: Tensor, gate: Tensor | None = None) -> Tensor:
    """Probability that a window shows any of the classes: (…, classes) -> (…)"""
    shown = 1 - (1 - evidence.float().sigmoid()).prod(-1)
    return shown if gate is None else shown * gate.float().sigmoid()


def noisy_or(evidence: Tensor, gate: Tensor | None = None) -> Tensor:
    """log Π(1 - σ(g) σ(e)) over reads: (b, k, classes) -> (b, classes), the log-probability that none shows it."""
    p = evidence.float().sigmoid()
    if gate is not None:
        p = p * gate.float().sigmoid()[..., None]
    return torch.log1p(-p.clamp(max=1 - 1e-6)).sum(1)


def mixture_loss(scores: Tensor, guesses: Tensor, targets: Tensor) -> Tensor:
    """-log Σ_w softmax(scores)_w p_w(c), the mean over the classes c that are present.

    (b, h, w), (b, h, w, classes), (b, classes). A cell whose guess is right where others' are not rises.
    """
    return SeveralLabels().found(scores.flatten(1), guesses.flatten(1, 2), targets)


def presence_loss(log_none: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of presence from the log-probability of absence."""
    log_some = torch.log(-torch.expm1(log_none.clamp(max=-1e-6)))
    return -(targets * log_some + (1 - targets) * log_none).mean()
