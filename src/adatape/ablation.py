"""Ablated readers: no adaptive length, no adaptive content, or ACT in place of the paper's halting rule."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from timm.layers import trunc_normal_
from torch import Tensor, nn

from adatape.act import NEVER_HALT_LOGIT, advance, begin, ponder_cost
from adatape.atr import as_float64, at_least_float32, highest, read_tape, scores, take
from adatape.config import ReaderConfig, ReaderName
from adatape.macs import linear_macs
from adatape.reader import CHOICES, TapeReader, whole_steps
from adatape.records import Tape


class ParallelReader(TapeReader):
    """Reads the T best-scoring tokens in one step: adaptive content without adaptive length.

    Tokens are not multiplied by weights, so the query gets no gradient, as in the released code (departure 22).
    """

    use_kernels, halts = False, False

    @property
    def always_full(self) -> bool:
        return not (self.training and self.reading.sample_budgets)

    @staticmethod
    def tokens_needed(reading: ReaderConfig) -> int:
        return reading.steps

    def read(self, query: Tensor, bank: Tensor, taken: Tensor | None, key: Tensor | None = None) -> Tape:  # noqa: ARG002
        h = self.reading.query_width
        d = scores(query[:, :h], as_float64(bank[..., :h]))
        index = highest(d if taken is None else d.masked_fill(taken, -math.inf), self.steps)
        return full_tape(take(bank, index), index[..., None])

    def macs(self, bank_size: int, tape: int) -> int:
        """Multiply-adds of scoring the whole bank once."""
        return bank_size * self.reading.query_width if tape else 0


class FixedTokens(nn.Module):
    """T trained tokens, the same for every sample, without a bank: neither length nor content is adaptive."""

    always_full, halts, scales_rows = True, False, False

    def __init__(self, width: int, reading: ReaderConfig) -> None:
        super().__init__()
        self.reading, self.steps = reading, reading.steps
        self.tokens = nn.Parameter(trunc_normal_(torch.empty(reading.steps, width), std=0.02))

    def set_budget(
        self,
        steps: int | None = None,
        threshold: float | None = None,  # noqa: ARG002
        bank_size: int | None = None,  # noqa: ARG002
    ) -> None:
        steps = self.reading.steps if steps is None else whole_steps(steps)
        if not 0 <= steps <= self.reading.steps:
            raise ValueError(f"steps is {steps}; it must be 0 to {self.reading.steps}, the number of trained tokens")
        self.steps = steps

    def check_bank(self, size: int, steps: int | None = None) -> None:
        """Does nothing: it reads no bank."""

    def forward(self, query: Float[Tensor, "b d"], bank: Tensor, key: Tensor | None = None) -> Tape:  # noqa: ARG002
        b = query.shape[0]
        tokens = self.tokens[: self.steps].expand(b, -1, -1).to(query.dtype)
        return full_tape(tokens, torch.arange(self.steps, device=query.device).expand(b, -1)[..., None])

    def row_scale(self, tape: Tape, inputs: int) -> None:
        """None: these tokens have no weights."""

    def never_halt(self) -> None:
        """Does nothing: this tape has a fixed length."""

    def export_refusal(self) -> None:
        """None: it can be exported."""

    def macs(self, bank_size: int, tape: int) -> int:  # noqa: ARG002
        return 0


class ActReader(TapeReader):
    """ACT applied to the tape: a trained layer computes a halting score for each token. The paper's appendix advises
    against it.

    ACT's weight multiplies the token, but the next LayerNorm divides it out again. With `after_norm`, blocks multiply
    after each of their norms instead. The K weights of a token in `Tape.weight` sum to its ACT weight.
    """

    use_kernels, always_full, halts = False, False, False

    def __init__(self, width: int, reading: ReaderConfig, bank_size: int, after_norm: bool = False) -> None:
        super().__init__(width, reading, bank_size)
        self.scales_rows = after_norm
        self.halt = nn.Linear(width, 1)
        nn.init.zeros_(self.halt.weight)
        nn.init.constant_(self.halt.bias, -1.0)

    def read(self, query: Tensor, bank: Tensor, taken: Tensor | None, key: Tensor | None = None) -> Tape:  # noqa: ARG002
        reading = self.reading
        tape = read_tape(
            query,
            bank,
            self.steps,
            math.inf,
            reading.merged,
            reading.query_width,
            taken,
            reading.update,
            choose=CHOICES[reading.choose],
            temperature=reading.temperature,
            check=False,
        )
        p = at_least_float32(self.halt(tape.tokens.to(self.halt.weight.dtype))).squeeze(-1).sigmoid()
        act, weights = begin(p[:, 0]), []
        for t in range(self.steps):
            weight, act = advance(act, p[:, t], last=t == self.steps - 1)
            weights.append(weight)
        share = torch.stack(weights, 1)
        visible = torch.arange(self.steps, device=p.device) < act.updates[:, None]
        tokens = tape.tokens * visible[..., None] if self.scales_rows else tape.tokens * share[..., None]
        return Tape(
            tokens=tokens,
            mask=visible,
            index=tape.index.masked_fill(~visible[..., None], -1),
            weight=tape.weight * share[..., None],
            length=visible.sum(-1),
            ponder=ponder_cost(act),
        )

    def read_keys(self, *_: object) -> Tape:
        raise ValueError(
            "reader is 'act'; its halting layer needs whole tokens, and this bank has keys of its own: "
            "use reader='adaptive' or 'parallel'"
        )

    def row_scale(self, tape: Tape, inputs: int) -> Float[Tensor, "b m"] | None:
        """Row factors for the blocks: 1 for input rows, the ACT weight for tape rows."""
        if not self.scales_rows:
            return None
        weight = tape.weight.sum(-1)
        return torch.cat([weight.new_ones(weight.shape[0], inputs), weight], 1)

    def never_halt(self) -> None:
        super().never_halt()
        nn.init.constant_(self.halt.bias, NEVER_HALT_LOGIT)

    def export_refusal(self) -> str:
        return (
            "reader is act; the last token of a tape has ACT's remainder as its weight, so a shorter tape is not "
            "a prefix of a longer one, and a graph with dynamic tape length cannot be exported"
        )

    def macs(self, bank_size: int, tape: int) -> int:
        """As TapeReader, plus one halting score per tape token."""
        return super().macs(bank_size, tape) + tape * linear_macs(self.halt)


def full_tape(tokens: Float[Tensor, "b t d"], index: Tensor) -> Tape:
    """A Tape with all tokens visible, weights 1 and ponder 0."""
    b, t, _ = tokens.shape
    return Tape(
        tokens=tokens,
        mask=torch.ones(b, t, dtype=torch.bool, device=tokens.device),
        index=index,
        weight=torch.ones(b, t, 1, device=tokens.device),
        length=torch.full((b,), t, device=tokens.device),
        ponder=torch.zeros(b, device=tokens.device),
    )


def make_reader(name: ReaderName, width: int, reading: ReaderConfig, bank_size: int) -> TapeReader | FixedTokens:
    if name == "adaptive":
        return TapeReader(width, reading, bank_size)
    if name == "parallel":
        return ParallelReader(width, reading, bank_size)
    if name == "fixed":
        return FixedTokens(width, reading)
    if name in ("act", "act-after-norm"):
        return ActReader(width, reading, bank_size, after_norm=name == "act-after-norm")
    raise ValueError(f"reader is {name!r}; it must be adaptive, parallel, fixed, act or act-after-norm")
