"""Plain: a non-adaptive ViT with the same `Output` as the adaptive models."""

from __future__ import annotations

from torch import Tensor

from adatape.models.adaptive import Adaptive, Visit, Walk


class Plain(Adaptive):
    """The wrapped ViT unchanged, the baseline of all comparisons."""

    def walk(self, x: Tensor, visit: Visit, key: Tensor | None) -> Walk:  # noqa: ARG002
        tokens = self.embed(x)
        for layer, block in enumerate(self.vit.blocks):
            tokens = self.run_block(block, tokens)
            visit(layer, tokens)
        return Walk(tokens, ponder=tokens.new_zeros(tokens.shape[0]))
