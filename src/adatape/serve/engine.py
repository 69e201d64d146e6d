"""A model as the server calls it: samples and a setting in, one answer for each out. One thread at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adatape.config import Budget
from adatape.data.augment import scaled
from adatape.evaluate.budget import apply_budget
from adatape.evaluate.cost import cost, total
from adatape.models.base import Adaptive
from adatape.models.sequence import SymbolEmbed
from adatape.records import Output
from adatape.serve.budgets import measured_budgets

REPEATS, PATIENCE = 15, 0.3  # runs that are measured, and seconds after which three must do


class Answer(NamedTuple):
    """What the model says of one sample, and what that took."""

    order: list[int]  # classes, the likeliest first
    probability: list[float]  # in that order
    tokens: int  # input and tape
    tape_length: int
    taken: list[list[int]]  # bank tokens of each step, in reading order
    weight: list[list[float]]
    halted: bool  # before its budget was spent
    gflops: float
    ms: float  # of the batch it ran in


class Engine:
    """Holds the model; every call must come from the same thread, since a budget is the model's own state."""

    def __init__(self, model: Adaptive, device: str = "cpu", sigmoid: bool = False) -> None:
        self.model = model.eval().to(device)
        self.device, self.sigmoid = torch.device(device), sigmoid
        self.default, self.measured = model.budget(), measured_budgets(model)
        self.inputs = model.input_tokens()
        self._current = self.default
        self._costs: dict[tuple[int, int], float] = {}

    @torch.inference_mode()
    def answers(self, samples: Sequence[Tensor], budget: Budget | None) -> list[Answer]:
        """Samples are pixels (c, s, s) or symbols (n,), all of one shape."""
        began = time.perf_counter()
        bank = self.model.tape_bank()
        if isinstance(bank, SymbolEmbed):
            bank.size = samples[0].shape[0]  # a shorter sequence is a smaller bank, and costs less
        if budget is not None and budget != self._current:
            apply_budget(self.model, budget)
            self._current = budget
        batch = torch.stack(list(samples)).to(self.device)
        output: Output = self.model(scaled(batch) if batch.dtype == torch.uint8 else batch, output=True)
        logits = output.logits.float().cpu()
        ms = (time.perf_counter() - began) * 1000
        chances = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        probability, order = chances.sort(dim=-1, descending=True, stable=True)
        lengths = [0] * len(samples) if output.tape is None else output.tape.length.tolist()
        most = 0 if output.tape is None or budget is None else budget.steps
        return [
            Answer(ranked, sure, self.inputs + length, length, *read, length < most, gflops, ms)
            for ranked, sure, length, read, gflops in zip(
                order.tolist(), probability.tolist(), lengths, _reads(output), self._gflops(output), strict=True
            )
        ]

    def _gflops(self, output: Output) -> list[float]:
        """The cost formula is asked once for each length of a bank's tape; other models count sample by sample."""
        bank = self.model.tape_bank()
        if bank is None or output.steps is not None:
            return [macs / 1e9 for macs in self.model.actual_macs(output).tolist()]
        lengths = [0] * len(output.logits) if output.tape is None else output.tape.length.tolist()
        for length in {*lengths}:
            if (bank.size, length) not in self._costs:
                self._costs[bank.size, length] = total(cost(self.model, length)).macs / 1e9
        return [self._costs[bank.size, length] for length in lengths]

    def check(self, sample: Tensor) -> None:
        """Refuses a model whose weights lead nowhere, before anyone asks it."""
        for budget in self.measured:
            [answer] = self.answers([sample], budget)
            if not all(each == each for each in answer.probability):
                raise ValueError(f"the model answers with NaN at {budget or 'its fixed cost'}; its weights are damaged")

    def latency(self, sample: Tensor) -> dict[int | None, float]:
        """Milliseconds of one sample alone by steps, the median of several; never less for more steps."""
        table: dict[int | None, float] = {}
        for budget in self.measured:
            table[None if budget is None else budget.steps] = max([self._median(sample, budget), *table.values()])
        self.answers([sample], self.default)  # the model is described at the budget of requests that name none
        return table

    def _median(self, sample: Tensor, budget: Budget | None) -> float:
        self.answers([sample], budget)  # warms up
        taken: list[float] = []
        began = time.perf_counter()
        while len(taken) < 3 or (len(taken) < REPEATS and time.perf_counter() - began < PATIENCE):
            taken.append(self.answers([sample], budget)[0].ms)
        return statistics.median(taken)


def _reads(output: Output) -> list[tuple[list[list[int]], list[list[float]]]]:
    if output.tape is None:
        return [([], [])] * len(output.logits)
    index, weight, length = (part.tolist() for part in (output.tape.index, output.tape.weight, output.tape.length))
    return [(i[:n], w[:n]) for i, w, n in zip(index, weight, length, strict=True)]
