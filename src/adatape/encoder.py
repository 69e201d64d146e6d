"""TapeBlock, a timm Block with a separate feed-forward for tape rows, and TapeGate, a learned gate on tape keys."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from timm.layers import GluMlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from adatape.cuda_graphs import is_exporting
from adatape.macs import linear_macs
from adatape.packing import TapeRows
from adatape.ragged_attention import RaggedMask

# Small enough that a tape key scoring 30 above all inputs changes nothing in float32; large enough that its product
# with the small gradients of a large batch does not underflow.
GATE_FLOOR = 1e-22
GATE_SCALE = 10.0  # Adam's steps are about the rate; at a fine-tuning rate a gate must still get from 0 to about 1


def tape_mlp(width: int, hidden: int) -> GluMlp:
    """The GLU of tape tokens: Dense(d, 2m), a · sigmoid(b), Dense(m, d)."""
    mlp = GluMlp(width, hidden_features=2 * hidden)
    for layer in (mlp.fc1, mlp.fc2):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return mlp


class TapeBlock(Block):
    """Attention over all rows; input rows then use timm's `mlp`, the last `tape` rows use `tape_mlp`.

    In a packed batch input and tape rows alternate, so `tape` holds the indices of both.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, **rest: Any) -> None:
        super().__init__(dim, num_heads, mlp_ratio, **rest)
        self.tape_mlp = tape_mlp(dim, int(dim * mlp_ratio))

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        attn_mask: Tensor | RaggedMask | None = None,
        is_causal: bool = False,
        tape: int | TapeRows = 0,
        scale: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """`scale` multiplies rows after each norm: an ablation, for weights that a norm would divide out."""
        attended = self.attn(_scaled(self.norm1(x), scale), attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self._feed_forward(_scaled(self.norm2(x), scale), tape)))

    def _feed_forward(self, x: Tensor, tape: int | TapeRows) -> Tensor:
        if isinstance(tape, TapeRows):
            return self._feed_packed(x.flatten(0, 1), tape).view_as(x)
        if tape == 0:
            return self.mlp(x)
        split = x.shape[1] - tape
        return torch.cat([self.mlp(x[:, :split]), self.tape_mlp(x[:, split:])], 1)

    def feed_forward_macs(self, inputs: int, tape: int) -> int:  # noqa: ARG002
        """Multiply-adds of input rows; AdaTape's `cost` lists those of tape rows separately."""
        return inputs * linear_macs(self.mlp)

    def _feed_packed(self, x: Float[Tensor, "n d"], rows: TapeRows) -> Float[Tensor, "n d"]:
        inputs, tape = self.mlp(x.index_select(0, rows.inputs)), self.tape_mlp(x.index_select(0, rows.tape))
        return inputs.new_empty(x.shape).index_copy_(0, rows.inputs, inputs).index_copy_(0, rows.tape, tape)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale[..., None].to(x.dtype)


class TapeBlocksFrom:
    """A `block_fn` for timm's VisionTransformer: `Block` below index `layer`, `TapeBlock` from there on."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(self, depth: int = 0, **kwargs: Any) -> Block:
        kind = TapeBlock if depth >= self.layer else Block
        return kind(depth=depth, **kwargs)


class TapeGate(nn.Module):
    """A factor g on attention to the tape, one per block and head, initially 0.

    log g is added to the scores of tape keys, so attention mass on the tape is proportional to g: at first the output
    is that of the model without a tape, while the gradient of g has ordinary size. g uses the parameter's absolute
    value, with slope 1 at zero. If g were clamped at 0, the first step would close gates on a tape that is still
    harmful, and a tape behind a closed gate gets no gradient.

    Without gradients a gate of 0 hides the tape: its softmax weights are exactly 0. With gradients it is GATE_FLOOR, so
    that there is a slope; t tape keys that score at most s above all inputs then have weight t · GATE_FLOOR · exp(s).
    `wrap` warns where a ViT's scores are so large that this matters.
    """

    def __init__(self, blocks: int, heads: int) -> None:
        super().__init__()
        self.open = nn.Parameter(torch.zeros(blocks, heads))

    def keep(self, blocks: int) -> None:
        """Removes the gates of later blocks; frozen ones stay frozen."""
        self.open = nn.Parameter(self.open[:blocks].detach(), self.open.requires_grad)

    def forward(self) -> Float[Tensor, "blocks heads"]:
        """Log-gates, in float32 or better; without gradient in an exported model.

        A bias with gradient would choose another attention while it is traced than when the graph is converted.
        """
        opened = self.open.detach() if is_exporting() and not self.training else self.open
        opened = opened.to(torch.promote_types(opened.dtype, torch.float32))
        gate = GATE_SCALE * torch.where(opened < 0, -opened, opened)
        return (gate + GATE_FLOOR if torch.is_grad_enabled() else gate).log()
