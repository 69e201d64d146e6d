"""The two records that modules exchange: `Tape`, from a reader to the encoder, and `Output`, from every model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tape(NamedTuple):
    """Tape tokens of b samples: t steps, each of k merged bank tokens."""

    tokens: Tensor  # (b, t, d), zero where hidden
    mask: Tensor  # (b, t) bool, True = visible; hidden tokens are always at the end
    index: Tensor  # type: ignore[assignment]  # (b, t, k) int64, -1 where hidden; shadows tuple.index
    weight: Tensor  # (b, t, k), zero where hidden
    length: Tensor  # (b,) int64, visible tokens per sample
    ponder: Tensor  # (b,), the loss term that favours short tapes


class Steps(NamedTuple):
    """The per-step weights, and logits if any, of a method that repeats blocks."""

    weight: Tensor  # (b, t), or (b, t, n) where tokens halt separately; zero once halted
    logits: Tensor | None = None  # (b, t, classes), where every step has logits


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
    """The result of `model(x, output=True)` for every model."""

    logits: Tensor  # (b, classes)
    features: Tensor  # (b, d), pooled, the classifier's input
    ponder: Tensor  # (b,)
    tape: Tape | None = None
    steps: Steps | None = None
    places: Places | None = None
