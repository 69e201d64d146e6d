"""Plain: a non-adaptive ViT with the same `Output` as the adaptive models."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from adatape.models.base import Adaptive, BlocksOutput, OnBlock


class Plain(Adaptive):
    """The wrapped ViT unchanged, the baseline of all comparisons."""

    any_backbone: ClassVar[bool] = True

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:  # noqa: ARG002
        tokens, rope = self.embed_with_rope(x)
        tokens = self.run_plain_blocks(tokens, rope, len(self.vit.blocks), on_block)
        return BlocksOutput(tokens, ponder=tokens.new_zeros(tokens.shape[0]))
