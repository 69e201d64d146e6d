"""Models side by side on the clock: built and warmed up in one process, then timed in turns, round after round.

What slows the machine for a while slows all sides of a round, so ratios are taken within rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

Call = Callable[[], object]
T = TypeVar("T")

CALIBRATING, MOST_REPEATS = 3, 10_000


class TimedModel(NamedTuple):
    """A model that is ready to be timed."""

    call: Call
    peak_memory: int | None = None  # bytes that a training step needs at most, weights and moments included


class Outcome(NamedTuple):
    """What became of a side."""

    seconds: list[float]  # per call, one figure for each round
    peak_memory: int | None = None
    error: str | None = None


class Spread(NamedTuple):
    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratios(reference: Sequence[float], ours: Sequence[float]) -> Spread:
    """How many times as fast ours is as the reference, round by round."""
    return spread([theirs / mine for theirs, mine in zip(reference, ours, strict=True)])


def interleaved(
    sides: Mapping[str, Call],
    rounds: int,
    repeats: Mapping[str, int],
    synchronize: Call,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each side, one figure for each round; who is first moves on from round to round."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in rotated(list(sides), turn):
            took[name].append(seconds_per_call(sides[name], repeats[name], synchronize, clock))
    return took


def rotated(names: Sequence[T], by: int) -> list[T]:
    by %= max(1, len(names))
    return [*names[by:], *names[:by]]


def seconds_per_call(call: Call, repeats: int, synchronize: Call, clock: Callable[[], float] | None = None) -> float:
    """Of wall time unless a clock is given."""
    now = clock or time.perf_counter
    synchronize()
    began = now()
    for _ in range(repeats):
        call()
    synchronize()
    return (now() - began) / repeats


def repeats_within(call: Call, seconds: float, synchronize: Call) -> int:
    """As many calls as take about so long, by the quickest of a few."""
    each = min(seconds_per_call(call, 1, synchronize) for _ in range(CALIBRATING))
    return min(MOST_REPEATS, max(1, round(seconds / max(each, 1e-9))))


def compare(
    builders: Mapping[str, Callable[[], TimedModel]],
    rounds: int,
    seconds: float,
    synchronize: Call,
    watch: Callable[[str], None] = lambda _: None,
) -> dict[str, Outcome]:
    """Builds all sides, then times them in turns; one that fails is left out, with its error, and the rest goes on."""
    sides: dict[str, TimedModel] = {}
    failed: dict[str, str] = {}
    for name, build in builders.items():
        watch(name)
        with _noted(name, failed):
            sides[name] = build()
    watch("in turns")
    calls = {name: _guarded(name, side.call, failed) for name, side in sides.items()}
    repeats = {name: repeats_within(call, seconds, synchronize) for name, call in calls.items()}
    took = interleaved({name: call for name, call in calls.items() if name not in failed}, rounds, repeats, synchronize)
    return {
        name: Outcome([], error=failed[name]) if name in failed else Outcome(took[name], sides[name].peak_memory)
        for name in builders
    }


@contextmanager
def _noted(name: str, failed: dict[str, str]) -> Iterator[None]:
    """An error in one line; as an exception it would keep the memory that the side had."""
    try:
        yield
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {str(error).strip() or 'without a word'}".splitlines()[0]


def _guarded(name: str, call: Call, failed: dict[str, str]) -> Call:
    def guarded() -> None:
        if name not in failed:
            with _noted(name, failed):
                call()

    return guarded
