"""Banks of stored vectors, the same for every sample: trained ones, or a given tensor that stays as it is."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import trunc_normal_
from torch import Tensor, nn

from adatape.banks.base import Bank
from adatape.banks.inputs import vit_positions


class LearnedBank(Bank):
    """Trained vectors, the same for every sample."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"bank_size is {size}; it must be a whole number of at least 1")
        self.size, self.width = size, width
        self.tokens = nn.Parameter(trunc_normal_(torch.empty(size, width), std=0.02))

    @torch.no_grad()
    def init_from_vit(self, vit: Any) -> None:
        """Initialises with the ViT's embeddings of noise patches at random positions, so tokens differ."""
        embed, like = vit.patch_embed, next(vit.patch_embed.parameters())
        if like.is_meta:
            return
        count, training = math.ceil(self.size / embed.num_patches), embed.training
        noise = torch.randn(count, vit.in_chans, *embed.img_size, device=like.device, dtype=like.dtype)
        tokens = embed.eval()(noise).reshape(-1, self.tokens.shape[1])[: self.size]
        embed.train(training)
        places = vit_positions(vit)
        if places is not None:
            tokens = tokens + places[0, torch.randint(places.shape[1], (self.size,), device=places.device)]
        self.tokens.copy_(tokens)

    def forward(self, images: Tensor) -> Float[Tensor, "c d"]:  # noqa: ARG002
        return self.tokens

    def token_macs(self) -> int:
        return 0


class FrozenBank(Bank):
    """A given tensor, the same for every sample: a buffer that is saved with the model and not trained.

    `LearnedBank` is its trained counterpart.
    """

    tokens: Tensor

    def __init__(self, tokens: Float[Tensor, "c d"]) -> None:
        super().__init__()
        if tokens.dim() != 2 or not tokens.is_floating_point():
            raise ValueError(
                f"bank is a tensor of shape {tuple(tokens.shape)} and {tokens.dtype}; it must be (c, d), floating point"
            )
        bad = 0 if tokens.is_meta else int((~tokens.isfinite()).sum())
        if bad:
            raise ValueError(f"bank has {bad} non-finite values of {tokens.numel()}; it must have none")
        self.size, self.width = tokens.shape
        self.register_buffer("tokens", tokens.detach().clone())

    def forward(self, inputs: Tensor) -> Float[Tensor, "c d"]:  # noqa: ARG002
        return self.tokens

    def token_macs(self) -> int:
        return 0
