"""Rotary positions of tape rows in timm's Eva (EVA-02, DINOv3, PE, …), whose attention rotates queries and keys.

A bank token that lies on the image is rotated by its place in the ViT's patch grid, a fraction where its patch is
finer; other tape rows are not rotated, like class and register tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from torch import Tensor, nn

from adatape.banks import Bank
from adatape.packing import Packing, pack
from adatape.records import Tape


class GridRope(NamedTuple):
    """timm's rotary embedding of the grid of one batch: sines and cosines, (…, n, 2d)."""

    module: Any  # timm's, which also computes those of other places
    table: Tensor  # for all blocks, or with a leading dimension of blocks where each has its own
    grid: tuple[int, int]
    image: tuple[int, int]  # height and width in pixels, before padding
    patch: tuple[int, int]

    @property
    def cells(self) -> tuple[float, float]:
        """Height and width of the image in cells of the grid, fractions where it was padded."""
        return self.image[0] / self.patch[0], self.image[1] / self.patch[1]

    @property
    def per_block(self) -> bool:
        return isinstance(self.module, RotaryEmbeddingMixed)

    def at(self, layer: int) -> Tensor:
        return self.table[layer] if self.per_block else self.table


@dataclasses.dataclass(frozen=True)
class RowRope:
    """The rotary embedding of all rows of a batch: prefix, grid and tape."""

    table: Callable[[int], Float[Tensor, "b h m e"]]
    prefix: int  # timm's attention skips the first rows, so they are left out of what a block gets

    def at(self, layer: int) -> Float[Tensor, "b h n e"]:
        return self.table(layer)[:, :, self.prefix :]

    def packed(self, packing: Packing) -> RowRope:
        return self._changed(lambda table: pack(table.transpose(1, 2), packing).transpose(1, 2))

    def bucket(self, samples: Tensor, longest: int) -> RowRope:
        return self._changed(lambda table: table[samples, :, :longest])

    def _changed(self, change: Callable[[Tensor], Tensor]) -> RowRope:
        return dataclasses.replace(self, table=lambda layer: change(self.table(layer)))


def row_rope(rope: GridRope | None, tape: Tape, bank: Bank, prefix: int) -> RowRope | None:
    """Rotations of prefix rows, the grid, and a tape read from `bank`; None where the grid has none."""
    if rope is None:
        return None
    batch, length = tape.mask.shape
    place = tape_places(bank.boxes(tape.index.clamp(min=0), rope.cells, rope.image), tape)

    def joined(layer: int) -> Tensor:
        grid = rope.at(layer)
        grid = grid[(None,) * (4 - grid.dim())]
        width = grid.shape[-1] // 2
        still = torch.cat([grid.new_zeros(1, 1, 1, width), grid.new_ones(1, 1, 1, width)], -1)
        own = still.expand(-1, -1, length, -1) if place is None else rotations(rope, place, layer).to(grid.dtype)
        parts = (still.expand(-1, -1, prefix, -1), grid, own)
        return torch.cat([part.expand(batch, grid.shape[1], -1, -1) for part in parts], 2)

    if rope.per_block:
        return RowRope(joined, prefix)
    shared = joined(0)
    return RowRope(lambda _: shared, prefix)


def tape_places(boxes: Float[Tensor, "b t k 4"] | None, tape: Tape) -> Float[Tensor, "b t 2"] | None:
    """Row and column of each tape token in the grid: the mean of its merged bank tokens, by their weights.

    `boxes` are in units of grid cells, and cell 0 has its middle at 0.
    """
    if boxes is None:
        return None
    weight = tape.weight.detach().to(boxes.dtype)
    share = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    return ((boxes[..., :2] + boxes[..., 2:] / 2 - 0.5) * share[..., None]).sum(2)


def rotations(rope: GridRope, place: Float[Tensor, "b t 2"], layer: int) -> Float[Tensor, "b h t e"]:
    """Sines and cosines of any places in the grid; at whole numbers they are timm's."""
    module = rope.module
    angle = ANGLES[type(module)](rope, place, layer)
    half = getattr(module, "rotate_half", False)
    # Not `repeat_interleave`, of which ONNX makes a Reshape that fails on no tape rows.
    angle = torch.cat([angle, angle], -1) if half else torch.stack([angle, angle], -1).flatten(-2)
    return torch.cat([angle.sin(), angle.cos()], -1)


def _cat_angles(rope: GridRope, place: Tensor, layer: int) -> Float[Tensor, "b 1 t f"]:  # noqa: ARG001
    module, at = rope.module, place + rope.module.grid_offset
    if module.ref_feat_shape is not None:
        at = at * at.new_tensor([wanted / own for wanted, own in zip(module.ref_feat_shape, rope.grid, strict=True)])
    bands = module._compute_bands(at.device) if module.bands is None else module.bands
    return _axial(at.flip(-1) if module.grid_indexing == "xy" else at, bands.float())


def _mixed_angles(rope: GridRope, place: Tensor, layer: int) -> Float[Tensor, "b h t f"]:
    first, second = rope.module.freqs[:, layer].float()[:, None, :, None]
    at = (place.flip(-1) if rope.module.grid_indexing == "xy" else place)[:, None, :, :, None]
    return at[..., 0, :] * first + at[..., 1, :] * second


def _dinov3_angles(rope: GridRope, place: Tensor, layer: int) -> Float[Tensor, "b 1 t f"]:  # noqa: ARG001
    module = rope.module
    if module.training and module.aug_active:
        start, slope = _drawn_coordinates(rope)
        at = start + slope * place
    else:
        shape = {"max": (max(rope.grid),) * 2, "min": (min(rope.grid),) * 2}.get(module.normalize_coords, rope.grid)
        at = 2 * (place + 0.5 + module.grid_offset) / place.new_tensor(shape) - 1
    return _axial(at, 2 * math.pi / module.periods.float())


def _drawn_coordinates(rope: GridRope) -> tuple[Float[Tensor, "2"], Float[Tensor, "2"]]:
    """Coordinates of the first cell and their slope, as drawn for this batch.

    They are computed from the table's longest periods, whose angles do not wrap.
    """
    module, (height, width) = rope.module, rope.grid
    sin, cos = rope.table.float().chunk(2, -1)
    count = module.periods.shape[0]
    corner = torch.tensor([0, height * width - 1], device=sin.device)
    column = torch.tensor([count - 1, 2 * count - 1], device=sin.device) * (1 if module.rotate_half else 2)
    angle = torch.atan2(sin[corner][:, column], cos[corner][:, column])
    first, last = angle * module.periods[-1].float() / (2 * math.pi)
    return first, (last - first) / first.new_tensor([max(height - 1, 1), max(width - 1, 1)])


def _axial(at: Float[Tensor, "b t 2"], bands: Float[Tensor, "f"]) -> Float[Tensor, "b 1 t 2*f"]:
    return (at[..., None] * bands).flatten(-2)[:, None]


ANGLES: dict[type, Callable[[GridRope, Tensor, int], Tensor]] = {
    RotaryEmbeddingCat: _cat_angles,
    RotaryEmbeddingMixed: _mixed_angles,
    RotaryEmbeddingDinoV3: _dinov3_angles,
}


def check_rope(vit: nn.Module) -> None:
    """Refuses rotary embeddings of which the places of tape rows are not known."""
    rope: Any = getattr(vit, "rope", None)
    if rope is None:
        return
    if type(rope) not in ANGLES or getattr(rope, "in_pixels", False):
        known = ", ".join(kind.__name__ for kind in ANGLES)
        raise TypeError(f"the backbone's rope is a {type(rope).__name__}; it must be one of {known}, not in pixels")
    if getattr(rope, "aug_active", False) and vit.patch_drop is not None:
        raise ValueError(
            "the backbone draws its rotary coordinates anew and drops patches in training, so the tape's places are "
            "not known; patch_drop_rate must be 0"
        )
