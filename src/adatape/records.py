"""The two records that modules exchange: `Tape`, from a reader to the encoder, and `Output`, from every model.

They print as shapes and dtypes instead of values. They stay plain NamedTuples, whose only base is `tuple`, as pytree
and `torch.compile` require.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


def _summary(record: Any) -> str:
    """Fields that are set: tensors as dtype[shape], integers per sample with their range."""
    known = [(name, each) for name, each in zip(record._fields, record, strict=True) if each is not None]
    return f"{type(record).__name__}({', '.join(f'{name}={_shown(each)}' for name, each in known)})"


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    place = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{place}{_range(value)}"


def _range(value: Tensor) -> str:
    """Least and largest of integers per sample, such as tape lengths, where they are known."""
    if value.dim() != 1 or not value.numel() or value.is_floating_point() or value.is_complex() or value.is_meta:
        return ""
    try:
        least, most = int(value.min()), int(value.max())
    except RuntimeError:  # while compiling, exporting or under vmap, values are not known
        return ""
    return f" of {least}" if least == most else f" of {least} to {most}"


class Tape(NamedTuple):
    """Tape tokens of b samples: t steps, each of k merged bank tokens."""

    tokens: Tensor  # (b, t, d), zero where hidden
    mask: Tensor  # (b, t) bool, True = visible; hidden tokens are always at the end
    index: Tensor  # type: ignore[assignment]  # (b, t, k) int64, -1 where hidden; shadows tuple.index
    weight: Tensor  # (b, t, k), zero where hidden
    length: Tensor  # (b,) int64, visible tokens per sample
    ponder: Tensor  # (b,), the loss term that favours short tapes

    def __repr__(self) -> str:
        return _summary(self)


class Steps(NamedTuple):
    """The per-step weights, and logits if any, of a method that repeats blocks."""

    weight: Tensor  # (b, t), or (b, t, n) where tokens halt separately; zero once halted
    logits: Tensor | None = None  # (b, t, classes), where every step has logits

    def __repr__(self) -> str:
        return _summary(self)


class Searched(NamedTuple):
    """Windows at random places that training encoded without gradient."""

    index: Tensor  # type: ignore[assignment]  # (b, s) int64, their cells
    scores: Tensor  # (b, s), the scan's
    gate: Tensor  # (b, s)
    evidence: Tensor  # (b, s, classes)

    def __repr__(self) -> str:
        return _summary(self)


class Places(NamedTuple):
    """What a reader of windows knows of the windows it read, and of all places in training."""

    scores: Tensor  # (b, t), the scan's logit that the window shows what the label names
    gate: Tensor  # (b, t), how much the window's evidence counts, as a logit
    evidence: Tensor  # (b, t, classes), as logits
    image: Tensor  # (b, 2) int64 on the CPU, height and width of each image; (1, 2) where all have one size
    found: Tensor | None = None  # (b, h, w), weights of the guesses of all places, as logits
    guesses: Tensor | None = None  # (b, h, w, classes), as logits
    searched: Searched | None = None

    def __repr__(self) -> str:
        return _summary(self)


class Output(NamedTuple):
    """The result of `model(x, output=True)` for every model."""

    logits: Tensor  # (b, classes)
    features: Tensor  # (b, d), pooled, the classifier's input
    ponder: Tensor  # (b,)
    tape: Tape | None = None
    steps: Steps | None = None
    places: Places | None = None

    def __repr__(self) -> str:
        return _summary(self)
