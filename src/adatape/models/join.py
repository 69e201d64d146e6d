"""TapeJoin: where the tape joins a ViT's rows, and how it is fed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from adatape.config import TapeFFN
from adatape.encoder import TapeBlock

QueryName = Literal["mean", "token"]
FFN_PLACES: tuple[TapeFFN, ...] = ("none", "append", "blocks", "append+blocks")


@dataclass(frozen=True)
class TapeJoin:
    """Where the tape joins the input's rows, and how it is fed: AdaTape's options beside its reader's."""

    layer: int = 1
    """block index before which tape rows are appended"""
    tape_ffn: TapeFFN = "append"
    """where tape rows take a feed-forward of their own: once when appended (ImageNet models), in blocks, both (JFT)"""
    query: QueryName | None = None
    """the mean of the tokens or the class token; None takes what the ViT pools"""
    gate: bool = False
    """start as the plain ViT: attention to tape rows opens as each head learns to, and no tape row is pooled"""


def check_join(vit: VisionTransformer, join: TapeJoin, query: str) -> None:
    if not 0 <= join.layer < len(vit.blocks):
        raise ValueError(f"layer is {join.layer}; the tape joins before a block index from 0 to {len(vit.blocks) - 1}")
    if join.tape_ffn not in FFN_PLACES:
        raise ValueError(f"tape_ffn is {join.tape_ffn!r}; it must be one of {', '.join(FFN_PLACES)}")
    if query not in ("mean", "token"):
        raise ValueError(f"query is {query!r}; it must be mean or token")
    if query == "token" and vit.cls_token is None:
        raise ValueError("query is 'token'; the ViT has no class token, so use 'mean'")
    if "blocks" in join.tape_ffn and not all(isinstance(block, TapeBlock) for block in vit.blocks[join.layer :]):
        raise ValueError(
            f"tape_ffn is {join.tape_ffn!r}; the ViT's blocks have no tape feed-forward: "
            f"build it with block_fn=TapeBlocksFrom({join.layer})"
        )


def hidden_width(vit: VisionTransformer) -> int:
    """The width inside the ViT's own feed-forward, gated or not; four times its own where a block has none apart."""
    last = getattr(getattr(vit.blocks[0], "mlp", None), "fc2", None)
    return last.in_features if isinstance(last, nn.Linear) else 4 * vit.embed_dim


def head_count(vit: VisionTransformer) -> int:
    """Heads of the ViT's attention, wherever its kind of block keeps them."""
    return next(module.num_heads for module in vit.blocks.modules() if hasattr(module, "num_heads"))
