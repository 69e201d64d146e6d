"""Runs side by side: each learns what it learns alone, from batches that are made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import tiny

from adatape.train.fleet import Fleet, fleets, run_together
from adatape.train.folder import WEIGHTS
from adatape.train.run import run
from adatape.train.sweep import with_fields

SYSTEMS = ("adatape", "plainvit", "avit")


def test_each_run_learns_what_it_learns_alone(tmp_path: Path) -> None:
    experiments = [tiny(system) for system in SYSTEMS]
    folders = [tmp_path / system for system in SYSTEMS]
    results = run_together(experiments, folders, "cpu")
    for experiment, folder, result in zip(experiments, folders, results, strict=True):
        alone = run(experiment, tmp_path / f"{folder.name}-alone", "cpu", lambda _: None)
        assert alone["accuracy"] == result["accuracy"]
        assert alone["loss"] == result["loss"]
        mine, theirs = (load_file(at / WEIGHTS) for at in (folder, tmp_path / f"{folder.name}-alone"))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert json.loads((folder / "result.json").read_text())["accuracy"] == result["accuracy"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert {"train", "validation"} <= {line["kind"] for line in lines}


def test_rates_may_differ_and_batches_may_not() -> None:
    first = tiny("plainvit")
    fleet = Fleet([first, with_fields(first, {"optimizer.lr": 0.1})], "cpu")
    next(fleet.train())
    rates = [float(trainer.stepper.rate) for trainer in fleet.trainers]
    assert rates[1] > 10 * rates[0]
    for field, value in (("optimizer.batch", 8), ("seed", 1), ("optimizer.steps", 5), ("data.augment.flip", True)):
        with pytest.raises(ValueError, match=f"{field.split('.aug')[0]} is .*must be the same"):
            Fleet([first, with_fields(first, {field: value})], "cpu")
    with pytest.raises(ValueError, match=r"stop_at is 0\.5"):
        Fleet([with_fields(first, {"stop_at": 0.5})], "cpu")


def test_what_shares_batches_is_grouped_in_order() -> None:
    experiments = [tiny(system, seed=seed) for system in SYSTEMS for seed in (0, 1)]
    assert fleets(experiments, 2) == [[0, 2], [4], [1, 3], [5]]
    assert fleets(experiments, 8) == [[0, 2, 4], [1, 3, 5]]


def test_images_are_held_once() -> None:
    fleet = Fleet([tiny("plainvit"), tiny("vit")], "cpu")
    assert fleet.trainers[0].task.batches == fleet.trainers[1].task.batches
