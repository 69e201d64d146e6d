"""What samples really cost before training, from what halting alone saves."""

from __future__ import annotations

import torch

from adatape.models.base import Adaptive


@torch.no_grad()
def typical_gflops(model: Adaptive, samples: int = 8, seed: int = 0) -> float:
    """The mean over noise images: before training, what halting alone would save."""
    channels, (height, width) = model.vit.in_chans, model.vit.patch_embed.img_size
    noise = torch.randn(samples, channels, height, width, generator=torch.Generator().manual_seed(seed))
    return model.actual_macs(model.eval()(noise, output=True)).double().mean().item() / 1e9
