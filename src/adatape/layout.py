"""Ragged sequences in a padded batch: which rows may be seen, and what stands in the rows that may not."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adatape.records import Tape


def append(
    tokens: Float[Tensor, "b n d"], tape: Float[Tensor, "b t d"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b m d"], Bool[Tensor, "b m"]]:
    """Input tokens, all visible, followed by the tape."""
    seen = mask.new_ones(tokens.shape[0], tokens.shape[1])
    return torch.cat([tokens, tape.to(tokens.dtype)], 1), torch.cat([seen, mask], 1)


def key_mask(visible: Bool[Tensor, "b m"]) -> Bool[Tensor, "b 1 1 m"]:
    """The attention mask under which no row looks at a hidden one."""
    return visible[:, None, None, :]


def hide_beyond(tape: Tape, budget: Int[Tensor, "b"]) -> Tape:
    """The tape as if each sample had been allowed only so many tokens; ponder stays as it was read."""
    hidden = ~tape.mask | (torch.arange(tape.mask.shape[1], device=budget.device) >= budget[:, None])
    return Tape(
        tokens=tape.tokens.masked_fill(hidden[..., None], 0),
        mask=~hidden,
        index=tape.index.masked_fill(hidden[..., None], -1),
        weight=tape.weight.masked_fill(hidden[..., None], 0),
        length=torch.minimum(tape.length, budget),
        ponder=tape.ponder,
    )


def key_bias(visible: Bool[Tensor, "b m"], gate: Float[Tensor, "h"], tape: int) -> Float[Tensor, "b h 1 m"]:
    """What to add to attention scores: 0 for inputs, each head's log-gate for the last `tape` rows, -∞ for hidden."""
    opened = torch.arange(visible.shape[1], device=visible.device) >= visible.shape[1] - tape
    keys = torch.where(opened, gate[:, None], gate.new_zeros(()))
    return torch.where(visible[:, None, None, :], keys[:, None, :], gate.new_full((), -math.inf))


def fill_hidden(tokens: Float[Tensor, "b m d"], visible: Bool[Tensor, "b m"], start: int) -> Float[Tensor, "b m d"]:
    """Hidden rows become the mean of the visible ones from `start` on, the rows that are pooled.

    A mean or maximum over all rows is then the mean or maximum over the visible ones, so timm's own pooling is right.
    """
    seen = visible[:, start:, None]
    count = seen.sum(1, keepdim=True).clamp(min=1)  # of a sample that sees its class token alone, nothing is pooled
    mean = (tokens[:, start:] * seen).sum(1, keepdim=True) / count
    return torch.where(visible[..., None], tokens, mean.to(tokens.dtype))


class Packing(NamedTuple):
    """Which rows of a batch are kept, in one row: sample after sample, without those that keep none."""

    kept: Tensor  # (n,) int64, their places among all rows of the batch
    bounds: Tensor  # (s + 1,) int32, where each sample's rows begin and end
    longest: int

    @property
    def shape(self) -> tuple[int, int]:
        """Samples that all keep as many rows remain a batch, which attention likes better."""
        samples, rows = self.bounds.shape[0] - 1, self.kept.shape[0]
        return (samples, self.longest) if samples * self.longest == rows else (1, rows)

    @property
    def even(self) -> bool:
        return self.shape[1] == self.longest


class Asked(NamedTuple):
    """A packing on its way: all of it is launched, and only how much is kept has to be heard from a GPU."""

    kept: Tensor  # (b·n,) int64, with what nobody needs behind the kept ones
    bounds: Tensor  # (b + 1,) int32, likewise
    sizes: Tensor  # (3,) int64: rows kept, samples that keep any, the longest

    def heard(self) -> Packing:
        rows, samples, longest = self.sizes.tolist()
        return Packing(self.kept[:rows], self.bounds[: samples + 1], longest)


def ask(keep: Bool[Tensor, "b n"]) -> Asked:
    """Launch what else there is to do before hearing: meanwhile a GPU has nothing else to work on."""
    count = keep.sum(1)
    bounds = F.pad(count.index_select(0, places(count > 0)).cumsum(0), (1, 0)).int()
    return Asked(places(keep.flatten()), bounds, torch.stack([count.sum(), (count > 0).sum(), count.max()]))


def packing(keep: Bool[Tensor, "b n"]) -> Packing:
    """Its shapes depend on the data, so this belongs to inference."""
    return ask(keep).heard()


def everything(like: Bool[Tensor, "b n"]) -> Packing:
    """The packing of a batch that keeps all its rows."""
    b, n = like.shape
    row = torch.arange(b * n, device=like.device)
    return Packing(row, n * torch.arange(b + 1, device=like.device, dtype=torch.int32), n)


def places(keep: Bool[Tensor, "n"]) -> Int[Tensor, "n"]:
    """Where `keep` is True, then zeros; whoever knows how often that is cuts them off, so nobody waits for a count."""
    return keep.nonzero_static(size=keep.shape[0], fill_value=0).squeeze(1)


def pack(rows: Float[Tensor, "b n *d"], packing: Packing) -> Float[Tensor, "s m *d"]:
    return rows.flatten(0, 1).index_select(0, packing.kept).unflatten(0, packing.shape)


def unpack(packed: Float[Tensor, "s m *d"], packing: Packing, shape: tuple[int, int]) -> Float[Tensor, "b n *d"]:
    """Undoes `pack`, with zeros where nothing was kept."""
    empty = packed.new_zeros(shape[0] * shape[1], *packed.shape[2:])
    return empty.index_copy(0, packing.kept, packed.flatten(0, 1)).unflatten(0, shape)


class TapeRows(NamedTuple):
    """Which rows of a packed batch are inputs, and which are tape."""

    inputs: Tensor  # int64
    tape: Tensor  # int64


def tape_rows(packing: Packing, shape: tuple[int, int], inputs: int) -> TapeRows:
    """For a batch of that shape of which all inputs, the first rows, were kept."""
    tape = packing.kept % shape[1] >= inputs
    count = shape[0] * inputs
    return TapeRows(places(~tape)[:count], places(tape)[: tape.shape[0] - count])
