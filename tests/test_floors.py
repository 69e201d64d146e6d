"""How far a model of windows reads: a floor on probabilities, set by a mean length, stored and served."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_windows import images, read, small

from adatape.config import Budget, Experiment, ImageModel, Optimizer
from adatape.data_config import Images
from adatape.evaluate.budget import Target, apply_budget, choose, floors, grid, point, scaled_budget, target_of
from adatape.evaluate.reading import collect
from adatape.report.budgets import write_budgets
from adatape.report.tables import budgets_table
from adatape.serve.budgets import asked_budget, measured_budgets, within_latency
from adatape.serve.stops import stops_of
from adatape.train.budgets import reset_budget, store_budget
from adatape.train.folder import WEIGHTS, load_run, prepare
from adatape.train.identity import identity
from adatape.train.task import build_for
from adatape.train.weights import write_weights


def batches(count: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for part in images(count).split(3):
        yield part, torch.zeros(len(part), dtype=torch.int64)


@pytest.mark.parametrize("length", [0.5, 1.0, 2.5, 3.75])
def test_a_floor_gives_the_mean_length_that_it_was_set_for(length: float) -> None:
    model = small()
    [budget] = floors(model, batches(), [length])
    apply_budget(model, budget)
    assert read(model, images(8)).tape.length.float().mean() == length


def test_a_length_that_the_model_cannot_exceed_needs_no_floor() -> None:
    assert floors(small(), batches(), [4.0, 9.0]) == []


def test_the_longest_tape_within_a_mean_length_is_chosen() -> None:
    model = small()
    settings = [*grid(model), *floors(model, batches(), [1.5])]
    points = []
    for budget in settings:
        apply_budget(model, budget)
        points.append(point(budget, collect(model, batches()), {1: 1.0})._replace(accuracy=float(len(points))))
    chosen = choose(points, target_of(None, None, None, 1.5))
    assert chosen.budget == settings[-1]
    assert chosen.length_mean == 1.5
    with pytest.raises(ValueError, match=r"exactly one of latency, gflops, accuracy, length, steps"):
        target_of("1ms", None, None, 1.5)


def test_a_budget_without_a_threshold_has_the_floor_that_the_model_was_built_with() -> None:
    model = small(floor=0.05)
    model.set_budget(2, 0.5)
    assert model.budget() == Budget(2, 0.5)
    model.set_budget(2)
    assert model.budget() == scaled_budget(model, 2) == Budget(2, 0.05)
    model.set_budget()
    assert model.budget() == Budget(4, 0.05)
    assert small().budget() == Budget(4, None)
    with pytest.raises(ValueError, match=r"threshold is 1\.5; it must be a probability"):
        model.set_budget(2, 1.5)


def test_a_stored_floor_holds_at_every_number_of_windows_that_is_asked_for() -> None:
    model, default = small(view=32), Budget(4, 0.3)
    assert asked_budget(model, default, 2, None) == Budget(2, 0.3)
    assert asked_budget(model, default, None, 0.1) == Budget(4, 0.1)
    assert asked_budget(model, default, 0, None) == Budget(0, None)
    with pytest.raises(ValueError, match="must be below 1"):
        asked_budget(model, default, 2, 1.0)
    with pytest.raises(ValueError, match="steps is 0; this model takes 1 to 4"):  # it would see nothing of an image
        asked_budget(small(), default, 0, None)


def test_a_stored_floor_holds_at_the_windows_that_a_latency_has_room_for() -> None:
    model, latency = small(view=32), {0: 1.0, 2: 2.0, 4: 4.0}
    assert within_latency(model, latency, 3.0, Budget(4, 0.3)) == Budget(2, 0.3)
    assert within_latency(model, latency, 1.0, Budget(4, 0.3)) == Budget(0, None)
    assert within_latency(model, latency, 3.0, Budget(4, None)) == Budget(2, None)


def test_what_is_stored_beyond_the_trained_number_may_be_asked_for() -> None:
    model, stored = small(view=32), Budget(9, 0.3)
    assert asked_budget(model, stored, None, None) == asked_budget(model, stored, 9, None) == stored
    assert asked_budget(model, stored, 6, None) == Budget(6, 0.3)
    with pytest.raises(ValueError, match="steps is 10; this model takes 0 to 9"):
        asked_budget(model, stored, 10, None)
    with pytest.warns(UserWarning, match="steps is 9"):
        apply_budget(model, stored)
    assert [budget and budget.steps for budget in measured_budgets(model)] == [0, 1, 2, 4, 8, 9]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [stop["steps"] for stop in stops_of(Path("none"), model)] == list(range(10))


def test_a_run_keeps_the_floor_that_a_mean_length_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adatape.evaluate.budget.FEWEST", 1)
    monkeypatch.setattr("adatape.evaluate.budget.MOST", 1)
    windows: dict[str, Any] = {"bank": "windows", "window": 16, "cell": 8, "scan_scale": 1, "steps": 3, "view": 32}
    shape: dict[str, Any] = {"embed_dim": 32, "depth": 1, "num_heads": 1, "img_size": 32, "patch_size": 16}
    model = ImageModel("vit_tiny_patch16_224", shape, wrap=windows)
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 8)):
        np.save(tmp_path / f"{part}_images.npy", rng.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8))
        np.save(tmp_path / f"{part}_labels.npy", np.arange(count) % 2)
    experiment = Experiment("images", Images("arrays", str(tmp_path), 96), model, Optimizer())
    prepare(tmp_path / "run", experiment, "cpu")
    torch.manual_seed(0)
    write_weights(tmp_path / "run" / WEIGHTS, build_for(experiment).state_dict(), identity(experiment).to_json())
    stored = store_budget(tmp_path / "run", Target("length", 1.5), "cpu")
    assert stored.chosen["length_mean"] <= 1.5
    assert load_run(tmp_path / "run")[1].budget() == stored.budget
    at_floor = budgets_table(write_budgets(tmp_path / "run", [1, 3], "cpu"))
    assert [row[0].strip() for row in at_floor.rows] == ["1", "3"]  # not as trained, which has no floor
    assert any("floor stored in the run" in note for note in at_floor.notes)
    reset_budget(tmp_path / "run")
    assert budgets_table(write_budgets(tmp_path / "run", [3], "cpu")).rows[0][0] == "3 trained"
