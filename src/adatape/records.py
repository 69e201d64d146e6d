"""The records that cross rooms: what a reader hands the encoder, and what every model hands the rest."""

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


class Steps(NamedTuple):
    """How a method that repeats itself spread its steps."""

    weight: Tensor  # (b, t), or (b, t, n) where tokens halt apart: each step's share; zero once halted
    logits: Tensor | None = None  # (b, t, classes), where every step answers


class Searched(NamedTuple):
    """Windows at random places that training encoded without gradient."""

    index: Tensor  # type: ignore[assignment]  # (b, s) int64, their cells
    scores: Tensor  # (b, s), the scan's
    gate: Tensor  # (b, s)
    evidence: Tensor  # (b, s, classes)


class Places(NamedTuple):
    """What a reader of windows knows of the windows it read, and of all places in training."""

    scores: Tensor  # (b, t), the scan's logit that the window shows what the label names
    gate: Tensor  # (b, t), how much the window's evidence counts, as a logit
    evidence: Tensor  # (b, t, classes), as logits
    found: Tensor | None = None  # (b, h, w), weights of the guesses of all places, as logits
    guesses: Tensor | None = None  # (b, h, w, classes), as logits
    searched: Searched | None = None


class Output(NamedTuple):
    """What every model gives for `model(x, output=True)`."""

    logits: Tensor  # (b, classes)
    features: Tensor  # (b, d), pooled, what the classifier sees
    ponder: Tensor  # (b,)
    tape: Tape | None = None
    steps: Steps | None = None
    places: Places | None = None
