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

from adatape.models.base import OnBlock, ignore_block
from adatape.models.rope import RowRope
from adatape.packing import TapeRows, make_packing, pack, tape_rows, unpack
from adatape.ragged_attention import PackedMask, padding_mask


class BlocksInput(NamedTuple):
    """The rows that enter the first block with a tape."""

    rows: Float[Tensor, "b m d"]
    visible: Bool[Tensor, "b m"]
    tape: int  # number of tape rows, the last ones
    scale: Float[Tensor, "b m"] | None = None  # factor on rows inside blocks, for an ablation
    rope: RowRope | None = None  # rotary positions of all rows

    @property
    def inputs(self) -> int:
        return self.rows.shape[1] - self.tape


# Runs one block: its index among those with a tape, rows, attention mask, which rows are tape, scale, rotary positions.
Step = Callable[[int, Tensor, Any, int | TapeRows, Tensor | None, RowRope | None], Tensor]


def run_padded(
    step: Step, blocks_input: BlocksInput, masks: Sequence[Any], on_block: OnBlock
) -> Float[Tensor, "b m d"]:
    """Runs the blocks on all rows, with one mask per block."""
    x = blocks_input.rows
    for n, mask in enumerate(masks):
        x = step(n, x, mask, blocks_input.tape, blocks_input.scale, blocks_input.rope)
        on_block(n, x[:, : blocks_input.inputs])
    return x


def run_packed(step: Step, blocks_input: BlocksInput, blocks: int, on_block: OnBlock) -> Float[Tensor, "b m d"]:
    """Runs the blocks on the visible rows of the batch, concatenated; hidden rows of the result are zero."""
    samples, length = blocks_input.visible.shape
    packing = make_packing(blocks_input.visible)
    mask = None if packing.is_uniform else PackedMask(packing)
    places = tape_rows(packing, (samples, length), blocks_input.inputs)
    scale = None if blocks_input.scale is None else pack(blocks_input.scale, packing)
    rope = None if blocks_input.rope is None else blocks_input.rope.packed(packing)
    x = pack(blocks_input.rows, packing)
    for n in range(blocks):
        x = step(n, x, mask, places, scale, rope)
        if on_block is not ignore_block:
            on_block(n, x.flatten(0, 1).index_select(0, places.inputs).unflatten(0, (samples, blocks_input.inputs)))
    return unpack(x, packing, (samples, length))


def run_buckets(step: Step, blocks_input: BlocksInput, blocks: int, count: int) -> Float[Tensor, "b m d"]:
    """Runs the blocks on `count` padded batches of samples of similar length."""
    out = torch.zeros_like(blocks_input.rows)
    for samples, shortest, longest in buckets(blocks_input.visible.sum(1), count):
        place = (samples, slice(longest))
        mask = None if shortest == longest else padding_mask(blocks_input.visible[place])
        scale = None if blocks_input.scale is None else blocks_input.scale[place]
        rope = None if blocks_input.rope is None else blocks_input.rope.bucket(samples, longest)
        bucket = BlocksInput(
            blocks_input.rows[place], blocks_input.visible[place], longest - blocks_input.inputs, scale, rope
        )
        out[place] = run_padded(step, bucket, [mask] * blocks, ignore_block).to(out.dtype)
    return out


def bucket_count(count: int) -> int:
    """Refuses a number of buckets that would leave samples out."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"buckets is {count!r}; it must be 0 (none) or more, a whole number")
    return count


def buckets(length: Int[Tensor, "b"], count: int) -> list[tuple[Int[Tensor, "s"], int, int]]:
    """Sorts samples by length into `count` groups of about equal size; returns each with its shortest and longest."""
    order = length.argsort(stable=True)
    ascending = length[order].tolist()
    edges = [i * len(ascending) // count for i in range(count + 1)]
    return [(order[i:j], ascending[i], ascending[j - 1]) for i, j in pairwise(edges) if i < j]
