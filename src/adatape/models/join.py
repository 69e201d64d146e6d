"""TapeJoin: before which block the tape is appended, and which feed-forward its rows use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from adatape.config import TapeFFN
from adatape.encoder import TapeBlock
from adatape.models.backbone import ViT

QueryName = Literal["mean", "token"]
FFN_PLACES: tuple[TapeFFN, ...] = ("none", "append", "blocks", "append+blocks")


@dataclass(frozen=True)
class TapeJoin:
    """AdaTape's options other than those of its reader."""

    layer: int = 1
    """index of the block before which tape rows are appended"""
    tape_ffn: TapeFFN = "append"
    """where tape rows have a separate feed-forward: when appended (ImageNet models), in the blocks, or both (JFT)"""
    query: QueryName | None = None
    """mean: the mean of all tokens; token: the class token; None: what the ViT pools"""
    gate: bool = False
    """start as the plain ViT: a learned gate per head on attention to tape rows, which are not pooled"""


def check_join(vit: ViT, join: TapeJoin, query: str) -> None:
    if not isinstance(join.layer, int) or not 0 <= join.layer < len(vit.blocks):
        raise ValueError(f"layer is {join.layer}; it must be a block index from 0 to {len(vit.blocks) - 1}")
    if join.tape_ffn not in FFN_PLACES:
        raise ValueError(f"tape_ffn is {join.tape_ffn!r}; it must be one of {', '.join(FFN_PLACES)}")
    if query not in ("mean", "token"):
        raise ValueError(f"query is {query!r}; it must be mean or token")
    if query == "token" and vit.cls_token is None:
        raise ValueError("query is 'token', but the ViT has no class token; it must be 'mean'")
    if vit.attn_pool is not None and not join.gate:
        raise ValueError(
            f"global_pool is {vit.global_pool!r}; attention pooling would attend to hidden tape tokens, "
            "so gate must be True, or global_pool 'token', 'avg', 'max' or 'avgmax'"
        )
    if "blocks" in join.tape_ffn and not all(isinstance(block, TapeBlock) for block in vit.blocks[join.layer :]):
        raise ValueError(
            f"tape_ffn is {join.tape_ffn!r}, but the ViT's blocks have no tape feed-forward; "
            f"build it with block_fn=TapeBlocksFrom({join.layer})"
        )


def hidden_width(vit: ViT) -> int:
    """The hidden width of the ViT's feed-forward; 4 × embed_dim for blocks without a separate one."""
    last = getattr(getattr(vit.blocks[0], "mlp", None), "fc2", None)
    return last.in_features if isinstance(last, nn.Linear) else 4 * vit.embed_dim


def head_count(vit: ViT) -> int:
    """The ViT's number of attention heads, for any kind of block."""
    return next(module.num_heads for module in vit.blocks.modules() if hasattr(module, "num_heads"))
