"""Windows that were chosen to be read, of images of one size or of several, and random places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adatape import counter_rng
from adatape.records import Searched
from adatape.windows.options import WindowOptions
from adatape.windows.scan import Scanned, highest_apart

RANDOM = 4  # windows at random places that training reads besides those that scores choose
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


def training_choice(
    scanned: Scanned, searched: Searched | None, options: WindowOptions, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cells and scores that training reads: by score, what was found without the scan's scores, and random places."""
    wanted = scanned.scores.detach().clamp(-30, 30).flatten(1)
    reads = options.training_steps
    most, by_search, by_chance = 2 * options.steps + RANDOM, options.steps, RANDOM
    if reads is not None:
        most, by_search, by_chance = reads, max(1, reads // 4), max(1, reads // 8)
    if searched is not None:
        by_search = min(by_search, options.search)
        found = searched.index.gather(1, searched.gate.topk(by_search, 1).indices)
    else:
        assert scanned.found is not None
        found = highest_apart(scanned.found.detach(), by_search)[0]
    explored = random_cells(scanned.scores, by_chance, key, 1)
    rank = torch.arange(by_search, 0, -1, device=wanted.device, dtype=wanted.dtype).expand_as(found)
    # The highest rank of a cell that was found twice: scatter on a GPU would take any of them.
    wanted = wanted.scatter_reduce(1, found, 100 + rank, "amax").scatter(1, explored, 1000.0)
    return highest_apart(wanted.view_as(scanned.scores), min(most, wanted.shape[1] // 4))


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
