"""Which budget a request asks for: by steps, by a threshold, or by a latency that chooses steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from adatape.config import Budget
from adatape.evaluate.budget import budget_at, scaled_budget
from adatape.models.base import Adaptive, BudgetRange
from adatape.reader import TapeReader

MEASURED = 6  # budgets whose latency is known; where there are more, they double


def asked_budget(model: Adaptive, default: Budget | None, steps: int | None, threshold: float | None) -> Budget | None:
    """With nothing left open, so that equal ones run in one batch; None for a model without any."""
    if steps is None and threshold is None:
        return default
    known = served_range(model, default)
    if known is None:
        raise ValueError("steps and threshold are not for this model; what it spends is fixed")
    if steps is not None and not known.least <= steps <= known.most:
        raise ValueError(f"steps is {steps}; this model takes {known.least} to {known.most}")
    if threshold is not None and known.threshold is None and not model.stops_below_threshold:
        raise ValueError("threshold is not for this model; it halts by none")
    if threshold is not None and not 0 < threshold < math.inf:
        raise ValueError(f"threshold is {threshold}; it must be a finite number above 0")
    if threshold is not None and model.stops_below_threshold and threshold >= 1:
        raise ValueError(f"threshold is {threshold}; this model stops below a probability, so it must be below 1")
    steps = known.most if steps is None else steps
    return Budget(steps, threshold) if threshold is not None and steps else budget_at(model, steps, default)


def served_range(model: Adaptive, default: Budget | None) -> BudgetRange | None:
    """What requests may ask for: all that the model was trained for, or up to its stored budget where that is more."""
    known = model.budget_range()
    if known is None or default is None or default.steps <= known.most:
        return known
    threshold = None if known.threshold is None else model.threshold_at(default.steps)
    return BudgetRange(known.least, default.steps, threshold)


def tokens_a_step(model: Adaptive) -> int | None:
    """Bank tokens that one step reads; None where none is read adaptively."""
    reader = model.tape_reader()
    return reader.reading.merged if isinstance(reader, TapeReader) else None


def for_length(budget: Budget | None, model: Adaptive, length: int) -> Budget | None:
    """A short sequence holds fewer tokens to read than the budget allows: as many steps as it has groups of them."""
    room = length // (tokens_a_step(model) or 1)
    if budget is None or budget.steps <= room:
        return budget
    return Budget(room, budget.threshold if room else None)


def within_latency(
    model: Adaptive, latency: Mapping[int | None, float], wanted: float, default: Budget | None = None
) -> Budget | None:
    """The largest of the measured budgets whose model time for one sample fits."""
    if not 0 < wanted < math.inf:
        raise ValueError(f"latency_ms is {wanted}; it must be a finite number above 0")
    fitting = [steps for steps, ms in latency.items() if ms <= wanted]
    if not fitting:
        least = math.ceil(100 * min(latency.values())) / 100  # rounded up, so that asking for it succeeds
        raise ValueError(f"latency_ms is {wanted}; the least possible here is {least}")
    steps = max(fitting, key=lambda each: each or 0)
    return None if steps is None else budget_at(model, steps, default)


def measured_budgets(model: Adaptive) -> list[Budget | None]:
    """The budgets to measure at the start, from least to most; the model has the budget of requests that name none."""
    known = served_range(model, model.budget())
    if known is None:
        return [None]
    least, most = known.least, known.most
    doubling = {least, *(2**n for n in range(most.bit_length()) if least <= 2**n <= most), most}
    steps = range(least, most + 1) if most - least < MEASURED else sorted(doubling)
    return [scaled_budget(model, each) for each in steps]


def as_dict(budget: Budget | None) -> dict[str, float | None]:
    return {"steps": None, "threshold": None} if budget is None else dataclasses.asdict(budget)
