"""Parameters and multiply-adds of a ViT's parts, computed from shapes. One multiply-add counts as 1, as in the paper.

Matmuls, convolutions and attention are counted; gathers, norms, softmax and other elementwise operations are not. A
test compares the counts with `torch.utils.flop_counter.FlopCounterMode`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn


class PartCost(NamedTuple):
    """One part of a model: its parameters, and its multiply-adds for one sample."""

    name: str
    parameters: int
    macs: int


class NoCostFormula(TypeError):  # noqa: N818
    """Raised for a model or module whose multiply-adds cannot be computed."""


def total(parts: Iterable[PartCost]) -> PartCost:
    parts = list(parts)
    return PartCost("total", sum(part.parameters for part in parts), sum(part.macs for part in parts))


def vit_cost(vit: VisionTransformer) -> list[PartCost]:
    """The parts of a plain ViT: every block runs once on all tokens."""
    blocks = sum(block_macs(block, input_tokens(vit)) for block in vit.blocks)
    return [embedding_cost(vit), PartCost("blocks", parameter_count(vit.blocks, vit.norm), blocks), head_cost(vit)]


def embedding_cost(vit: VisionTransformer) -> PartCost:
    loose = [vit.pos_embed, vit.cls_token, vit.reg_token, getattr(vit, "dist_token", None)]
    parameters = sum(each.numel() for each in loose if isinstance(each, nn.Parameter))
    rope = getattr(vit, "rope", None)
    parameters += parameter_count(vit.patch_embed, vit.norm_pre, *([] if rope is None else [rope]))
    return PartCost("patch embedding", parameters, token_macs(vit.patch_embed))


def head_cost(vit: VisionTransformer) -> PartCost:
    heads = [vit.head, vit.head_dist] if hasattr(vit, "head_dist") else [vit.head]
    macs, pool = sum(map(linear_macs, heads)), vit.attn_pool
    if pool is None:
        return PartCost("head", parameter_count(*heads, vit.fc_norm), macs)
    with_prefix = getattr(vit, "pool_include_prefix", True)  # Eva pools all tokens
    macs += attention_pool_macs(pool, input_tokens(vit) if with_prefix else vit.patch_embed.num_patches)
    return PartCost("head", parameter_count(*heads, vit.fc_norm, pool), macs)


def attention_pool_macs(pool: Any, rows: int) -> int:
    """Multiply-adds of timm's AttentionPoolLatent: keys and values of all rows, the rest for its latent rows only."""
    keys = linear_macs(pool.kv)
    attended = 2 * rows * pool.num_heads * pool.head_dim
    return rows * keys + pool.latent_len * (linear_macs(pool) - keys + attended)


def block_macs(block: Any, inputs: int, tape: int = 0) -> int:
    """Multiply-adds of attention and feed-forward over all rows; blocks may override `feed_forward_macs`."""
    rows = inputs + tape
    attention = rows * linear_macs(block.attn) + 2 * rows * rows * block.attn.num_heads * block.attn.head_dim
    fed = getattr(block, "feed_forward_macs", None)
    return attention + (rows * linear_macs(block.mlp) if fed is None else fed(inputs, tape))


def input_tokens(vit: VisionTransformer) -> int:
    return vit.patch_embed.num_patches + vit.num_prefix_tokens


def linear_macs(module: nn.Module) -> int:
    """Multiply-adds of a module's linear layers for one row."""
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def parameter_count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def token_macs(module: nn.Module) -> int:
    """Multiply-adds of computing one sample's tokens, by the module's `token_macs` or for timm's PatchEmbed."""
    own: Any = getattr(module, "token_macs", None)
    if own is not None:
        macs: int = own()
        return macs
    if isinstance(module, PatchEmbed):
        return module.num_patches * module.proj.weight.numel()
    raise NoCostFormula(f"no cost formula for the tokens of {type(module).__name__}; define its method token_macs")
