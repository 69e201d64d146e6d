"""Patch embedding as one matmul on flattened patches, equal to timm's PatchEmbed with the same weights.

On a GPU it is several times faster than the convolution, for which cuDNN first changes the image's memory layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import PatchEmbed
from torch import Tensor, nn


class PatchRows(PatchEmbed):
    """timm's PatchEmbed as a matmul; inputs that need padding or are not flattened use timm's convolution.

    So does a projection that a tool has changed, as adapters do, since its weight is not all that it computes.
    """

    def forward(self, x: Float[Tensor, "b ch height width"]) -> Any:
        resized = tuple(x.shape[-2:]) != self.img_size and self.strict_img_size
        if resized or self.dynamic_img_pad or not self.flatten or not is_plain(self.proj):
            return super().forward(x)
        rows = raw_patches(x, self.patch_size).to(matmul_dtype(x))
        return self.norm(F.linear(rows, self.proj.weight.flatten(1), self.proj.bias))


def raw_patches(images: Float[Tensor, "b ch height width"], patch: tuple[int, int]) -> Float[Tensor, "b c p"]:
    """Patches in row-major order, each flattened as (channel, row, column), like a convolution's weight."""
    split = images.unflatten(3, (-1, patch[1])).unflatten(2, (-1, patch[0]))
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matmul on `x`: autocast's if it is enabled, else that of `x`."""
    device = x.device.type
    enabled = not x.is_meta and torch.is_autocast_enabled(device)  # the meta device has no autocast
    return torch.get_autocast_dtype(device) if enabled else x.dtype


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is torch's own with ordinary weights and no hooks, so that its weights are all that it computes.

    Adapters replace the layer; quantisers replace it or the type of its weight; pruning and `weight_norm` compute its
    weight anew in a hook before each call.
    """
    ordinary = type(layer) in (nn.Linear, nn.Conv2d) and type(layer.weight) in (Tensor, nn.Parameter)
    return ordinary and not (layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks)
