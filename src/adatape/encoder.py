"""TapeBlock: timm's Block with a feed-forward of its own for tape rows."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from timm.layers import GluMlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn


def tape_mlp(width: int, hidden: int) -> GluMlp:
    """The GLU that tape tokens take: Dense(d, 2m), a · sigmoid(b), Dense(m, d)."""
    mlp = GluMlp(width, hidden_features=2 * hidden)
    for layer in (mlp.fc1, mlp.fc2):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return mlp


class TapeBlock(Block):
    """One attention for all rows; input rows take timm's feed-forward, the last `tape` rows take `tape_mlp`."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, **rest: Any) -> None:
        super().__init__(dim, num_heads, mlp_ratio, **rest)
        self.tape_mlp = tape_mlp(dim, int(dim * mlp_ratio))

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        tape: int = 0,
        scale: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """`scale` multiplies rows after each norm: an ablation, for a weight that a norm would divide out."""
        attended = self.attn(_scaled(self.norm1(x), scale), attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self._feed_forward(_scaled(self.norm2(x), scale), tape)))

    def _feed_forward(self, x: Tensor, tape: int) -> Tensor:
        if tape == 0:
            return self.mlp(x)
        split = x.shape[1] - tape
        return torch.cat([self.mlp(x[:, :split]), self.tape_mlp(x[:, split:])], 1)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale[..., None].to(x.dtype)


class TapeBlocksFrom:
    """A `block_fn` for timm's VisionTransformer: plain blocks below the layer where the tape joins, then TapeBlocks."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(self, depth: int = 0, **kwargs: Any) -> Block:
        kind = TapeBlock if depth >= self.layer else Block
        return kind(depth=depth, **kwargs)
