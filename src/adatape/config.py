"""Settings as typed records, free of torch so that the command line answers at once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_type_hints

T = TypeVar("T")

Update = Literal["average", "replace"]
Ponder = Literal["gini", "max", "collect"]
Choice = Literal["highest", "random", "order"]
ReaderName = Literal["adaptive", "parallel", "fixed", "act", "act-after-norm"]
TapeFFN = Literal["none", "append", "blocks", "append+blocks"]


@dataclass(frozen=True)
class Reading:
    """How a tape is read; the paper's letters are T, τ, K, h and λ."""

    steps: int = 10
    """most tape tokens per sample (T)"""
    threshold: float = 2.0
    """reading stops once the summed largest weights reach this (τ)"""
    merge: int | None = None
    """bank tokens merged into one tape token (K); None is steps / threshold"""
    query_width: int = 64
    """leading coordinates of query and bank that are compared (h)"""
    update: Update = "average"
    """next query: mean of query and token, or the token alone"""
    ponder: Ponder = "gini"
    """length loss: 1 - Σw², 1 - max w, or the halting sum"""
    ponder_at_halt: bool = True
    """whether the halting step counts in that loss"""
    norm_scale: float = 1.0
    """initial scale of the LayerNorm that query and bank share"""
    noise: float = 0.0
    """standard deviation of the noise on the training query"""
    hide: float = 0.0
    """share of the bank hidden at random while training"""
    choose: Choice = "highest"
    """which bank tokens a step takes; the others are controls"""
    temperature: float | None = None
    """what scores are divided by before the softmax; None is √h"""
    norm: bool = True
    """whether query and bank pass their shared LayerNorm"""

    @property
    def merged(self) -> int:
        return merge_of(self.steps, self.threshold, self.merge)


def merge_of(steps: int, threshold: float, merge: int | None) -> int:
    """K, by default T / τ: the count for which a uniform softmax halts after exactly T steps."""
    if merge is not None:
        return merge
    if threshold == math.inf:
        raise ValueError(f"threshold is {threshold} and merge is None; steps / threshold gives 0, so pass merge >= 1")
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it must be positive")
    return max(1, int(steps / threshold + 1e-9))


@dataclass(frozen=True)
class SequenceModel:
    """A Transformer on symbols; `reading` shows them only through a tape, `universal` repeats one block."""

    width: int = 192
    depth: int = 12
    heads: int = 3
    reading: Reading | None = None
    reader: ReaderName = "adaptive"
    universal: int | None = None
    """most steps of a Universal Transformer, one block that ACT repeats"""
    layer: int = 1
    """block index before which the tape joins"""
    tape_ffn: TapeFFN = "append"
    """where tape tokens take a feed-forward of their own"""


@dataclass(frozen=True)
class Parity:
    """Is the number of ones among symbols -1, 0, 1 odd?"""

    length: int = 32
    """symbols per sequence (N)"""
    held_out: int = 6400
    """sequences in the fixed test set, and in the validation set that stops a run"""


@dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up to a constant rate."""

    lr: float = 3e-5
    warmup: int = 1000
    steps: int = 10_000
    batch: int = 128
    weight_decay: float = 0.0
    clip: float = 1.0
    """largest gradient norm"""


@dataclass(frozen=True)
class Experiment:
    """All that a run depends on; `config.json` of its folder."""

    recipe: str
    data: Parity
    model: SequenceModel
    optimizer: Optimizer
    ponder_weight: float = 0.0
    """weight of the length loss (λ)"""
    seed: int = 0
    evaluate_every: int = 250
    """steps between evaluations"""
    stop_at: float | None = 1.0
    """validation accuracy that ends a run when met three times in a row"""


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(kind: type[T], values: dict[str, Any]) -> T:
    """The record that `to_dict` wrote; an unknown name is an error that lists the known ones."""
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - fields)
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(fields))}")
    hints = get_type_hints(kind)
    return kind(**{name: _nested(hints[name], value) for name, value in values.items()})


def _nested(hint: Any, value: Any) -> Any:
    records = [option for option in (hint, *get_args(hint)) if dataclasses.is_dataclass(option)]
    return from_dict(records[0], value) if records and isinstance(value, dict) else value  # type: ignore[arg-type]
