"""Tape banks: where tape tokens come from. All are called `bank(inputs)`, so the reader never asks which it has."""

from __future__ import annotations

import torch
from jaxtyping import Float
from timm.layers import PatchEmbed, lecun_normal_, resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn


class Bank(nn.Module):
    """Gives the tokens that may be read for a batch: (c, d) for all samples, or (b, c, d)."""

    size: int  # tokens per sample (C)


class NoBank(Bank):
    """Nothing to read: for tapes that are not read from a bank."""

    size = 0

    def forward(self, inputs: Tensor) -> Float[Tensor, "0 0"]:
        return inputs.new_zeros(0, 0)


class LearnedBank(Bank):
    """Trained vectors, the same for every sample."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"bank_size is {size}; it must be at least 1")
        self.size = size
        self.tokens = nn.Parameter(trunc_normal_(torch.empty(size, width), std=0.02))

    def forward(self, images: Tensor) -> Float[Tensor, "c d"]:  # noqa: ARG002
        return self.tokens


class InputBank(Bank):
    """Finer patches of the sample's own image: Z = h2(h1(X_p) + E_pos)."""

    def __init__(self, width: int, *, patch: int = 8, image: int | tuple[int, int] = 224, channels: int = 3) -> None:
        super().__init__()
        height, breadth = (image, image) if isinstance(image, int) else image
        if patch < 1 or height % patch or breadth % patch:
            raise ValueError(f"bank patch is {patch}; it must divide the image size {height} × {breadth}")
        self.patch = patch
        self.h1 = PatchEmbed((height, breadth), patch, channels, width)
        self.size = self.h1.num_patches
        self.pos_embed = nn.Parameter(torch.randn(1, self.size, width) * 0.02)
        self.h2 = nn.Linear(width, width)
        for layer in (self.h1.proj, self.h2):
            lecun_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def set_input_size(self, image: tuple[int, int]) -> None:
        """Takes images of another size; positions are resampled as timm resamples a ViT's."""
        before = self.h1.grid_size
        self.h1.set_input_size(image)
        self.size = self.h1.num_patches
        moved = resample_abs_pos_embed(self.pos_embed.data, self.h1.grid_size, before, num_prefix_tokens=0)
        self.pos_embed = nn.Parameter(moved)

    def forward(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b c d"]:
        return self.h2(self.h1(images) + self.pos_embed)
