"""What a run on a CPU says of its own duration; every clock here is made up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import tiny

from adatape.data.batch import Shard
from adatape.evaluate.cost import cost, total
from adatape.evaluate.progress import Progress
from adatape.train.duration import (
    FIRST_STEPS,
    DurationTeller,
    in_words,
    macs_per_second,
    training_macs,
    warn_if_too_large,
)
from adatape.train.launch import train_to_folder
from adatape.train.trainer import Trainer


def ticking(seconds: float) -> Callable[[], float]:
    times: Iterator[float] = (seconds * n for n in itertools.count())
    return lambda: next(times)


def told(seconds: float, steps: int, taken: int) -> list[str]:
    """What is said within some steps of a run whose steps take so long."""
    said: list[str] = []
    teller = DurationTeller(said.append, ticking(seconds))
    for step in range(1, taken + 1):
        teller.on_step(step, steps)
    return said


def test_the_first_steps_tell_once_how_long_the_others_take() -> None:
    assert told(0.5, 2000, FIRST_STEPS) == []
    [line] = told(0.5, 2000, 100)
    assert line == "at 0.5 s a step, the 1,989 steps left take about 17 minutes"
    assert told(0.5, 200, 200) == []  # short


def test_slow_steps_tell_earlier_and_with_advice() -> None:
    assert told(30.0, 20_000, 2) == []
    [line] = told(30.0, 20_000, 3)
    assert "the 19,997 steps left take about 6.9 days; a GPU (--device cuda), a smaller model" in line


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "5 seconds"), (119, "119 seconds"), (120, "2 minutes"), (5400, "90 minutes"), (9000, "2.5 hours"),
     (468_000, "5.4 days"), (1e9, "32 years"), (1e12, "32,000 years")],
)  # fmt: skip
def test_durations_have_two_figures_and_a_unit(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_work_is_that_of_forward_and_backward_of_the_steps_that_are_left() -> None:
    experiment = tiny(steps=7)
    trainer = Trainer(experiment)
    whole = 3 * total(cost(trainer.model)).macs * experiment.optimizer.batch
    assert training_macs(trainer) == whole * 7
    trainer.step = 5
    assert training_macs(trainer) == whole * 2


def test_speed_is_that_of_the_quickest_product() -> None:
    times = iter([0.0, 0.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 7.0, 7.0])  # products of 2, 1 and 4 seconds
    assert macs_per_second(seconds=5.0, clock=lambda: next(times)) == pytest.approx(1576 * 384 * 1536)


def large(steps: int, device: str = "cpu", rank: int = 0) -> Any:
    """A stand-in for a trainer of a model that is large enough."""
    trainer = Trainer(tiny(steps=1))
    optimizer = dataclasses.replace(trainer.experiment.optimizer, steps=steps)
    experiment = dataclasses.replace(trainer.experiment, optimizer=optimizer)
    shard, place = Shard(rank, rank + 1), torch.device(device)
    return SimpleNamespace(experiment=experiment, model=trainer.model, step=0, device=place, shard=shard)


def test_a_run_that_is_too_large_for_a_cpu_is_told_before_it_starts() -> None:
    said: list[str] = []
    trainer = large(10**9)
    warn_if_too_large(trainer, said.append, speed=lambda _: training_macs(trainer) / 468_000)
    [line] = said
    assert "take this CPU roughly 5.4 days; a GPU (--device cuda)" in line


@pytest.mark.parametrize("steps", [1, 1000])
def test_a_small_run_is_not_measured(steps: int) -> None:
    warn_if_too_large(large(steps), pytest.fail, speed=lambda _: pytest.fail("measured"))


def test_no_word_is_lost_on_a_gpu_on_other_processes_and_on_a_fast_cpu() -> None:
    for trainer, speed in ((large(10**9, "cuda"), 1.0), (large(10**9, rank=1), 1.0), (large(10**9), 1e20)):
        warn_if_too_large(trainer, pytest.fail, speed=lambda _, speed=speed: speed)


def test_a_run_says_what_it_knows_and_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Heard(Progress):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def message(self, text: str) -> None:
            self.lines.append(text)

    monkeypatch.setattr("adatape.train.duration.WORTH_MEASURING", 0.0)
    monkeypatch.setattr("adatape.train.duration.LONG", 0.0)
    monkeypatch.setattr("adatape.train.duration.NOTABLE", 0.0)
    monkeypatch.setattr("adatape.train.duration.FIRST_STEPS", 1)
    heard = Heard()
    found = train_to_folder(tiny(steps=4, evaluate_every=4), tmp_path / "run", "cpu", progress=heard)
    assert found.result["steps"] == 4
    assert "multiply-adds, which take this CPU" in heard.lines[0]
    assert "the 2 steps left take about" in heard.lines[1]
