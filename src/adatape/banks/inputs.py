"""InputBank: patches of the sample's own image, finer than the ViT's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.layers import lecun_normal_, resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor, nn

from adatape.atr import take
from adatape.banks.base import Bank, BankView
from adatape.macs import linear_macs, token_macs
from adatape.patches import PatchRows, is_plain, matmul_dtype, raw_patches

RGB = 3  # channels


class InputBank(Bank):
    """Smaller patches of the same image: Z = h2(h1(X_p) + E_pos)."""

    def __init__(self, width: int, *, patch: int = 8, image: int | tuple[int, int] = 224, channels: int = 3) -> None:
        super().__init__()
        height, breadth = (image, image) if isinstance(image, int) else image
        if not isinstance(patch, int):
            raise ValueError(f"bank patch is {patch}; it must be a whole number")
        if patch < 1 or height % patch or breadth % patch:
            raise ValueError(f"bank patch is {patch}; it must divide the image size {height} × {breadth}")
        self.patch, self.width = patch, width
        self.h1 = PatchRows((height, breadth), patch, channels, width, strict_img_size=False)
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
        places = vit_positions(vit)
        grids = self.h1.grid_size, vit.patch_embed.grid_size
        nn.init.zeros_(self.pos_embed)
        if places is not None:
            self.pos_embed.copy_(resample_abs_pos_embed(places, *grids, num_prefix_tokens=0))
        nn.init.eye_(self.h2.weight)
        nn.init.zeros_(self.h2.bias)

    def boxes(
        self, index: Int[Tensor, "*n"], image: tuple[float, float], read: tuple[int, int] | None = None
    ) -> Float[Tensor, "*n 4"]:
        rows, columns = self.grid_of(read or self.h1.img_size)
        height, width = image[0] / rows, image[1] / columns
        top, left = index // columns * height, index % columns * width
        return torch.stack([top, left, torch.full_like(top, height), torch.full_like(left, width)], -1)

    def size_at(self, image: tuple[int, int]) -> int:
        rows, columns = self.grid_of(image)
        return rows * columns

    def set_input_size(self, image: tuple[int, int]) -> None:
        """Changes the image size and resamples positions, as timm does for a ViT."""
        before = self.h1.grid_size
        self.h1.set_input_size(image)
        self.size = self.h1.num_patches
        moved = resample_abs_pos_embed(self.pos_embed.data, self.h1.grid_size, before, num_prefix_tokens=0)
        self.pos_embed = nn.Parameter(moved)

    def fitted(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """With positions of this bank's grid, and a projection of as many channels, which may have been 3."""
        fitting, channels = dict(stored), self.h1.proj.in_channels
        places, projection = stored.get("pos_embed"), stored.get("h1.proj.weight")
        if places is not None and places.shape[1] != self.size:
            fitting["pos_embed"] = resample_abs_pos_embed(places, list(self.h1.grid_size), num_prefix_tokens=0)
        if projection is not None and projection.shape[1] == RGB != channels:
            fitting["h1.proj.weight"] = adapt_input_conv(channels, projection)
        return fitting

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}

    def token_macs(self) -> int:
        return token_macs(self.h1) + self.size * linear_macs(self.h2)

    def forward(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "b c d"]:
        return self.h2(self.h1(images) + self.positions(images))

    def open(
        self,
        images: Float[Tensor, "b ch height width"],
        tokens: Float[Tensor, "b n d"],  # noqa: ARG002
        query: Float[Tensor, "b d"],  # noqa: ARG002
    ) -> BankView:
        """Through h1 and h2 as modules where a tool has replaced their layers or weights; else without all tokens."""
        return PatchView(self, images) if is_plain(self.h1.proj) and is_plain(self.h2) else BankView(self(images))

    def positions(self, images: Float[Tensor, "b ch height width"]) -> Float[Tensor, "1 c d"]:
        """Those of the bank, resampled where images have another size, as timm's ViTs with `dynamic_img_size` do."""
        grid = self.grid_of((images.shape[-2], images.shape[-1]))
        return resample_abs_pos_embed(self.pos_embed, grid, self.h1.grid_size, num_prefix_tokens=0)

    def grid_of(self, image: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of an image of that height and width."""
        patch = self.patch
        if any(side % patch for side in image):
            raise ValueError(
                f"images are {image[0]} × {image[1]} and the bank's patches {patch} × {patch}; they must divide both "
                "sides, also where the ViT pads images: resize or pad them first"
            )
        return image[0] // patch, image[1] // patch


class PatchView(BankView):
    """An opened InputBank. A token is affine in its raw patch, so full tokens are computed only where they are read."""

    def __init__(self, bank: InputBank, images: Float[Tensor, "b ch height width"]) -> None:
        self.bank, self.images, self.place = bank, images, bank.positions(images)[0]
        self.size = self.place.shape[0]
        self.raw = raw_patches(images, bank.h1.patch_size).to(matmul_dtype(images))

    def all(self) -> Float[Tensor, "b c d"]:
        return self.bank(self.images)

    def take(self, index: Int[Tensor, "b t k"]) -> Float[Tensor, "b t k d"]:
        first = self.bank.h1.proj
        projected = F.linear(take(self.raw, index), first.weight.flatten(1), first.bias)
        return self.bank.h2(projected + F.embedding(index, self.place))

    def keys(self, norm: nn.LayerNorm | None, width: int) -> Float[Tensor, "b c width"]:
        with torch.no_grad():
            return affine_keys(self.raw, *self._composed(), norm, width)

    def _composed(self) -> tuple[Float[Tensor, "d p"], Float[Tensor, "c d"]]:
        """h2 ∘ h1 as one matrix, and one bias per position: h2(pos_embed + h1's bias)."""
        first, second = self.bank.h1.proj, self.bank.h2
        place = self.place if first.bias is None else self.place + first.bias
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


def vit_positions(vit: Any) -> Float[Tensor, "1 n d"] | None:
    """The ViT's position embeddings of patches, without prefix tokens; None where it has none."""
    positions = vit.pos_embed
    return None if positions is None else positions.detach()[:, positions.shape[1] - vit.patch_embed.num_patches :]


def _resized_projection(weight: Float[Tensor, "d ch height width"], patch: int) -> Float[Tensor, "d ch patch patch"]:
    """The projection of a patch that equals `weight` on the resized patch: `weight` times the resizing matrix."""
    one_pixel = torch.eye(patch * patch, device=weight.device, dtype=torch.float32).unflatten(1, (1, patch, patch))
    resized = F.interpolate(one_pixel, weight.shape[-2:], mode="bicubic", antialias=True).flatten(1)
    return (weight.float().flatten(2) @ resized.T).unflatten(2, (patch, patch)).to(weight.dtype)
