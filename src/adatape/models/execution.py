"""How input and tape rows pass the blocks that they share: padded and masked, packed in one row, or in buckets.

The results are the same. Hidden rows are computed and masked, or left out; shapes then follow the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adatape.layout import TapeRows, pack, packing, tape_rows, unpack
from adatape.models.adaptive import Visit, no_visit
from adatape.ragged import Packed, hide_tail


class Joined(NamedTuple):
    """The rows of a batch as they enter the first block with a tape."""

    rows: Float[Tensor, "b m d"]
    visible: Bool[Tensor, "b m"]
    tape: int  # how many of the rows, the last ones, are tape
    scale: Float[Tensor, "b m"] | None = None  # what an ablation multiplies rows by inside blocks

    @property
    def inputs(self) -> int:
        return self.rows.shape[1] - self.tape


# One block: its place among those with a tape, rows, attention mask, which rows are tape, scale.
Step = Callable[[int, Tensor, Any, int | TapeRows, Tensor | None], Tensor]


def run_padded(step: Step, joined: Joined, masks: Sequence[Any], visit: Visit) -> Float[Tensor, "b m d"]:
    """All rows, with one mask for each block."""
    x = joined.rows
    for n, mask in enumerate(masks):
        x = step(n, x, mask, joined.tape, joined.scale)
        visit(n, x[:, : joined.inputs])
    return x


def run_packed(step: Step, joined: Joined, blocks: int, visit: Visit) -> Float[Tensor, "b m d"]:
    """Visible rows alone, all of a batch in one row; hidden ones are zero at the end."""
    samples, length = joined.visible.shape
    held = packing(joined.visible)
    mask = None if held.even else Packed(held)
    places = tape_rows(held, (samples, length), joined.inputs)
    scale = None if joined.scale is None else pack(joined.scale, held)
    x = pack(joined.rows, held)
    for n in range(blocks):
        x = step(n, x, mask, places, scale)
        if visit is not no_visit:
            visit(n, x.flatten(0, 1).index_select(0, places.inputs).unflatten(0, (samples, joined.inputs)))
    return unpack(x, held, (samples, length))


def run_buckets(step: Step, joined: Joined, blocks: int, count: int) -> Float[Tensor, "b m d"]:
    """Visible rows in `count` padded batches by length, as suits a CPU."""
    out = torch.zeros_like(joined.rows)
    for samples, shortest, longest in buckets(joined.visible.sum(1), count):
        place = (samples, slice(longest))
        mask = None if shortest == longest else hide_tail(joined.visible[place])
        scale = None if joined.scale is None else joined.scale[place]
        part = Joined(joined.rows[place], joined.visible[place], longest - joined.inputs, scale)
        out[place] = run_padded(step, part, [mask] * blocks, no_visit).to(out.dtype)
    return out


def buckets(length: Int[Tensor, "b"], count: int) -> list[tuple[Int[Tensor, "s"], int, int]]:
    """Samples in `count` groups of about the same size, by length, each with its shortest and longest."""
    order = length.argsort(stable=True)
    ascending = length[order].tolist()
    edges = [i * len(ascending) // count for i in range(count + 1)]
    return [(order[i:j], ascending[i], ascending[j - 1]) for i, j in pairwise(edges) if i < j]
