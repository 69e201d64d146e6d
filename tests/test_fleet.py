"""Fleets: each run learns the same as alone, from shared batches or its own."""

from __future__ import annotations

import json
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from fleet import Fleet, _room_for, fleets, main, run_together
from safetensors.torch import load_file
from small_runs import tiny

from adatape.config import to_dict
from adatape.recipes import parity_small
from adatape.train.folder import WEIGHTS
from adatape.train.logger import METRICS, read_metrics
from adatape.train.run import RunLogger, run
from adatape.train.stop import Stopped
from adatape.train.sweep import with_fields
from adatape.train.trainer import Stats

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


def test_runs_of_other_seeds_and_lengths_train_beside_each_other(tmp_path: Path) -> None:
    whole = {"stop_at": None, "optimizer.steps": 3, "optimizer.batch": 8, "data.held_out": 20}
    experiments = [
        with_fields(parity_small(length=length, system=system, seed=seed), whole)
        for length, system, seed in ((8, "adatape", 0), (8, "transformer", 0), (12, "adatape", 1))
    ]
    assert fleets(experiments, 4) == [[0, 1, 2]]
    assert len(Fleet(experiments, "cpu").sources) == 2
    run_together(experiments, [tmp_path / str(n) for n in range(3)], "cpu")
    for n, experiment in enumerate(experiments):
        run(experiment, tmp_path / f"{n}-alone", "cpu", lambda _: None)
        mine, theirs = (load_file(tmp_path / at / WEIGHTS) for at in (str(n), f"{n}-alone"))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_rates_may_differ_and_the_number_of_steps_may_not() -> None:
    first = tiny("plainvit")
    fleet = Fleet([first, with_fields(first, {"optimizer.lr": 0.1})], "cpu")
    next(fleet.train())
    rates = [float(trainer.stepper.rate) for trainer in fleet.trainers]
    assert rates[1] > 10 * rates[0]
    for field, value in (("optimizer.steps", 5), ("engine.deterministic", False)):
        with pytest.raises(ValueError, match=f"{field} is .*, as in the first run"):
            Fleet([first, with_fields(first, {field: value})], "cpu")
    with pytest.raises(ValueError, match=r"stop_at is 0\.5"):
        Fleet([with_fields(first, {"stop_at": 0.5})], "cpu")


def test_what_shares_batches_is_grouped_in_order() -> None:
    experiments = [tiny(system, seed=seed) for system in SYSTEMS for seed in (0, 1)]
    assert fleets(experiments, 2) == [[0, 2], [4, 1], [3, 5]]
    assert fleets(experiments, 8) == [[0, 2, 4, 1, 3, 5]]
    assert fleets([experiments[0], tiny(steps=5), experiments[1]], 8) == [[0, 2], [1]]


def test_runs_that_a_kill_left_at_different_steps_go_on_in_groups(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(4)]
    for folder, step in zip(folders, (100, 200, 100), strict=False):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()
    assert fleets([tiny("plainvit")] * 4, 8, folders) == [[0, 2], [1], [3]]


def test_images_are_held_once() -> None:
    fleet = Fleet([tiny("plainvit"), tiny("vit")], "cpu")
    assert fleet.trainers[0].task.batches == fleet.trainers[1].task.batches


def test_everyone_begins_with_its_pretrained_weights(tmp_path: Path) -> None:
    first = tiny("plainvit", steps=1)
    run(first, tmp_path / "pretrained", "cpu", lambda _: None)
    again = with_fields(first, {"model.pretrained": str(tmp_path / "pretrained" / WEIGHTS)})
    mine, theirs = (trainer.model.state_dict() for trainer in Fleet([again, again], "cpu").trainers)
    trained = load_file(tmp_path / "pretrained" / WEIGHTS)
    body = [name for name in trained if not name.startswith("vit.head")]  # a head for other classes begins anew
    assert all(torch.equal(mine[name], theirs[name]) and torch.equal(mine[name], trained[name]) for name in body)


def test_one_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after = RunLogger.on_step

    def fails(self: RunLogger, stats: Stats) -> None:
        if self.out.name == "plainvit" and self.trainer.step == 2:
            raise ValueError("loss was not finite")
        after(self, stats)

    monkeypatch.setattr(RunLogger, "on_step", fails)
    experiments = [tiny(system, steps=4) for system in ("adatape", "plainvit")]
    good, bad = run_together(experiments, [tmp_path / "adatape", tmp_path / "plainvit"], "cpu")
    assert good["steps"] == 4
    assert good["together"] == 2
    assert bad == {"error": "loss was not finite"}
    assert not (tmp_path / "plainvit" / "result.json").exists()


@pytest.mark.parametrize(("at", "stops"), [(2, True), (3, False)])
def test_a_signal_saves_all_unless_all_is_done_and_they_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, stops: bool
) -> None:
    after = RunLogger.on_step

    def signalled(self: RunLogger, stats: Stats) -> None:
        after(self, stats)
        if self.trainer.step == at:
            signal.raise_signal(signal.SIGTERM)

    experiments = [tiny(system, steps=3, engine__checkpoint_every=100) for system in ("parity adatape", "parity ut")]
    folders, alone = ([tmp_path / f"{n}{how}" for n in range(2)] for how in ("", "-undisturbed"))
    run_together(experiments, alone, "cpu")
    monkeypatch.setattr(RunLogger, "on_step", signalled)
    with pytest.raises(Stopped, match="stopped at step 2 and saved") if stops else nullcontext():
        assert len(run_together(experiments, folders, "cpu")) == 2
    monkeypatch.setattr(RunLogger, "on_step", after)
    run_together(experiments, folders, "cpu", resume=True)
    for mine, theirs in zip(folders, alone, strict=True):
        weights, undisturbed = (load_file(at / WEIGHTS) for at in (mine, theirs))
        assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
        lines = [read_metrics(at / METRICS).lines for at in (mine, theirs)]
        assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]


def test_runs_that_stand_at_different_steps_do_not_go_on_together() -> None:
    fleet = Fleet([tiny("plainvit"), tiny("vit")], "cpu")
    fleet.trainers[1].step = 2
    with pytest.raises(ValueError, match=r"stand at steps \[0, 2\]"):
        next(fleet.train())


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2"):
        Fleet([tiny("plainvit")], "cpu")


def test_dynamo_has_room_for_all_of_a_fleet() -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=8):
        with _room_for([tiny("plainvit", engine__compile=True)] * 12):
            assert config.recompile_limit >= 24
        with _room_for([tiny("plainvit")] * 12):
            assert config.recompile_limit == 8


def test_a_sweep_trains_every_combination_side_by_side(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(tiny("plainvit", steps=2))))
    given = ["--over", "seed=0,1", "--over", "optimizer.lr=0.1,0.01", "--together", "2", "--device", "cpu"]
    main([str(config), *given, "--out", str(tmp_path / "runs")])
    rows = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    assert [(row["seed"], row["optimizer.lr"]) for row in rows] == [(0, 0.1), (0, 0.01), (1, 0.1), (1, 0.01)]
    assert all(row["steps"] == 2 for row in rows)
