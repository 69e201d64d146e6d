"""Ragged sequences: attention masks of padded batches, the values of hidden rows, and packing visible rows together."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from adatape.cuda_graphs import is_compiling_or_capturing, may_look_at
from adatape.records import Tape

LARGE_SAMPLE = 2**15  # rows × width from which a CPU loses no time by attending to one sample after the other


def packs(chosen: bool | None, rows: Float[Tensor, "b m d"], blocks: nn.Module) -> bool:
    """Whether inference drops hidden rows instead of masking them: as chosen; by None where it is sure to be faster."""
    if is_compiling_or_capturing():
        return False
    if chosen is None:
        large = rows.shape[1] * rows.shape[2] >= LARGE_SAMPLE
        return large and may_look_at(rows) and not expect_batches(blocks)
    return chosen


def expect_batches(blocks: nn.Module) -> bool:
    """Whether blocks are compiled, or hooks look at them: rows of a sample should then not be those of another."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or getattr(module, "_compiled_call_impl", None)
        for module in blocks.modules()
    )


def append_tape(
    tokens: Float[Tensor, "b n d"], tape: Float[Tensor, "b t d"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b m d"], Bool[Tensor, "b m"]]:
    """Concatenates input tokens, all visible, and the tape, with the mask of both."""
    seen = mask.new_ones(tokens.shape[0], tokens.shape[1])
    return torch.cat([tokens, tape.to(tokens.dtype)], 1), torch.cat([seen, mask], 1)


def key_mask(visible: Bool[Tensor, "b m"]) -> Bool[Tensor, "b 1 1 m"]:
    """The attention mask that hides hidden rows as keys."""
    return visible[:, None, None, :]


def truncate_tape(tape: Tape, budget: Int[Tensor, "b"]) -> Tape:
    """Hides each sample's tape tokens beyond its `budget`; ponder is unchanged."""
    hidden = ~tape.mask | (torch.arange(tape.mask.shape[1], device=budget.device) >= budget[:, None])
    return Tape(
        tokens=tape.tokens.masked_fill(hidden[..., None], 0),
        mask=~hidden,
        index=tape.index.masked_fill(hidden[..., None], -1),
        weight=tape.weight.masked_fill(hidden[..., None], 0),
        length=torch.minimum(tape.length, budget),
        ponder=tape.ponder,
    )


def pad_tape(tape: Tape, steps: int) -> Tape:
    """The tape with hidden tokens after its last, `steps` in all."""
    more = steps - tape.mask.shape[1]
    if more == 0:
        return tape
    tokens, mask, index, weight, length, ponder = tape
    rows = (0, 0, 0, more)
    return Tape(
        F.pad(tokens, rows), F.pad(mask, rows[2:]), F.pad(index, rows, value=-1), F.pad(weight, rows), length, ponder
    )


def without_hidden_steps(tape: Tape) -> Tape:
    """The tape without steps that no sample has read, where that may be looked at for nothing."""
    if not may_look_at(tape.length):
        return tape
    longest = int(tape.length.max()) if tape.length.numel() else 0
    return tape._replace(
        tokens=tape.tokens[:, :longest],
        mask=tape.mask[:, :longest],
        index=tape.index[:, :longest],
        weight=tape.weight[:, :longest],
    )


def pad_rows(
    rows: Float[Tensor, "b m d"], visible: Bool[Tensor, "b m"], more: int
) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"]]:
    """Rows and their mask with `more` hidden rows of zeros after them."""
    return (F.pad(rows, (0, 0, 0, more)), F.pad(visible, (0, more))) if more else (rows, visible)


def key_bias(visible: Bool[Tensor, "b m"], gate: Float[Tensor, "h"], tape: int) -> Float[Tensor, "b h 1 m"]:
    """The attention bias: 0 for inputs, each head's log-gate for the last `tape` rows, -∞ for hidden rows."""
    opened = torch.arange(visible.shape[1], device=visible.device) >= visible.shape[1] - tape
    keys = torch.where(opened, gate[:, None], gate.new_zeros(()))
    return torch.where(visible[:, None, None, :], keys[:, None, :], gate.new_full((), -math.inf))


def fill_hidden(tokens: Float[Tensor, "b m d"], visible: Bool[Tensor, "b m"], start: int) -> Float[Tensor, "b m d"]:
    """Sets hidden rows to the mean of the visible rows from `start` on, the rows that are pooled.

    A mean or maximum over all rows then equals that over the visible ones, so timm's pooling can be used unchanged.
    """
    seen = visible[:, start:, None]
    count = seen.sum(1, keepdim=True).clamp(min=1)  # 0 where only the class token is visible
    mean = (tokens[:, start:] * seen).sum(1, keepdim=True) / count
    return torch.where(visible[..., None], tokens, mean.to(tokens.dtype))


class Packing(NamedTuple):
    """The rows of a batch that are kept, concatenated sample after sample; samples that keep none are left out."""

    indices: Tensor  # (n,) int64, their indices in the flattened batch
    cu_seqlens: Tensor  # (s + 1,) int32, cumulative sequence lengths
    max_seqlen: int

    @property
    def shape(self) -> tuple[int, int]:
        """(samples, rows) where all samples keep equally many, since plain attention is faster; else (1, all rows)."""
        samples, rows = self.cu_seqlens.shape[0] - 1, self.indices.shape[0]
        return (samples, self.max_seqlen) if samples * self.max_seqlen == rows else (1, rows)

    @property
    def is_uniform(self) -> bool:
        return self.shape[1] == self.max_seqlen


class PendingPacking(NamedTuple):
    """A Packing whose kernels are launched, but whose sizes have not been copied from the GPU yet."""

    indices: Tensor  # (b·n,) int64, padded with zeros after the kept indices
    cu_seqlens: Tensor  # (b + 1,) int32, padded likewise
    sizes: Tensor  # (3,) int64: rows kept, samples that keep any, longest sample

    def sync(self) -> Packing:
        rows, samples, max_seqlen = self.sizes.tolist()
        return Packing(self.indices[:rows], self.cu_seqlens[: samples + 1], max_seqlen)


def launch_packing(keep: Bool[Tensor, "b n"]) -> PendingPacking:
    """Starts a packing. Launch other work before `sync`, which waits for the GPU."""
    count = keep.sum(1)
    cu_seqlens = F.pad(count.index_select(0, nonzero_padded(count > 0)).cumsum(0), (1, 0)).int()
    return PendingPacking(
        nonzero_padded(keep.flatten()), cu_seqlens, torch.stack([count.sum(), (count > 0).sum(), count.max()])
    )


def make_packing(keep: Bool[Tensor, "b n"]) -> Packing:
    """The Packing of the rows where `keep` is True; its shapes depend on the data, so it is for inference only."""
    return launch_packing(keep).sync()


def full_packing(like: Bool[Tensor, "b n"]) -> Packing:
    """The packing of a batch that keeps all its rows."""
    b, n = like.shape
    row = torch.arange(b * n, device=like.device)
    return Packing(row, n * torch.arange(b + 1, device=like.device, dtype=torch.int32), n)


def nonzero_padded(keep: Bool[Tensor, "n"]) -> Int[Tensor, "n"]:
    """Indices where `keep` is True, padded with zeros to a static size, so that a GPU need not be synchronised."""
    return keep.nonzero_static(size=keep.shape[0], fill_value=0).squeeze(1)


def pack(rows: Float[Tensor, "b n *d"], packing: Packing) -> Float[Tensor, "s m *d"]:
    return rows.flatten(0, 1).index_select(0, packing.indices).unflatten(0, packing.shape)


def unpack(packed: Float[Tensor, "s m *d"], packing: Packing, shape: tuple[int, int]) -> Float[Tensor, "b n *d"]:
    """Inverse of `pack`; rows that were not kept are zero."""
    empty = packed.new_zeros(shape[0] * shape[1], *packed.shape[2:])
    return empty.index_copy(0, packing.indices, packed.flatten(0, 1)).unflatten(0, shape)


class TapeRows(NamedTuple):
    """Indices of input rows and of tape rows in a packed batch."""

    inputs: Tensor  # int64
    tape: Tensor  # int64


def tape_rows(packing: Packing, shape: tuple[int, int], inputs: int) -> TapeRows:
    """TapeRows of a packed batch whose padded shape was `shape`; all `inputs` first rows of each sample are kept."""
    tape = packing.indices % shape[1] >= inputs
    count = shape[0] * inputs
    return TapeRows(nonzero_padded(~tape)[:count], nonzero_padded(tape)[: tape.shape[0] - count])
