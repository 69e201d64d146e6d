"""Models of symbol sequences: timm's VisionTransformer with symbols in place of patches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.layers import lecun_normal_
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.banks import Bank
from adatape.config import SequenceModel
from adatape.encoder import TapeBlocksFrom
from adatape.macs import linear_macs
from adatape.models.adatape import AdaTape, TapeJoin
from adatape.models.universal import Universal
from adatape.models.vit import Plain

SYMBOLS = 3


class SymbolEmbed(Bank):
    """A linear map of one-hot symbols -1, 0, 1 without positions, used as patch embedding or as bank."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.size = self.num_patches = length
        self.proj = nn.Linear(SYMBOLS, width)
        lecun_normal_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def token_macs(self) -> int:
        return self.size * linear_macs(self.proj)

    def forward(self, symbols: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.proj(F.one_hot(symbols + 1, SYMBOLS).to(self.proj.weight.dtype))


class NoTokens(nn.Module):
    """A patch embedding without tokens: the encoder sees the sequence through the tape only."""

    num_patches = 0
    like: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("like", torch.zeros(0), persistent=False)  # has the model's dtype

    def token_macs(self) -> int:
        return 0

    def forward(self, symbols: Int[Tensor, "b n"]) -> Float[Tensor, "b 0 d"]:
        return symbols.new_zeros(symbols.shape[0], 0, self.width, dtype=self.like.dtype)


def build_sequence_model(config: SequenceModel, length: int, classes: int = 2) -> Plain | Universal | AdaTape:
    """A Transformer or UT on class token and symbols, or an AdaTape on class token and a tape of symbols."""
    if config.reading is not None and config.universal is not None:
        raise ValueError(f"universal is {config.universal} and reading is given; one of them must be null")
    if config.width % config.heads:
        raise ValueError(f"model.heads is {config.heads}; it must divide model.width, {config.width}")

    def embed(embed_dim: int, **_: Any) -> nn.Module:
        return SymbolEmbed(length, embed_dim) if config.reading is None else NoTokens(embed_dim)

    blocks: dict[str, Any] = {"block_fn": TapeBlocksFrom(config.layer)} if "blocks" in config.tape_ffn else {}
    vit = VisionTransformer(
        embed_layer=embed,
        num_classes=classes,
        embed_dim=config.width,
        depth=config.depth if config.universal is None else 1,
        num_heads=config.heads,
        weight_init="moco",  # Xavier for each of q, k, v, as in flax: departure 38
        **(blocks if config.reading else {}),
    )
    if config.universal is not None:
        return Universal(vit, config.universal)
    if config.reading is None:
        return Plain(vit)
    bank = SymbolEmbed(length, config.width)
    join = TapeJoin(layer=config.layer, tape_ffn=config.tape_ffn)
    return AdaTape(vit, bank, config.reading, join, reader=config.reader)
