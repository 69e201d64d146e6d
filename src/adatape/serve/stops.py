"""What each budget costs at most, and what it gives on the test set where that was measured."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

from adatape.evaluate.budget import apply_budget, budget_at
from adatape.evaluate.cost import NoCostFormula, cost, total
from adatape.models.base import Adaptive
from adatape.serve.budgets import served_range

FILE = "figures/budgets.json"  # what `adatape eval RUN --budgets` writes
FIGURES = ("threshold", "accuracy", "mean_ap", "length_mean", "gflops_mean")
MOST_STOPS = 128

Stop = dict[str, float | None]


def stops_of(folder: Path, model: Adaptive) -> list[Stop]:
    """One for each number of steps, from least to most; only the measured ones where there are very many."""
    measured = {stop["steps"]: stop for stop in _measured(folder) if _at_floor(model, stop)}
    known = served_range(model, model.budget())
    if known is None:
        return list(measured.values())
    every, unknown = range(known.least, known.most + 1), dict.fromkeys(FIGURES)
    if len(every) > MOST_STOPS:
        return [stop for steps, stop in measured.items() if steps in every]
    bounds = _bounds(model, every)
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
    with warnings.catch_warnings():  # of steps beyond the trained ones, of which setting the stored budget has warned
        warnings.simplefilter("ignore", UserWarning)
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
