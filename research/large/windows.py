"""A cheap scan of a large image, and windows at full resolution at the few places that are read."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scan(nn.Module):
    """Scores for cells of an image: unshuffled by `fold`, a 2 × 2 convolution, then one of 3 × 3 for each stride.

    Batch norms, since a LayerNorm over 16 channels of millions of places takes longer than the convolutions. With
    `classes`, a second map guesses the class at every cell, which the mixture needs.
    """

    def __init__(
        self,
        channels: int,
        fold: int = 4,
        widths: tuple[int, ...] = (16, 32, 48, 48),
        strides: tuple[int, ...] = (2, 2, 1),
        classes: int = 0,
    ) -> None:
        super().__init__()
        self.fold, self.strides = fold, strides

        def conv(i: int, o: int, kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
            return [nn.Conv2d(i, o, kernel, stride, padding, bias=False), nn.BatchNorm2d(o), nn.GELU()]

        layers = conv(channels * fold * fold, widths[0], 2)
        for i, o, stride in zip(widths[:-1], widths[1:], strides, strict=True):
            layers += conv(i, o, 3, stride, 1)
        self.layers = nn.Sequential(*layers)
        self.score = nn.Conv2d(widths[-1], 1, 1)
        self.guess = nn.Conv2d(widths[-1], classes, 1) if classes else None

    def features(self, images: Tensor) -> Tensor:
        """(b, ch, H, W) -> (b, c, h, w)"""
        x = F.pixel_unshuffle(images, self.fold).contiguous(memory_format=torch.channels_last)
        return self.layers(F.pad(x, (0, 1, 0, 1)))  # a cell's 2 × 2 begins at its own corner

    def forward(self, images: Tensor) -> Tensor:
        """(b, ch, H, W) -> scores (b, h, w), fp32"""
        return self.score(self.features(images))[:, 0].float()

    def scores_and_guesses(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(b, ch, H, W) -> scores (b, h, w) and class logits (b, h, w, classes), fp32"""
        assert self.guess is not None
        x = self.features(images)
        return self.score(x)[:, 0].float(), self.guess(x).movedim(1, -1).float()

    def stride(self) -> int:
        return self.fold * math.prod(self.strides)

    def centre(self, cells: Tensor) -> Tensor:
        """Centre pixel of the receptive field of `cells` (rows or columns): the first 2 × 2 spans 2 × fold pixels."""
        return cells * self.stride() + self.fold

    def macs(self, height: int, width: int) -> int:
        h, w, total = height // self.fold, width // self.fold, 0
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                s, (k, _) = layer.stride[0], layer.kernel_size
                h, w = -(-h // s), -(-w // s)
                total += h * w * k * k * layer.in_channels * layer.out_channels
        return total + h * w * self.score.in_channels


def choose(scores: Tensor, k: int, spread: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The k highest cells of (b, h, w) without neighbours of higher ones: rows, columns and scores, each (b, k)."""
    b, _, w = scores.shape
    around = F.max_pool2d(scores[:, None], 2 * spread + 1, stride=1, padding=spread)[:, 0]
    peaks = scores.masked_fill(scores < around, float("-inf"))
    top, at = peaks.view(b, -1).topk(k)
    return at // w, at % w, top


def cut(images: Tensor, centres: Tensor, size: int) -> Tensor:
    """Windows (b, k, size, size, …) of (b, H, W, …) around centres (b, k, 2); zero outside the image."""
    b, height, width = images.shape[:3]
    inside = torch.arange(size, device=images.device) - size // 2
    rows, columns = centres[..., 0, None] + inside, centres[..., 1, None] + inside  # (b, k, size)
    batch = torch.arange(b, device=images.device)[:, None, None, None]
    found = images[batch, rows.clamp(0, height - 1)[..., :, None], columns.clamp(0, width - 1)[..., None, :]]
    within = ((rows >= 0) & (rows < height))[..., :, None] & ((columns >= 0) & (columns < width))[..., None, :]
    return found * within.view(*within.shape, *[1] * (found.dim() - within.dim()))


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
    share = scores.flatten(1).log_softmax(1)
    mixed = (share[..., None] + guesses.flatten(1, 2).log_softmax(-1)).logsumexp(1)
    return -(mixed * targets).sum() / targets.sum()


def presence_loss(log_none: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of presence from the log-probability of absence."""
    log_some = torch.log(-torch.expm1(log_none.clamp(max=-1e-6)))
    return -(targets * log_some + (1 - targets) * log_none).mean()
