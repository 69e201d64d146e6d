"""The two records that cross rooms: what a reader hands the encoder, and what every model hands the rest."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tape(NamedTuple):
    """What was read for each of b samples in t steps of k merged bank tokens."""

    tokens: Tensor  # (b, t, d), zero where hidden
    mask: Tensor  # (b, t) bool, True = visible; only the tail is ever hidden
    index: Tensor  # type: ignore[assignment]  # (b, t, k) int64, -1 where hidden; hides tuple.index, which nobody needs
    weight: Tensor  # (b, t, k), zero where hidden
    length: Tensor  # (b,) int64, visible tokens per sample
    ponder: Tensor  # (b,), the loss term that asks for short tapes


class Output(NamedTuple):
    """What every model gives for `model(x, output=True)`."""

    logits: Tensor  # (b, classes)
    features: Tensor  # (b, d), pooled, what the classifier sees
    ponder: Tensor  # (b,)
    tape: Tape | None = None
    steps: object | None = None  # per-step logits and weights, where a method's loss needs them
