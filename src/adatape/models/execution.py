"""Three ways to run the blocks on input and tape rows, with equal results: padded, packed, or in buckets.

Padded batches compute and mask hidden rows; the others drop them, so their shapes depend on the data.
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
    """The rows that enter the first block with a tape."""

    rows: Float[Tensor, "b m d"]
    visible: Bool[Tensor, "b m"]
    tape: int  # number of tape rows, the last ones
    scale: Float[Tensor, "b m"] | None = None  # factor on rows inside blocks, for an ablation

    @property
    def inputs(self) -> int:
        return self.rows.shape[1] - self.tape


# Runs one block: its index among those with a tape, rows, attention mask, which rows are tape, scale.
Step = Callable[[int, Tensor, Any, int | TapeRows, Tensor | None], Tensor]


def run_padded(step: Step, joined: Joined, masks: Sequence[Any], visit: Visit) -> Float[Tensor, "b m d"]:
    """Runs the blocks on all rows, with one mask per block."""
    x = joined.rows
    for n, mask in enumerate(masks):
        x = step(n, x, mask, joined.tape, joined.scale)
        visit(n, x[:, : joined.inputs])
    return x


def run_packed(step: Step, joined: Joined, blocks: int, visit: Visit) -> Float[Tensor, "b m d"]:
    """Runs the blocks on the visible rows of the batch, concatenated; hidden rows of the result are zero."""
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
    """Runs the blocks on `count` padded batches of samples of similar length."""
    out = torch.zeros_like(joined.rows)
    for samples, shortest, longest in buckets(joined.visible.sum(1), count):
        place = (samples, slice(longest))
        mask = None if shortest == longest else hide_tail(joined.visible[place])
        scale = None if joined.scale is None else joined.scale[place]
        part = Joined(joined.rows[place], joined.visible[place], longest - joined.inputs, scale)
        out[place] = run_padded(step, part, [mask] * blocks, no_visit).to(out.dtype)
    return out


def buckets(length: Int[Tensor, "b"], count: int) -> list[tuple[Int[Tensor, "s"], int, int]]:
    """Sorts samples by length into `count` groups of about equal size; returns each with its shortest and longest."""
    order = length.argsort(stable=True)
    ascending = length[order].tolist()
    edges = [i * len(ascending) // count for i in range(count + 1)]
    return [(order[i:j], ascending[i], ascending[j - 1]) for i, j in pairwise(edges) if i < j]
