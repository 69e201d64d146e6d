"""Options that were removed: files that did not use them are read, others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import tiny

from adatape.config import Experiment, from_dict, to_dict
from adatape.dropped import NEUTRAL
from adatape.train.identity import Identity, check_identity, identity
from adatape.validation import read_record


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
