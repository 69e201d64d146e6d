"""ViTs that do not adapt, with the same `Output`: Plain, PlainViT, ViT-3FFN, and patch sizes that timm lacks."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import timm
import torch
from jaxtyping import Float
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from adatape.config import SIZES
from adatape.macs import linear_macs
from adatape.models.base import Adaptive, BlocksOutput, OnBlock
from adatape.models.registry import register


class Plain(Adaptive):
    """The wrapped ViT unchanged, the baseline of all comparisons."""

    any_backbone: ClassVar[bool] = True

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:  # noqa: ARG002
        tokens, rope = self.embed_with_rope(x)
        tokens = self.run_plain_blocks(tokens, rope, len(self.vit.blocks), on_block)
        return BlocksOutput(tokens, ponder=tokens.new_zeros(tokens.shape[0]))


def sincos2d(height: int, breadth: int, width: int) -> Float[Tensor, "n width"]:
    """[sin xω, cos xω, sin yω, cos yω] of each patch's column x and row y, with ω_k = 10000^(-k / (width/4 - 1))."""
    if width % 4:
        raise ValueError(f"embed_dim is {width}; it must be a multiple of 4 for sines and cosines of two coordinates")
    omega = 10000.0 ** -torch.linspace(0, 1, width // 4)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(breadth), indexing="ij")
    angles = [place.flatten()[:, None] * omega for place in (x, y)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], 1)


class SincosViT(VisionTransformer):
    """timm's ViT without a class token, with fixed sincos2d positions and a head initialised to zero."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "class_token": False, "pos_embed": "none"})
        del self.pos_embed
        self.register_buffer("pos_embed", self._positions(), persistent=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        super().init_weights(mode, needs_reset)
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
        # timm's init_weights overwrites pos_embed; the constructor calls this before the buffer exists.
        if "pos_embed" in self._buffers:
            self.pos_embed = self._positions()

    def init_non_persistent_buffers(self) -> None:
        """Makes the positions anew; timm calls it where a model was built without memory."""
        self.pos_embed = self._positions()

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        self.pos_embed = self._positions()

    def _positions(self) -> Float[Tensor, "1 n d"]:
        height, breadth = self.patch_embed.grid_size
        return sincos2d(height, breadth, self.embed_dim)[None].to(self.patch_embed.proj.weight)


class ThreeFeedForwards(Block):
    """Attention over all rows, then separate feed-forwards for class token, first and second half of the patches.

    The halves are in raster order; with an odd number of patches the second has one more.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, class_mlp_ratio: float = 4.0, **rest: Any
    ) -> None:
        super().__init__(dim, num_heads, class_mlp_ratio, **rest)
        self.mlp_first, self.mlp_second = (Block(dim, num_heads, mlp_ratio, **rest).mlp for _ in range(2))

    def forward(
        self, x: Float[Tensor, "b n d"], attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Float[Tensor, "b n d"]:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        return x + self.drop_path2(self.ls2(self._feed_forward(self.norm2(x))))

    def feed_forward_macs(self, inputs: int, tape: int) -> int:  # noqa: ARG002
        first = (inputs - 1) // 2
        fed = ((1, self.mlp), (first, self.mlp_first), (inputs - 1 - first, self.mlp_second))
        return sum(rows * linear_macs(mlp) for rows, mlp in fed)

    def _feed_forward(self, x: Tensor) -> Tensor:
        half = 1 + (x.shape[1] - 1) // 2
        return torch.cat([self.mlp(x[:, :1]), self.mlp_first(x[:, 1:half]), self.mlp_second(x[:, half:])], 1)


def build_vit(**options: Any) -> Plain:
    """A ViT with a patch size that timm lacks: class token, learned positions."""
    return Plain(VisionTransformer(**options))


def build_plainvit(**options: Any) -> Plain:
    """PlainViT (Beyer et al. 2022): no class token, mean pooling, fixed sincos2d positions, zero-initialised head."""
    for name in ("class_token", "reg_tokens"):
        if options.get(name):
            raise ValueError(f"{name} is {options[name]}; PlainViT has patch positions only, so leave it out")
    if options.get("pos_embed", "none") != "none":
        raise ValueError(f"pos_embed is {options['pos_embed']!r}; PlainViT's positions are sincos2d, so leave it out")
    if options.get("dynamic_img_size"):
        raise ValueError("dynamic_img_size is True; it would interpolate positions, so call set_input_size instead")
    return Plain(SincosViT(**{"global_pool": "avg", "fc_norm": False, **options}))


def build_vit3ffn(class_mlp_ratio: float = 4.0, **options: Any) -> Plain:
    """ViT-3FFN (AdaTape's appendix): separate feed-forwards for class token, first and second half of the patches."""
    if class_mlp_ratio <= 0:
        raise ValueError(f"class_mlp_ratio is {class_mlp_ratio}; it must be above 0")
    class_token, reg_tokens = options.get("class_token", True), options.get("reg_tokens", 0)
    if not class_token or reg_tokens:
        raise ValueError(
            f"class_token is {class_token} and reg_tokens is {reg_tokens}; ViT-3FFN needs class_token=True, "
            "for its first feed-forward, and reg_tokens=0"
        )
    if options.get("patch_drop_rate", 0) > 0:
        raise ValueError(
            f"patch_drop_rate is {options['patch_drop_rate']}; it must be 0, since dropping patches breaks raster order"
        )
    block = partial(ThreeFeedForwards, class_mlp_ratio=class_mlp_ratio)
    return Plain(VisionTransformer(**{**options, "block_fn": block}))


for _size in ("tiny", "small", "base"):
    register(f"plainvit_{_size}_patch16_224", build_plainvit, patch_size=16, **SIZES[_size])
for _patch in (14, 28):
    register(f"vit3ffn_base_patch{_patch}_224", build_vit3ffn, patch_size=_patch, **SIZES["base"])
for _size, _patch in (("tiny", 32), ("base", 14), ("base", 28)):
    if not timm.is_model(f"vit_{_size}_patch{_patch}_224"):
        register(f"vit_{_size}_patch{_patch}_224", build_vit, patch_size=_patch, **SIZES[_size])
