"""TapeReader: Algorithm 2 as a module, with shared norm, query noise, hidden bank tokens and a budget.

It has two paths with the same result: `atr.read_tape` on all bank tokens; or `kernels.select`, which selects indices
from keys without gradient, after which only the selected tokens are computed and weighted. The second is the default on
a GPU and, where gradients are needed, for a bank that all samples share: it saves a norm of all tokens and its
gradient. In inference on a CPU such a bank is read by its keys alone, and a bank that has keys of its own always is. A
bank that searches an index selects by itself, on any device.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from adatape.atr import (
    PONDER,
    UPDATE,
    Choose,
    at_least_float32,
    highest,
    ponder_of,
    read_tape,
    weighted_sum,
    without_autocast,
)
from adatape.banks import BankView, normed
from adatape.config import Choice, ReaderConfig
from adatape.counter_rng import keys_of, normal, uniform
from adatape.cuda_graphs import in_torch_func, is_exporting, may_look_at
from adatape.kernels.select import ReadParams
from adatape.kernels.weights import tape_weights
from adatape.packing import truncate_tape
from adatape.records import Tape


def at_random(d: Float[Tensor, "b c"], k: int) -> Tensor:
    """A control: k random unread tokens."""
    return highest(torch.rand_like(d).masked_fill(d == -math.inf, -math.inf), k)


def in_order(d: Float[Tensor, "b c"], k: int) -> Tensor:
    """A control: the first k unread tokens of the bank."""
    place = -torch.arange(d.shape[-1], device=d.device, dtype=d.dtype)
    return highest(place.expand_as(d).masked_fill(d == -math.inf, -math.inf), k)


CHOICES: dict[Choice, Choose] = {"highest": highest, "random": at_random, "order": in_order}
MAY_BE_NONE = ("merge", "temperature")
NUMBERS = ("steps", "threshold", "query_width", "norm_scale", "query_noise", "bank_dropout", *MAY_BE_NONE)


class TapeReader(nn.Module):
    """Reads a tape for a query from a bank, both normalised by one LayerNorm.

    It computes in float32 or better and returns tokens of the query's dtype. `use_kernels` chooses the path:
    `kernels.select` (True), `atr.read_tape` (False), or the one that is faster (None).
    """

    use_kernels: bool | None = None
    halts = True  # whether a threshold can end a tape
    scales_rows = False  # whether blocks multiply tape rows by their weight

    def __init__(self, width: int, reading: ReaderConfig, bank_size: int) -> None:
        super().__init__()
        _check_config(reading, width)
        _check_bank(reading, bank_size, self.tokens_needed(reading))
        self.reading = reading
        self.norm = nn.LayerNorm(width, eps=1e-6) if reading.norm else nn.Identity()
        if reading.norm:
            nn.init.constant_(self.norm.weight, reading.norm_scale)  # type: ignore[arg-type]
            self.norm.requires_grad_(reading.norm_learns)
        self.steps, self.threshold = reading.steps, reading.threshold

    @staticmethod
    def tokens_needed(reading: ReaderConfig) -> int:
        return reading.steps * reading.merged

    def set_budget(
        self, steps: int | None = None, threshold: float | None = None, bank_size: int | None = None
    ) -> None:
        """Sets the maximum tape length and the halting threshold, which scales with steps unless given."""
        steps = self.reading.steps if steps is None else whole_steps(steps)
        if steps < 0:
            raise ValueError(f"steps is {steps}; it must be 0 (no tape) or more")
        if bank_size is not None:
            self.check_bank(bank_size, steps)
        if threshold is None:
            threshold = self.reading.threshold * steps / self.reading.steps
        elif not as_number("threshold", threshold) > 0:
            raise ValueError(f"threshold is {threshold}; it must be positive")
        else:
            threshold = float(threshold)
            warn_beyond("threshold", threshold, self.reading.threshold)
        warn_beyond("steps", steps, self.reading.steps)
        self.steps, self.threshold = steps, threshold

    def check_bank(self, size: int, steps: int | None = None) -> None:
        """Refuses a bank of fewer tokens than `steps` read, by default those of the budget."""
        steps = self.steps if steps is None else steps
        need = self.tokens_needed(dataclasses.replace(self.reading, steps=steps, merge=self.reading.merged))
        if need > size:
            raise ValueError(f"steps is {steps}; it needs {need} bank tokens, and the bank has {size}")

    @property
    def always_full(self) -> bool:
        """Whether no sample can halt early: steps - 1 weights of at most 1 cannot reach the threshold.

        An infinite threshold does not count: `export` sets it and then cuts the tape itself.
        """
        return self.steps - 1 < self.threshold < math.inf and not (self.training and self.reading.sample_budgets)

    def forward(
        self,
        query: Float[Tensor, "b d"],
        bank: BankView | Float[Tensor, "c d"] | Float[Tensor, "b c d"],
        key: Tensor | None = None,
    ) -> Tape:
        dtype, view = query.dtype, bank if isinstance(bank, BankView) else BankView(bank)
        with without_autocast(query):
            if self.training and self.reading.query_noise > 0:
                query = query + self.reading.query_noise * _noise(query, key)
            query, taken = self._norm(query), self._dropout_mask(query, view.size, key)
        if self._uses_kernels(query, view):
            tape = self.read_selected(query, view, taken)
        elif self._reads_keys(query, view):
            tape = self.read_keys(query, view, taken, key)
        else:
            tokens = view.all()
            with without_autocast(query):
                tape = self.read(query, self._norm(tokens), taken, key)
        if self.training and self.reading.sample_budgets:
            tape = truncate_tape(tape, _sampled_budget(query, self.steps, key))
        tokens, *rest = tape  # torch 2.11 does not compile what `_replace` makes
        return Tape(tokens.to(dtype), *rest)

    def _uses_kernels(self, query: Tensor, view: BankView) -> bool:
        if view.searches and self.use_kernels is None:
            return not is_exporting()
        if self.reading.choose != "highest" or query.dtype == torch.float64 or is_exporting() or in_torch_func(query):
            return False
        faster = query.is_cuda or (view.shared and torch.is_grad_enabled())
        return faster if self.use_kernels is None else self.use_kernels

    def _reads_keys(self, query: Tensor, view: BankView) -> bool:
        """Whether keys suffice: they are the bank's own; or one bank for all samples, no gradient, on a CPU, eager."""
        if view.has_own_keys:
            return True
        eager = may_look_at(query) and query.dtype == torch.float32 and not torch.is_grad_enabled()
        return view.shared and self.use_kernels is None and eager

    def read_selected(self, query: Float[Tensor, "b d"], bank: BankView, taken: Bool[Tensor, "b c"] | None) -> Tape:
        reading, h = self.reading, self.reading.query_width
        temperature = h**0.5 if reading.temperature is None else reading.temperature
        params = ReadParams(self.steps, self.threshold, reading.merged, temperature, reading.update == "average")
        selection = bank.select(query[:, :h], None if isinstance(self.norm, nn.Identity) else self.norm, taken, params)
        index = selection.index.clamp(min=0)
        tokens = bank.take(index)
        with without_autocast(query):
            tokens, weight, length = self._norm(tokens), selection.weight, selection.mask.sum(-1)
            if torch.is_grad_enabled():
                keys = at_least_float32(bank.keys_read(index, tokens, h))
                weight = tape_weights(query[:, :h], keys, weight, length, temperature, params.average)
            return Tape(
                tokens=weighted_sum(weight, tokens),
                mask=selection.mask,
                index=selection.index,
                weight=weight,
                length=length,
                ponder=ponder_of(weight, selection.mask, self.threshold, reading.ponder, reading.ponder_at_halt),
            )

    def read_keys(self, query: Tensor, bank: BankView, taken: Tensor | None, key: Tensor | None) -> Tape:
        """`read` without a norm of all tokens in full width; the same bits."""
        h = self.reading.query_width
        keys = bank.keys(None if isinstance(self.norm, nn.Identity) else self.norm, h)
        with without_autocast(query):
            _, *rest = tape = self.read(query[:, :h], keys, taken, key)
        tokens = bank.take(tape.index.clamp(min=0))
        with without_autocast(query):
            return Tape(weighted_sum(tape.weight, self._norm(tokens)), *rest)

    def read(self, query: Tensor, bank: Tensor, taken: Tensor | None, key: Tensor | None = None) -> Tape:  # noqa: ARG002
        reading = self.reading
        return read_tape(
            query,
            bank,
            steps=self.steps,
            threshold=self.threshold,
            merge=reading.merged,
            query_width=reading.query_width,
            taken=taken,
            update=reading.update,
            ponder=reading.ponder,
            ponder_at_halt=reading.ponder_at_halt,
            choose=CHOICES[reading.choose],
            temperature=reading.temperature,
            check=False,  # checking values would synchronise the GPU at every step
        )

    def _norm(self, x: Tensor) -> Tensor:
        return at_least_float32(x) if isinstance(self.norm, nn.Identity) else normed(x, self.norm)

    def _dropout_mask(self, query: Tensor, size: int, key: Tensor | None) -> Bool[Tensor, "b c"] | None:
        if not (self.training and self.reading.bank_dropout > 0):
            return None
        return _uniform(query, size, key) < self.reading.bank_dropout

    def row_scale(self, tape: Tape, inputs: int) -> Float[Tensor, "b m"] | None:  # noqa: ARG002
        """Factors by which blocks multiply rows after each norm; None except in an ablation."""
        return None

    def never_halt(self) -> None:
        self.threshold = max(float(self.steps), self.threshold)  # no weight is above 1

    def export_refusal(self) -> str | None:
        """Why a graph with dynamic tape length cannot be exported; None where it can."""
        if self.halts and self.reading.choose == "random":
            return "choose is 'random'; an exported graph is deterministic, so use 'highest'"
        return None

    def macs(self, bank_size: int, tape: int) -> int:
        """Multiply-adds of scoring the whole bank at each step."""
        return tape * bank_size * self.reading.query_width

    def extra_repr(self) -> str:
        return f"steps={self.steps}, threshold={self.threshold}, merge={self.reading.merged}"


@register_flop_formula(torch.ops.adatape.select_tokens)
def _flops(query: Sequence[int], keys: Sequence[int], _taken: object, steps: int, *_: object, **__: object) -> int:
    """Of `kernels.select` for PyTorch's counter: all keys are scored at every step."""
    return 2 * steps * query[0] * keys[-2] * keys[-1]


def whole_steps(steps: int) -> int:
    """`steps` of a budget as an int; refuses fractions, True and False."""
    if not isinstance(steps, bool) and hasattr(steps, "__index__"):
        with suppress(TypeError):  # of a tensor that is no whole number
            return operator.index(steps)
    raise ValueError(f"steps is {steps!r}; it must be a whole number")


def as_number(name: str, value: Any) -> float:
    """A setting as a float; refuses what is no number, True and False."""
    if not isinstance(value, bool) and hasattr(value, "__float__"):
        with suppress(TypeError, ValueError, RuntimeError):  # of a tensor that is no single number
            return float(value)
    raise ValueError(f"{name} is {value!r}; it must be a number")


def _noise(like: Float[Tensor, "b d"], key: Int[Tensor, "b"] | None) -> Float[Tensor, "b d"]:
    """Gaussian noise, a function of the sample's key if given, so that it is the same in any batch or process."""
    return torch.randn_like(like) if key is None else normal(keys_of(1, key), like.shape[1]).to(like.dtype)


def _uniform(like: Float[Tensor, "b d"], count: int, key: Int[Tensor, "b"] | None) -> Float[Tensor, "b count"]:
    if key is None:
        return torch.rand(like.shape[0], count, device=like.device)
    return uniform(keys_of(2, key), count)


def _sampled_budget(like: Float[Tensor, "b d"], steps: int, key: Int[Tensor, "b"] | None) -> Int[Tensor, "b"]:
    """One budget per sample, uniform from 0 to `steps`."""
    drawn = torch.rand(like.shape[0], device=like.device) if key is None else uniform(keys_of(3, key), 1).squeeze(1)
    return (drawn * (steps + 1)).long().clamp(max=steps)


def warn_beyond(name: str, value: float, built: float, stacklevel: int = 4) -> None:
    """Points at the caller of the model's `set_budget`, which called the reader's."""
    if value > built:
        text = f"{name} is {value}; the model was built, and perhaps trained, for at most {built}"
        warnings.warn(text, stacklevel=stacklevel)


def _check_config(reading: ReaderConfig, width: int) -> None:
    """Checks settings at construction instead of at the first read."""
    for name in NUMBERS:
        value = getattr(reading, name)
        if value is not None or name not in MAY_BE_NONE:
            as_number(name, value)
    for name, whole in (("steps", reading.steps), ("merge", reading.merged), ("query_width", reading.query_width)):
        if not isinstance(whole, int):
            raise ValueError(f"{name} is {whole}; it must be a whole number")
    if not 0 < reading.query_width <= width:
        raise ValueError(f"query_width is {reading.query_width}; it must be between 1 and the model's width {width}")
    for name, known in (("choose", CHOICES), ("update", UPDATE), ("ponder", PONDER)):
        if getattr(reading, name) not in known:
            raise ValueError(f"{name} is {getattr(reading, name)!r}; it must be one of {', '.join(known)}")
    for name, value in (
        ("steps", reading.steps),
        ("threshold", reading.threshold),
        ("merge", reading.merged),
        ("norm_scale", reading.norm_scale),
        ("temperature", 1.0 if reading.temperature is None else reading.temperature),
    ):
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be positive")
    if not 0 <= reading.bank_dropout < 1 or not reading.query_noise >= 0:
        raise ValueError(
            f"bank_dropout is {reading.bank_dropout} and query_noise {reading.query_noise}; "
            "they must be in [0, 1) and at least 0"
        )


def _check_bank(reading: ReaderConfig, size: int, need: int) -> None:
    dropout = reading.bank_dropout
    # Six standard deviations of the Bernoulli count: about one sample in a billion would have too few left.
    hidden = size * dropout + 6 * math.sqrt(size * dropout * (1 - dropout))
    if size - hidden < need:
        hides = f", up to {math.ceil(hidden)} of them hidden in training" if dropout else ""
        product = "steps × merge" if need == reading.steps * reading.merged else "steps"
        raise ValueError(f"bank has {size} tokens{hides}; {product} needs {need}")
