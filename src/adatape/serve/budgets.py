"""Which budget a request asks for, by steps, threshold or latency; what each costs at most, and what it gives."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

from adatape.config import Budget
from adatape.evaluate.budget import apply_budget, budget_at, scaled_budget
from adatape.evaluate.cost import NoCostFormula, cost, total
from adatape.models.base import Adaptive
from adatape.reader import TapeReader

MEASURED = 6  # budgets whose latency is known; where there are more, they double
FILE = "figures/budgets.json"  # what `adatape eval RUN --budgets` writes
FIGURES = ("threshold", "accuracy", "mean_ap", "length_mean", "gflops_mean")
MOST_STOPS = 128

Stop = dict[str, float | None]


def asked_budget(model: Adaptive, default: Budget | None, steps: int | None, threshold: float | None) -> Budget | None:
    """With nothing left open, so that equal ones run in one batch; None for a model without any."""
    if steps is None and threshold is None:
        return default
    known = model.budget_range()
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


def within_latency(model: Adaptive, latency: Mapping[int | None, float], wanted: float) -> Budget | None:
    """The largest of the measured budgets whose model time for one sample fits."""
    if not 0 < wanted < math.inf:
        raise ValueError(f"latency_ms is {wanted}; it must be a finite number above 0")
    fitting = [steps for steps, ms in latency.items() if ms <= wanted]
    if not fitting:
        least = math.ceil(100 * min(latency.values())) / 100  # rounded up, so that asking for it succeeds
        raise ValueError(f"latency_ms is {wanted}; the least possible here is {least}")
    steps = max(fitting, key=lambda each: each or 0)
    return None if steps is None else scaled_budget(model, steps)


def measured_budgets(model: Adaptive) -> list[Budget | None]:
    """The budgets to measure at the start, from least to most."""
    known = model.budget_range()
    if known is None:
        return [None]
    least, most = known.least, known.most
    doubling = {least, *(2**n for n in range(most.bit_length()) if least <= 2**n <= most), most}
    steps = range(least, most + 1) if most - least < MEASURED else sorted(doubling)
    return [scaled_budget(model, each) for each in steps]


def as_dict(budget: Budget | None) -> dict[str, float | None]:
    return {"steps": None, "threshold": None} if budget is None else dataclasses.asdict(budget)


def stops_of(folder: Path, model: Adaptive) -> list[Stop]:
    """One for each number of steps, from least to most; only the measured ones where there are very many."""
    measured = {stop["steps"]: stop for stop in _measured(folder) if _at_floor(model, stop)}
    known = model.budget_range()
    if known is None or known.most - known.least >= MOST_STOPS:
        return list(measured.values())
    unknown: Stop = dict.fromkeys(FIGURES)
    bounds = _bounds(model, range(known.least, known.most + 1))
    return [{"steps": steps, **unknown, **measured.get(steps, {}), "gflops": most} for steps, most in bounds.items()]


def _at_floor(model: Adaptive, stop: Stop) -> bool:
    """Whether a stop was measured with the floor that holds now; one may have been stored or removed since."""
    steps, threshold = stop["steps"], stop["threshold"]
    if not model.stops_below_threshold or not steps:
        return True
    return math.isclose(threshold or 0.0, budget_at(model, int(steps), model.budget()).threshold or 0.0, rel_tol=1e-3)


def bound(model: Adaptive) -> float | None:
    """GFLOPs of one sample at the model's budget, at most."""
    try:
        return total(cost(model)).macs / 1e9
    except NoCostFormula:
        return None


def _bounds(model: Adaptive, every: range) -> dict[int, float | None]:
    before, found = model.budget(), {}
    for steps in every:
        apply_budget(model, budget_at(model, steps, before))
        found[steps] = bound(model)
    if before is not None:
        apply_budget(model, before)
    return found


def _measured(folder: Path) -> list[Stop]:
    try:
        rows = json.loads((folder / FILE).read_text())["rows"]
        found = [{name: None if row.get(name) is None else float(row[name]) for name in FIGURES} for row in rows]
        stops: list[Stop] = [{"steps": int(row["steps"]), **each} for row, each in zip(rows, found, strict=True)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return []
    return [stop for stop in stops if all(value is None or math.isfinite(value) for value in stop.values())]
