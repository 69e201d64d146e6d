"""Checkpoints and weights of another experiment are refused, and damage to weights is detected."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small_runs import LONG, Unplugged, contents, no_watch, tiny, unplug_at, weights_of, write_folder

from adatape.cli import main
from adatape.config import Budget, Engine, Experiment, from_dict
from adatape.serve.served import PACKAGED, load_served
from adatape.train import checkpoint, identity, weights
from adatape.train.checkpoint import save
from adatape.train.folder import WEIGHTS, load_config, load_run, load_weights, with_budget
from adatape.train.run import run
from adatape.train.trainer import Trainer
from adatape.train.weights import read_weights, write_weights

STEPS = 4
NAMING_1 = json.loads(Path(__file__).with_name("naming_1.json").read_text())


@pytest.mark.parametrize("name", NAMING_1)
def test_a_config_of_naming_1_keeps_its_hash(name: str) -> None:
    """If a change of config.py fails here, see `train/identity.py`; do not change the JSON file."""
    assert identity.identity(from_dict(Experiment, NAMING_1[name]["config"])).sha256 == NAMING_1[name]["sha256"]


def test_engine_and_budget_are_no_part_of_an_experiment() -> None:
    plain = tiny("adatape")
    other = dataclasses.replace(with_budget(plain, Budget(2, 0.5)), engine=Engine(shard=True, precision="bf16"))
    assert identity.identity(other) == identity.identity(plain)
    assert identity.identity(tiny("adatape", seed=1)).sha256 != identity.identity(plain).sha256


def test_whole_numbers_are_alike_whether_they_came_from_json_or_not() -> None:
    whole, same = (tiny("adatape", optimizer__weight_decay=value) for value in (1.0, 1.0))
    object.__setattr__(same.optimizer, "weight_decay", 1)
    assert identity.identity(whole).sha256 == identity.identity(same).sha256


def test_a_field_that_is_renamed_or_added_keeps_every_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, plain = identity.identity(tiny("adatape")), identity.to_dict
    stored = before.to_json()

    def later(experiment: Any) -> dict[str, Any]:
        values = plain(experiment)
        optimizer = values.pop("optimizer")
        return {**values, "training": {**optimizer, "rate": optimizer.pop("lr")}, "mood": "calm"}

    monkeypatch.setattr(identity, "to_dict", later)
    assert identity.identity(tiny("adatape")) != before
    monkeypatch.setattr(identity, "RENAMED", {"training": "optimizer", "training.rate": "optimizer.lr"})
    added = {name.replace("optimizer", "training"): value for name, value in identity.ADDED.items()}
    monkeypatch.setattr(identity, "ADDED", {**identity.ADDED, **added, "mood": "calm"})
    assert identity.identity(tiny("adatape")) == before
    identity.check_identity(tmp_path, stored, tiny("adatape"))
    with pytest.raises(ValueError, match=r"optimizer.lr is 0.003 there and 0.5 here"):
        identity.check_identity(tmp_path, stored, tiny("adatape", optimizer__lr=0.5))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (None, "has an unreadable experiment identity"),
        ({"naming": 1}, "has an unreadable experiment identity"),
        ({"naming": 1, "fields": {"seed": 0}, "sha256": "0"}, "does not match its SHA-256"),
        ({"naming": 2, "fields": {}, "sha256": "0"}, "of naming 2; this version reads naming 1"),
    ],
)
def test_an_identity_of_anything_else_is_one_line(stored: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        identity.check_identity(Path("step-00000001"), stored, tiny("adatape"))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    run(tiny("adatape", steps=STEPS), out, "cpu", lambda _: None)
    return out


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def unfinished(copied: Path) -> Path:
    """A run as if killed before its last step was saved."""
    for path in ("result.json", WEIGHTS):
        (copied / path).unlink()
    shutil.rmtree(copied / "checkpoints" / f"step-{STEPS:08d}")
    return copied


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--device", "cpu"] if arguments[0] != "release" else arguments)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def of_seed(seed: int, out: Path, step: int) -> Path:
    return Trainer(tiny("adatape", steps=STEPS, seed=seed)).save(out, {}).rename(out / f"step-{step:08d}")


def test_a_checkpoint_of_another_seed_is_refused(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(of_seed(7, tmp_path / "other", 9), unfinished / "checkpoints" / "step-00000009")
    before = contents(unfinished)
    said = refusal(["train", str(unfinished)], capsys)
    assert "step-00000009 was made by another experiment than that of config.json: seed is 7 there and 0 here" in said
    assert contents(unfinished) == before


def test_an_edited_config_is_refused_before_a_resume(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(unfinished, lambda config: config["optimizer"].update(lr=0.5, batch=8))
    before = contents(unfinished)
    said = refusal(["train", str(unfinished)], capsys)
    assert "step-00000003 was made by another experiment than that of config.json: " in said
    assert "optimizer.batch is 16 there and 8 here; optimizer.lr is 0.003 there and 0.5 here" in said
    assert contents(unfinished) == before


def test_an_edited_engine_goes_on(unfinished: Path, finished: Path) -> None:
    edit(unfinished, lambda config: config["engine"].update(workers=1, log_every=2))
    main(["train", str(unfinished), "--device", "cpu"])
    ours, theirs = weights_of(unfinished), weights_of(finished)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_checkpoint_without_identity_goes_on_with_a_line_that_says_so(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = (unfinished / "checkpoints").iterdir()
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["experiment"]
    (path / "manifest.json").write_text(checkpoint._rendered(manifest))
    main(["train", str(unfinished), "--device", "cpu"])
    assert f"{path.name} does not store its experiment" in capsys.readouterr().out


def test_a_step_that_another_experiment_saved_is_written_again(tmp_path: Path) -> None:
    mine, other = tiny("adatape"), tiny("adatape", seed=1)
    path = save(tmp_path, 1, {"w": torch.zeros(2)}, {}, other)
    save(tmp_path, 1, {"w": torch.ones(2)}, {}, mine)
    checkpoint.load(path, state := {"w": torch.empty(2)}, mine)
    assert state["w"].tolist() == [1, 1]


def test_a_finished_run_whose_config_was_edited_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copied, lambda config: config.update(seed=3))
    for command in (["train", str(copied)], ["eval", str(copied)], ["release", str(copied), "--to", f"{copied}-to"]):
        said = refusal(command, capsys)
        assert (
            "model.safetensors was made by another experiment than that of config.json: seed is 0 there and 3 here"
            in said
        )


def test_the_data_of_a_finished_run_may_lie_elsewhere_and_its_budget_may_change(copied: Path) -> None:
    edit(copied, lambda config: config["data"].update(path="elsewhere"))
    edit(copied, lambda config: config["model"].update(budget={"steps": 1, "threshold": 0.5}))
    assert load_run(copied)[1].reader.steps == 1


def rename(images: Path, name: str, to: str) -> None:
    for split in ("train", "val"):
        (images / split / name).rename(images / split / to)


def of_two_classes(images: Path) -> Experiment:
    write_folder(images, 4)
    return tiny(steps=STEPS, data__source="folder", data__path=str(images), data__size=8, optimizer__batch=2)


def test_classes_are_those_of_training_or_refused_and_named_without_the_data(tmp_path: Path) -> None:
    images, out = tmp_path / "images", tmp_path / "run"
    run(of_two_classes(images), out, "cpu", no_watch)
    rename(images, "odd", "a third of all")  # stands before "even", and takes its number
    for load in (load_run, load_served):
        with pytest.raises(ValueError, match=r"number 0, of 2 there and 2 here, is 'even' there and 'a third of all'"):
            load(out)
    (images / "train").rename(tmp_path / "gone")
    assert load_served(out).classes == ["even", "odd"]


def test_a_run_does_not_go_on_with_classes_of_other_names(tmp_path: Path) -> None:
    experiment, out = of_two_classes(tmp_path / "images"), tmp_path / "run"
    with pytest.raises(Unplugged):
        run(experiment, out, "cpu", unplug_at(STEPS))
    rename(tmp_path / "images", "odd", "a third of all")
    with pytest.raises(ValueError, match=r"step-00000003 was trained with other classes than the data has: number 0"):
        run(experiment, out, "cpu", no_watch, resume=True)


def test_any_flipped_bit_in_the_weights_is_refused(copied: Path) -> None:
    path = copied / WEIGHTS
    data, draw = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    experiment = load_config(copied / "config.json")
    model = Trainer(experiment).model
    places = [*range(0, header, 1 if LONG else 11), *(draw.randrange(header, len(data)) for _ in range(30))]
    for place in places:
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"model\.safetensors") as caught:
            load_weights(model, path, experiment)
        assert "\n" not in str(caught.value), place


@pytest.mark.parametrize("verb", ["eval", "release", "fewshot", "figures", "export", "budget"])
def test_a_flipped_byte_is_one_line_in_every_verb(
    verb: str, copied: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = bytearray((copied / WEIGHTS).read_bytes())
    data[-100] ^= 1
    (copied / WEIGHTS).write_bytes(data)
    more = {"release": ["--to", str(tmp_path / "to")], "fewshot": ["--on", "digits"], "budget": ["--gflops", "1"]}
    with pytest.raises(SystemExit) as stop:
        main([verb, str(copied), *more.get(verb, [])])
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "model.safetensors is damaged: its weights have SHA-256" in line
    with pytest.raises(ValueError, match="is damaged"):
        load_served(copied)


@pytest.mark.parametrize("stamped", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, stamped: bool, copied: Path) -> None:
    bad = weights_of(copied)
    bad["vit.norm.bias"][3] = value
    if stamped:
        write_weights(copied / WEIGHTS, bad)
    else:
        save_file(bad, copied / WEIGHTS)
    for load in (load_run, load_served):
        with pytest.raises(ValueError, match=r"non-finite weights: 1 of 32 values in vit\.norm\.bias$"):
            load(copied)


def test_weights_without_a_hash_load_with_one_line_that_says_so(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(weights_of(copied), copied / WEIGHTS)
    with caplog.at_level(logging.WARNING, "adatape"):
        load_run(copied)
        load_run(copied)
    [said] = caplog.messages
    assert said.endswith("model.safetensors has no SHA-256 of its weights, so damage cannot be detected")


def test_weights_of_others_need_no_hash_and_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt", "author": "someone"})
    assert read_weights(tmp_path / "x.safetensors")["a"].tolist() == [1, 1]
    assert not caplog.messages


def test_a_files_bytes_depend_on_weights_and_experiment_alone(copied: Path, finished: Path) -> None:
    before = (finished / WEIGHTS).read_bytes()
    made_by = identity.identity(load_config(copied / "config.json")).to_json()
    write_weights(copied / WEIGHTS, dict(reversed(weights_of(copied).items())), made_by)
    assert (copied / WEIGHTS).read_bytes() == before


def test_a_release_carries_the_hash_of_its_experiment_and_none_of_its_paths(copied: Path, tmp_path: Path) -> None:
    main(["release", str(copied), "--to", str(tmp_path / "to")])
    with safe_open(tmp_path / "to" / "model.safetensors", "pt") as file:
        said = file.metadata()
    assert said["format"] == "pt"
    of_run = identity.identity(load_config(copied / "config.json"))
    assert json.loads(said[weights.STAMP])["experiment"] == {"naming": 1, "sha256": of_run.sha256}
    data = bytearray((tmp_path / "to" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "to" / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        read_weights(tmp_path / "to" / "model.safetensors")


@pytest.mark.parametrize("folder", PACKAGED.values(), ids=list(PACKAGED))
def test_a_model_that_ships_carries_its_hash(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    load_served(folder)
    assert not caplog.messages
    stamped = weights.read_stamp(folder / WEIGHTS)
    assert stamped is not None
    assert stamped["experiment"] == identity.identity(load_config(folder / "config.json")).to_json()
