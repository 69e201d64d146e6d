"""Ragged sequences in a padded batch: which rows may be seen, and what stands in the rows that may not."""

from __future__ import annotations

import math

import torch
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
    return tape._replace(
        tokens=tape.tokens.masked_fill(hidden[..., None], 0),
        mask=~hidden,
        index=tape.index.masked_fill(hidden[..., None], -1),
        weight=tape.weight.masked_fill(hidden[..., None], 0),
        length=torch.minimum(tape.length, budget),
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


def compact(
    tokens: Float[Tensor, "b n d"], keep: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "s m d"], Bool[Tensor, "s m"]]:
    """Kept rows moved to the front and cut to the longest sample, without samples that keep none; and which are real.

    Shapes depend on the data, so this belongs to eager inference.
    """
    count = keep.sum(1)
    count = count[count > 0]
    width = int(count.max()) if count.numel() else 0
    real = torch.arange(width, device=keep.device) < count[:, None]
    empty = tokens.new_zeros(*real.shape, tokens.shape[2])
    return empty.index_put((real,), tokens[keep]), real


def expand(
    packed: Float[Tensor, "s m d"],
    real: Bool[Tensor, "s m"],
    tokens: Float[Tensor, "b n d"],
    keep: Bool[Tensor, "b n"],
) -> Float[Tensor, "b n d"]:
    """Undoes `compact`: kept rows take what the packed ones hold, the others stay as they are in `tokens`."""
    return tokens.index_put((keep,), packed[real].to(tokens.dtype))
