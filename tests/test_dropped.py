"""Options that were removed or renamed: old files are read where nothing is lost, others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
from small_runs import tiny

import adatape.models  # noqa: F401  registers the models
from adatape.config import Experiment, from_dict, to_dict
from adatape.dropped import NEUTRAL, RENAMED
from adatape.train.identity import Identity, check_identity, identity
from adatape.train.sweep import with_settings
from adatape.validation import read_record

FORMER = {  # of experiments with hide and noise, computed before these options were renamed
    "reading": "aff089072898f0db856600f324cd8a37e83844b37ce1028dcc3054d8985a283d",
    "options": "6c3fbaa9b2f822f3ce77a279b55d9d5a813c6d10feaa57ff4645e5217a6a4f41",
}


def stored(place: str, **options: Any) -> tuple[Experiment, dict[str, Any]]:
    """An experiment, and its file with further options of a place."""
    experiment = tiny("parity adatape" if place == "reading" else "adatape")
    values = json.loads(json.dumps(to_dict(experiment)))
    values["model"][place] = {**(values["model"][place] or {}), **options}
    return experiment, values


@pytest.mark.parametrize("place", ["reading", "options"])
def test_a_file_that_did_not_use_them_is_read_as_if_it_had_not_named_them(place: str, tmp_path: Path) -> None:
    experiment, values = stored(place, **NEUTRAL)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert read_record(Experiment, path) == experiment
    assert from_dict(Experiment, values) == experiment


@pytest.mark.parametrize(
    ("name", "value"),
    [("doubts", True), ("haste", 2.0), ("least", 1), ("uncut", 0.1), ("floor", 0.3), ("echo", True), ("leave", 3),
     ("still", 0)],
)  # fmt: skip
def test_a_file_that_used_one_is_refused_by_its_name(name: str, value: Any) -> None:
    _, values = stored("options", **{name: value})
    said = rf"model\.options\.{name} is {value!r}; {name} was removed, use version 0\.1\.0 at commit 1421723"
    with pytest.raises(ValueError, match=said):
        from_dict(Experiment, values)


@pytest.mark.parametrize("place", ["options", "wrap"])
def test_a_reader_that_was_removed_is_named(place: str) -> None:
    _, values = stored(place, reader="selective")
    with pytest.raises(ValueError, match=rf"model\.{place}\.reader is 'selective'; this reader was removed"):
        from_dict(Experiment, values)


@pytest.mark.parametrize("floor", [0.3, 0.5])
def test_the_floor_of_a_model_of_windows_is_no_removed_option(floor: float, tmp_path: Path) -> None:
    """An older reader had one of this name, whose neutral value was 0.5."""
    _, values = stored("wrap", bank="windows", labels="one", floor=floor)
    read = from_dict(Experiment, values)
    assert read.model.wrap == {"bank": "windows", "labels": "one", "floor": floor}  # type: ignore[union-attr]
    other = with_settings(read, ["model.wrap.floor=0.1"])
    with pytest.raises(ValueError, match=rf"model\.wrap\.floor is {floor} there and 0\.1 here"):
        check_identity(tmp_path, identity(read).to_json(), other)
    del values["model"]["wrap"]["floor"]
    with pytest.raises(ValueError, match=rf"model\.wrap\.floor is {floor} there and absent here"):
        check_identity(tmp_path, identity(read).to_json(), from_dict(Experiment, values))


def test_weights_that_name_an_unused_option_are_still_this_experiments(tmp_path: Path) -> None:
    experiment = tiny("adatape")
    fields = {**identity(experiment).fields, "model.options.echo": False, "model.options.leave": None}
    check_identity(tmp_path, Identity(fields).to_json(), experiment)
    with pytest.raises(ValueError, match=r"model\.options\.echo is true there and absent here"):
        check_identity(tmp_path, Identity({**fields, "model.options.echo": True}).to_json(), experiment)


def test_what_is_no_experiment_is_refused_as_ever() -> None:
    for values in ([], {"model": 3}, {"model": {"reading": "floor"}}):
        with pytest.raises(ValueError, match="Experiment"):
            from_dict(Experiment, values)


@pytest.mark.parametrize("place", ["reading", "options"])
def test_a_file_with_an_option_by_its_former_name_is_read_and_keeps_its_hash(place: str) -> None:
    experiment, values = stored(place)
    given = values["model"][place]
    given.update(bank_dropout=0.125, query_noise=0.25)
    today = from_dict(Experiment, values)
    for before, now in RENAMED.items():
        given[before] = given.pop(now)
    assert from_dict(Experiment, values) == today != experiment
    fields = identity(today).fields
    assert (fields[f"model.{place}.hide"], fields[f"model.{place}.noise"]) == (0.125, 0.25)
    assert not [name for name in fields if name.endswith(("bank_dropout", "query_noise"))]


def test_the_hash_of_an_experiment_that_used_renamed_options_stays() -> None:
    for place, sha256 in FORMER.items():
        _, values = stored(place)
        values["model"][place].update(hide=0.125, noise=0.25)
        for now in RENAMED.values():
            values["model"][place].pop(now, None)
        assert identity(from_dict(Experiment, values)).sha256 == sha256


def test_an_option_by_both_its_names_is_refused() -> None:
    _, values = stored("options", hide=0.1, bank_dropout=0.2)
    with pytest.raises(ValueError, match=r"model\.options\.hide and model\.options\.bank_dropout are one option"):
        from_dict(Experiment, values)


@pytest.mark.parametrize(
    ("family", "name", "now"),
    [
        ("parity adatape", "model.reading.hide", "model.reading.bank_dropout"),
        ("parity adatape", "reader.noise", "model.reading.query_noise"),
        ("adatape", "model.options.hide", "model.options.bank_dropout"),
    ],
)
def test_whoever_types_a_former_name_is_told_todays(family: str, name: str, now: str) -> None:
    with pytest.raises(ValueError, match=rf"is now called {now}$"):
        with_settings(tiny(family), [f"{name}=0.1"])


def test_a_model_refuses_a_former_name_by_todays() -> None:
    with pytest.raises(ValueError, match="noise is now called query_noise"):
        timm.create_model("adatape_tiny_patch16_224", noise=0.1)
