"""How the paper's code starts its blocks: flax's defaults, where timm draws every matrix with deviation 0.02."""

from __future__ import annotations

import torch
from timm.layers import lecun_normal_
from timm.models.vision_transformer import Block
from torch import nn

from adatape.models.adaptive import Adaptive

QKV = 3


@torch.no_grad()
def init_as_flax(model: Adaptive) -> None:
    """Xavier-uniform for each d × d projection and each feed-forward, LeCun-normal patches, a head of zeros.

    Query, key and value are one matrix in timm, but three in flax: each third is drawn by itself.
    """
    for module in model.vit.modules():
        if isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
            _zero(module.bias)
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for name, layer in block.named_modules():
            if isinstance(layer, nn.Linear):
                for part in layer.weight.chunk(QKV if name.endswith("qkv") else 1):
                    nn.init.xavier_uniform_(part)
                _zero(layer.bias)
    if isinstance(model.vit.head, nn.Linear):
        nn.init.zeros_(model.vit.head.weight)
        _zero(model.vit.head.bias)


def _zero(bias: nn.Parameter | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
