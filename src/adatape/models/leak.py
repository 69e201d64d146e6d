"""What a shut tape changes while gradients are computed, measured block by block when a ViT is wrapped.

Without gradients a shut gate gives the tape a weight of exactly 0. With gradients it is GATE_FLOOR, which changes
nothing unless a tape key scores more than about 30 above all inputs; whether a ViT's attention does that depends on its
weights.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from adatape.encoder import GATE_FLOOR
from adatape.models.backbone import ViT
from adatape.packing import key_bias

INPUTS, TAPE = 48, 16  # rows of the random tokens
ALLOWED = 1e-3  # largest change of an input row, relative to the largest change that the block makes


@torch.no_grad()
def gate_leaks(vit: ViT, layer: int) -> list[float]:
    """For each block from `layer` on, how much a shut tape of random tokens changes input rows.

    Relative to what the block itself changes at most; 0 on the meta device, where there is nothing to measure.
    """
    like = next(vit.blocks.parameters())
    if like.is_meta:
        return [0.0] * len(vit.blocks[layer:])
    tokens = torch.randn(1, INPUTS + TAPE, vit.embed_dim, generator=torch.Generator().manual_seed(0))
    return [_leak(block, tokens.to(like.device, like.dtype)) for block in vit.blocks[layer:]]


def _leak(block: nn.Module, rows: Tensor) -> float:
    training = block.training
    block.eval()
    shut, floored = (_inputs_after(block, rows, gate) for gate in (-math.inf, math.log(GATE_FLOOR)))
    block.train(training)
    made = (shut - rows[:, :INPUTS]).abs().max()
    return float((floored - shut).abs().max() / made.clamp(min=torch.finfo(made.dtype).tiny))


def _inputs_after(block: Any, rows: Tensor, log_gate: float) -> Tensor:
    visible = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    bias = key_bias(visible, rows.new_full((1,), log_gate), TAPE)
    return block(rows, attn_mask=bias)[:, :INPUTS]


def warn_of_leak(vit: ViT, layer: int) -> None:
    leaks = gate_leaks(vit, layer)
    open_ = [layer + n for n, leak in enumerate(leaks) if not leak <= ALLOWED]  # NaN too
    if open_:
        named = ", ".join(map(str, open_[:5])) + (", …" if len(open_) > 5 else "")
        warnings.warn(
            f"attention scores of block {named} are so large that a shut tape changes its output by up to "
            f"{max(leaks):.0%} while gradients are computed, {ALLOWED:.1%} is allowed; without gradients it changes "
            "nothing. Training starts from another output than the ViT's: check the scale of the ViT's weights",
            stacklevel=3,
        )
