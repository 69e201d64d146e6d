"""Tape banks: modules that compute the tokens a tape may be read from, all called as `bank(inputs)`.

A reader needs only the first coordinates of every token, to score them, and the tokens that it selects. `bank.open`
therefore returns an object that computes either on request.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.layers import lecun_normal_, resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn

from adatape.atr import at_least_float32, take
from adatape.macs import NoCostFormula, linear_macs, token_macs
from adatape.patches import PatchRows, matmul_dtype, raw_patches


class BankView:
    """An opened bank whose tokens are already computed."""

    def __init__(self, tokens: Float[Tensor, "c d"] | Float[Tensor, "b c d"]) -> None:
        self.tokens, self.size = tokens, tokens.shape[-2]

    def all(self) -> Float[Tensor, "*b c d"]:
        return self.tokens

    def take(self, index: Int[Tensor, "b t k"]) -> Float[Tensor, "b t k d"]:
        return take(self.tokens, index)

    def keys(self, norm: nn.LayerNorm | None, width: int) -> Float[Tensor, "*b c width"]:
        """The first `width` coordinates of every token after the reader's norm, without gradient."""
        with torch.no_grad():
            return (self.tokens.float() if norm is None else normed(self.tokens, norm))[..., :width].float()


class Bank(nn.Module):
    """Base class: maps a batch of inputs to tokens, (c, d) for all samples or (b, c, d)."""

    size: int  # tokens per sample (C)

    def open(self, inputs: Tensor) -> BankView:
        """Opens the bank for a batch; subclasses may return a `BankView` that computes tokens on request."""
        return BankView(self(inputs))

    def init_from_vit(self, vit: Any) -> None:
        """Initialises the bank from a pretrained ViT; does nothing by default."""

    def set_input_size(self, image: tuple[int, int]) -> None:
        """Changes the image size; does nothing by default."""

    def no_weight_decay(self) -> set[str]:
        return set()

    def token_macs(self) -> int:
        """Multiply-adds of computing one sample's tokens."""
        raise NoCostFormula(f"no cost formula for the tokens of {type(self).__name__}; define its method token_macs")


class NoBank(Bank):
    """An empty bank, for tapes that are not read from a bank."""

    size = 0

    def forward(self, inputs: Tensor) -> Float[Tensor, "0 0"]:
        return inputs.new_zeros(0, 0)

    def token_macs(self) -> int:
        return 0


class LearnedBank(Bank):
    """Trained vectors, the same for every sample."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"bank_size is {size}; it must be at least 1")
        self.size = size
        self.tokens = nn.Parameter(trunc_normal_(torch.empty(size, width), std=0.02))

    @torch.no_grad()
    def init_from_vit(self, vit: Any) -> None:
        """Initialises with the ViT's embeddings of noise patches at random positions, so tokens differ."""
        embed, like = vit.patch_embed, next(vit.patch_embed.parameters())
        if like.is_meta:
            return
        count, training = math.ceil(self.size / embed.num_patches), embed.training
        noise = torch.randn(count, vit.in_chans, *embed.img_size, device=like.device, dtype=like.dtype)
        tokens = embed.eval()(noise).reshape(-1, self.tokens.shape[1])[: self.size]
        embed.train(training)
        places = _positions(vit)
        if places is not None:
            tokens = tokens + places[0, torch.randint(places.shape[1], (self.size,), device=places.device)]
        self.tokens.copy_(tokens)

    def forward(self, images: Tensor) -> Float[Tensor, "c d"]:  # noqa: ARG002
        return self.tokens

    def token_macs(self) -> int:
        return 0


class InputBank(Bank):
    """Smaller patches of the same image: Z = h2(h1(X_p) + E_pos)."""

    def __init__(self, width: int, *, patch: int = 8, image: int | tuple[int, int] = 224, channels: int = 3) -> None:
        super().__init__()
        height, breadth = (image, image) if isinstance(image, int) else image
        if patch < 1 or height % patch or breadth % patch:
            raise ValueError(f"bank patch is {patch}; it must divide the image size {height} × {breadth}")
        self.patch = patch
        self.h1 = PatchRows((height, breadth), patch, channels, width)
        self.size = self.h1.num_patches
        self.pos_embed = nn.Parameter(torch.randn(1, self.size, width) * 0.02)
        self.h2 = nn.Linear(width, width)
        for layer in (self.h1.proj, self.h2):
            lecun_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    @torch.no_grad()
    def init_from_vit(self, vit: Any) -> None:
        """Initialises so that a bank token is the ViT's embedding of that patch, resized to the ViT's patch size.

        h1 keeps its random weights where the ViT's projection is no patch convolution of pixels, as in hybrids.
        """
        if self.pos_embed.is_meta or next(vit.patch_embed.parameters()).is_meta:
            return
        proj, mine = vit.patch_embed.proj, self.h1.proj
        if isinstance(proj, nn.Conv2d) and proj.stride == proj.kernel_size and proj.in_channels == mine.in_channels:
            mine.weight.copy_(_resized_projection(proj.weight, self.patch))
            mine.bias.copy_(torch.zeros_like(mine.bias) if proj.bias is None else proj.bias)
        places = _positions(vit)
        grids = self.h1.grid_size, vit.patch_embed.grid_size
        nn.init.zeros_(self.pos_embed)
        if places is not None:
            self.pos_embed.copy_(resample_abs_pos_embed(places, *grids, num_prefix_tokens=0))
        nn.init.eye_(self.h2.weight)
        nn.init.zeros_(self.h2.bias)

    def set_input_size(self, image: tuple[int, int]) -> None:
        """Changes the image size and resamples positions, as timm does for a ViT."""
        before = self.h1.grid_size
        self.h1.set_input_size(image)
        self.size = self.h1.num_patches
        moved = resample_abs_pos_embed(self.pos_embed.data, self.h1.grid_size, before, num_prefix_tokens=0)
        self.pos_embed = nn.Parameter(moved)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}

    def token_macs(self) -> int:
        return token_macs(self.h1) + self.size * linear_macs(self.h2)

    def forward(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b c d"]:
        return self.h2(self.h1(images) + self.pos_embed)

    def open(self, images: Float[Tensor, "b ch height width"]) -> BankView:
        return PatchView(self, images)


class PatchView(BankView):
    """An opened InputBank. A token is affine in its raw patch, so full tokens are computed only where they are read."""

    def __init__(self, bank: InputBank, images: Float[Tensor, "b ch height width"]) -> None:
        self.bank, self.images, self.size = bank, images, bank.size
        self.raw = raw_patches(images, bank.h1.patch_size).to(matmul_dtype(images))

    def all(self) -> Float[Tensor, "b c d"]:
        return self.bank(self.images)

    def take(self, index: Int[Tensor, "b t k"]) -> Float[Tensor, "b t k d"]:
        first = self.bank.h1.proj
        projected = F.linear(take(self.raw, index), first.weight.flatten(1), first.bias)
        return self.bank.h2(projected + F.embedding(index, self.bank.pos_embed[0]))

    def keys(self, norm: nn.LayerNorm | None, width: int) -> Float[Tensor, "b c width"]:
        with torch.no_grad():
            return affine_keys(self.raw, *self._composed(), norm, width)

    def _composed(self) -> tuple[Float[Tensor, "d p"], Float[Tensor, "c d"]]:
        """h2 ∘ h1 as one matrix, and one bias per position: h2(pos_embed + h1's bias)."""
        first, second = self.bank.h1.proj, self.bank.h2
        place = self.bank.pos_embed[0] if first.bias is None else self.bank.pos_embed[0] + first.bias
        return second.weight @ first.weight.flatten(1), second(place)


def affine_keys(
    raw: Float[Tensor, "b c p"],
    weight: Float[Tensor, "d p"],
    offset: Float[Tensor, "c d"],
    norm: nn.LayerNorm | None,
    width: int,
) -> Float[Tensor, "b c width"]:
    """The first `width` coordinates of LayerNorm(raw · weightᵀ + offset), without computing the others.

    Centring weight and offset makes every token's mean 0; its variance is then a quadratic form of its raw patch.
    """
    weight, offset = weight.float(), offset.float()
    if norm is None:
        return (raw @ weight[:width].T).float() + offset[:, :width]
    d, p = weight.shape
    weight, offset = weight - weight.mean(0), offset - offset.mean(1, keepdim=True)
    form, linear = weight.T @ weight / d, 2 * offset @ weight / d
    product = raw @ torch.cat([form, weight[:width].T], 1).to(raw.dtype)
    variance = (raw * (product[..., :p] + linear)).sum(-1) + offset.square().mean(1)
    scaled = (product[..., p:] + offset[:, :width]) * (variance.clamp(min=0) + norm.eps).rsqrt()[..., None]
    return scaled * norm.weight[:width].float() + norm.bias[:width].float()


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """`norm(x)` in float32 or better."""
    x = at_least_float32(x)
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


def _positions(vit: Any) -> Float[Tensor, "1 n d"] | None:
    """The ViT's position embeddings of patches, without prefix tokens; None where it has none."""
    positions = vit.pos_embed
    return None if positions is None else positions.detach()[:, positions.shape[1] - vit.patch_embed.num_patches :]


def _resized_projection(weight: Float[Tensor, "d ch height width"], patch: int) -> Float[Tensor, "d ch patch patch"]:
    """The projection of a patch that equals `weight` on the resized patch: `weight` times the resizing matrix."""
    one_pixel = torch.eye(patch * patch, device=weight.device).unflatten(1, (1, patch, patch))
    resized = F.interpolate(one_pixel, weight.shape[-2:], mode="bicubic", antialias=True).flatten(1)
    return (weight.float().flatten(2) @ resized.T).unflatten(2, (patch, patch)).to(weight.dtype)
