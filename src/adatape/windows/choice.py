"""Windows that were chosen to be read, of images of one size or of several, and random places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adatape import counter_rng
from adatape.records import Searched

PLACES = 40  # first of the words that keys of random places begin with


class Chosen(NamedTuple):
    """Windows to read, and the scan that chose them."""

    index: Tensor  # type: ignore[assignment]  # (b, t), cells
    mask: Tensor  # (b, t)
    windows: Tensor  # (b, t, ch, window, window)
    at: Tensor  # (b, t, 2), their middles, from -1 to 1
    scores: Tensor  # (b, t)
    found: Tensor | None
    guesses: Tensor | None
    searched: Searched | None


def uniform(like: Tensor, count: int, key: Tensor | None, purpose: int) -> Tensor:
    """(b, count) in [0, 1), by each sample's key where it has one."""
    if key is None:
        return torch.rand(like.shape[0], count, device=like.device)
    return counter_rng.uniform(counter_rng.keys_of(PLACES + purpose, key), count)


def random_cells(scores: Tensor, count: int, key: Tensor | None, purpose: int) -> Tensor:
    cells = scores[0].numel()
    return (uniform(scores, count, key, purpose) * cells).long().clamp(max=cells - 1)


def padded_choice(parts: Sequence[Chosen]) -> Chosen:
    """Of images of several sizes: fewer windows are padded with hidden ones, fewer cells with cells of no weight."""

    def padded(name: str, last: int, value: float = 0.0) -> Tensor:
        return pad_sequence([getattr(each, name).flatten(0, last) for each in parts], True, value)

    index, mask, windows, at, scores = (padded(name, 1) for name in Chosen._fields[:5])
    searched = [each.searched for each in parts if each.searched is not None]
    return Chosen(
        *(index, mask, windows, at, scores),
        found=None if parts[0].found is None else padded("found", 2, -torch.inf)[:, None],
        guesses=None if parts[0].guesses is None else padded("guesses", 2)[:, None],
        searched=Searched(*map(torch.cat, zip(*searched, strict=True))) if searched else None,
    )
