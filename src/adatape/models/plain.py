"""Plain: a non-adaptive ViT with the same `Output` as the adaptive models."""

from __future__ import annotations

from torch import Tensor

from adatape.models.base import Adaptive, BlocksOutput, OnBlock


class Plain(Adaptive):
    """The wrapped ViT unchanged, the baseline of all comparisons."""

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:  # noqa: ARG002
        tokens = self.embed(x)
        for layer, block in enumerate(self.vit.blocks):
            tokens = self.run_block(block, tokens)
            on_block(layer, tokens)
        return BlocksOutput(tokens, ponder=tokens.new_zeros(tokens.shape[0]))
