"""What a request may ask a model to spend: a range of steps, a threshold, or a latency that chooses steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from adatape.models.adaptive import Adaptive
from adatape.reader import TapeReader

MEASURED = 8  # budgets whose latency is known; where there are more, they double


class Setting(NamedTuple):
    """One budget, with nothing left open; equal settings run in one batch. Both are None for a model without any."""

    steps: int | None = None
    threshold: float | None = None


class Budgets(NamedTuple):
    """The budgets that a model has."""

    least: int | None  # None: what it spends cannot be set
    most: int | None
    threshold: float | None  # of the whole budget; None: it halts by none that can be set
    merge: int | None
    default: Setting


def budgets_of(model: Adaptive) -> Budgets:
    """The range that the model was built with, and the budget it is set to now."""
    known, now, reader = model.budget_range(), model.budget(), model.tape_reader()
    if known is None or now is None:
        return Budgets(None, None, None, None, Setting())
    merge = reader.reading.merged if isinstance(reader, TapeReader) else None
    return Budgets(known.least, known.most, known.threshold, merge, Setting(now.steps, now.threshold))


def setting_of(budgets: Budgets, steps: int | None, threshold: float | None) -> Setting:
    """The setting that a request names; what it leaves out is as trained, and the threshold scales with steps."""
    if steps is None and threshold is None:
        return budgets.default
    if budgets.least is None or budgets.most is None:
        raise ValueError("steps and threshold are not for this model; what it spends is fixed")
    if steps is not None and not budgets.least <= steps <= budgets.most:
        raise ValueError(f"steps is {steps}; this model takes {budgets.least} to {budgets.most}")
    if threshold is not None:
        _check_threshold(budgets, threshold)
    steps = budgets.most if steps is None else steps
    if budgets.threshold is None:
        return Setting(steps)
    scaled = budgets.threshold * steps / budgets.most
    return Setting(steps, scaled if threshold is None or steps == 0 else threshold)


def _check_threshold(budgets: Budgets, threshold: float) -> None:
    if budgets.threshold is None:
        raise ValueError("threshold is not for this model; it halts by none")
    if not 0 < threshold < math.inf:
        raise ValueError(f"threshold is {threshold}; it must be a finite number above 0")


def for_length(setting: Setting, budgets: Budgets, length: int) -> Setting:
    """A short sequence holds fewer tokens to read than the budget allows: as many steps as it has groups of them."""
    room = length // (budgets.merge or 1)
    if setting.steps is None or setting.steps <= room:
        return setting
    return Setting(room, setting.threshold if room else 0.0)


def within_latency(budgets: Budgets, latency: Mapping[int | None, float], wanted: float) -> Setting:
    """The largest of the measured budgets whose model time for one sample fits."""
    if not 0 < wanted < math.inf:
        raise ValueError(f"latency_ms is {wanted}; it must be a finite number above 0")
    fitting = [steps for steps, ms in latency.items() if ms <= wanted]
    if not fitting:
        raise ValueError(f"latency_ms is {wanted}; the least possible here is {_up(min(latency.values()))}")
    steps = max(fitting, key=lambda each: each or 0)
    return setting_of(budgets, steps, None)


def measured_settings(budgets: Budgets) -> list[Setting]:
    """The budgets to measure at the start, from least to most."""
    if budgets.least is None or budgets.most is None:
        return [Setting()]
    least, most = budgets.least, budgets.most
    doubling = {least, *(2**n for n in range(most.bit_length()) if least <= 2**n <= most), most}
    steps = range(least, most + 1) if most - least < MEASURED else sorted(doubling)
    return [setting_of(budgets, each, None) for each in steps]


def _up(ms: float) -> float:
    """Rounded so that asking for what the message names succeeds."""
    return math.ceil(ms * 100) / 100


def as_dict(setting: Setting) -> dict[str, Any]:
    return setting._asdict()
