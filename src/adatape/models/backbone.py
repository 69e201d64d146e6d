"""Which models of timm can be wrapped, and what differs between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from timm.layers import HybridEmbed, PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.models.rope import GridRope, check_rope

ViT: TypeAlias = VisionTransformer | Eva
# The nearest models that can be wrapped, by the class of one that cannot.
NEAREST = {
    "Beit": "its attention is biased by relative positions, which a tape token lacks; try eva02_base_patch14_224",
    "NaFlexVit": "it takes sequences of patches of any shape; try vit_base_patch16_siglip_224.v2_webli",
    "VisionTransformerRelPos": "a tape token has no relative position; try vit_medium_patch16_rope_reg1_gap_256",
    "VisionTransformerSAM": "its blocks take maps and windows; try vit_base_patch16_224.mae",
    "Hiera": "its blocks pool tokens in fixed groups; try vit_base_patch16_224.mae",
    "Cait": "its class token sees patches in other blocks than theirs; try deit3_small_patch16_224",
    "SwinTransformer": "it attends within windows of maps; try vit_base_patch16_224",
    "SwinTransformerV2": "it attends within windows of maps; try vit_base_patch16_224",
}


def check_backbone(vit: nn.Module, *, any_backbone: bool) -> None:
    """Refuses what cannot be wrapped; `any_backbone` is False for models that know VisionTransformer only."""
    name = type(vit).__name__
    if not isinstance(vit, VisionTransformer | Eva):
        why = _held(vit) or NEAREST.get(name, "try vit_base_patch16_224")
        raise TypeError(f"the backbone is a {name}; it must be a timm VisionTransformer or Eva: {why}")
    for method in ("forward", "forward_features"):
        if not getattr(type(vit), method).__module__.startswith("timm."):
            raise TypeError(f"the backbone is a {name} with a {method} of its own, which a wrapper would not call")
    if any_backbone:
        check_rope(vit)
        return
    if isinstance(vit, Eva):
        raise TypeError("the backbone is an Eva; only AdaTape and Plain take one, so it must be a VisionTransformer")
    if isinstance(vit, VisionTransformerDistilled):
        raise ValueError("the backbone has a distillation head; only AdaTape and Plain take one: use the ViT without")
    if vit.attn_pool is not None:
        raise ValueError(
            f"global_pool is {vit.global_pool!r}; attention pooling would attend to hidden tape tokens, "
            "so it must be 'token', 'avg', 'max' or 'avgmax'"
        )


def timm_name(model: nn.Module) -> str:
    """The name by which timm created a model, with its tag; empty where that is not known."""
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    return ".".join(part for part in (known.get("architecture"), known.get("tag")) if part)


def _held(module: nn.Module) -> str | None:
    """Where a model that is wrapped, compiled or distributed already holds a ViT."""
    names = (name for name, part in module.named_modules() if isinstance(part, VisionTransformer | Eva))
    found = next(names, None)
    return None if found is None else f"it holds one as .{found}, so wrap that"


def check_images(vit: ViT, x: Tensor) -> None:
    """Refuses what is no batch of images; a ViT of symbols has another embedding."""
    if not isinstance(vit.patch_embed, PatchEmbed | HybridEmbed):
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"images are a {type(x).__name__}; they must be a tensor")
    if x.dim() != 4 or x.shape[1] != vit.in_chans or not x.is_floating_point():
        said = f"images have shape {tuple(x.shape)} and dtype {x.dtype}"
        raise ValueError(f"{said}; they must be (b, {vit.in_chans}, height, width), floating point")


def embed(vit: ViT, x: Tensor) -> tuple[Tensor, GridRope | None]:
    """Tokens that enter the first block, and their rotary positions if the ViT has any."""
    check_images(vit, x)
    if not isinstance(vit, Eva):
        return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x)))), None
    tokens, table = vit._pos_embed(vit.patch_embed(x))
    image = x.shape[-2], x.shape[-1]
    if table is None:
        return vit.norm_pre(tokens), None
    grid, patch = vit.patch_embed.dynamic_feat_size(image), vit.patch_embed.patch_size
    return vit.norm_pre(tokens), GridRope(vit.rope, table, grid, image, patch)


def pooled_prefix(vit: ViT) -> int | None:
    """How many first rows the head sees, if it sees no others; None if it sees all."""
    if isinstance(vit, VisionTransformerDistilled):
        return 2
    return 1 if vit.global_pool == "token" and vit.attn_pool is None else None


def two_sides(name: str, size: Any) -> tuple[int, int]:
    """Height and width of a size that is one side or both; timm takes negative ones."""
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(hasattr(side, "__index__") and side > 0 for side in sides):
        raise ValueError(f"{name} is {size!r}; it must be a side in pixels, or height and width")
    return sides


def default_bank_patch(vit: ViT) -> int:
    """8 where it divides the image, else half the ViT's patch."""
    if all(side % 8 == 0 for side in vit.patch_embed.img_size):
        return 8
    return max(1, min(vit.patch_embed.patch_size) // 2)
