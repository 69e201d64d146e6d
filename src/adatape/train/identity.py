"""The identity of an experiment, stored in checkpoints and weights: the fields that affect training, and their SHA-256.

Field names are those of `naming` 1: the experiment's fields joined by dots, without `engine` and `model.budget`, which
may change. `tests/naming_1.json` has two configs with their hashes, so that a change of `config.py` cannot invalidate
older files by accident:

- a renamed field needs a line in `RENAMED`, from its new name to its old one (options of the reader: in
  `adatape.dropped`, which also reads files with the old name);
- an added field needs a line in `ADDED`, with the value that its absence means;
- a changed default needs nothing, since every value is stored;
- a removed field needs a line in `REMOVED`, with the value at which it had no effect (`adatape.dropped` refuses files
  with another value);
- a field whose meaning changes needs a new naming, and a function that reads the old one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from adatape import dropped
from adatape.config import Experiment, to_dict
from adatape.dropped import PLACES, is_dropped
from adatape.validation import first_few

NAMING = 1
# Fields or records: current name -> name in the naming.
RENAMED = {f"model.{place}.{new}": f"model.{place}.{old}" for place in PLACES for old, new in dropped.RENAMED.items()}
# Fields added after the naming, with the value that their absence means.
ADDED: dict[str, Any] = {"data.exif_orientation": False, "optimizer.new_lr": None, "model.scaling": "half"}
# Removed fields, with the value that a record without them means.
REMOVED: dict[str, Any] = {"model.reading.least": 0, "model.reading.uncut": 0, "model.reading.floor": 0.5}
MAY_CHANGE = ("engine.", "model.budget.")


class Identity(NamedTuple):
    """The fields of an experiment that affect training, by their names in a naming."""

    fields: dict[str, Any]
    naming: int = NAMING

    @property
    def sha256(self) -> str:
        text = json.dumps({"fields": self.fields, "naming": self.naming}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"naming": self.naming, "sha256": self.sha256, "fields": self.fields}


def identity(experiment: Experiment) -> Identity:
    fields = leaves(to_dict(experiment))
    named = {_canonical_name(name): value for name, value in fields if not f"{name}.".startswith(MAY_CHANGE)}
    records = {name.rpartition(".")[0] for name in named}
    named |= {name: value for name, value in REMOVED.items() if name.rpartition(".")[0] in records}
    missing = object()
    return Identity({name: value for name, value in named.items() if ADDED.get(name, missing) != value})


def check_identity(path: Path, stored: Any, wanted: Experiment, free: Iterable[str] = ()) -> None:
    """Refuses a file whose stored identity differs from `wanted` in a field that is not in `free`."""
    theirs, ours = (
        {name: value for name, value in each.fields.items() if not is_dropped(name, each.fields)}
        for each in (_read(path, stored), identity(wanted))
    )
    names = sorted({*theirs, *ours} - set(free))
    differ = [name for name in names if theirs.get(name, ADDED.get(name)) != ours.get(name, ADDED.get(name))]
    if differ:
        said = first_few([f"{name} is {_shown(theirs, name)} there and {_shown(ours, name)} here" for name in differ])
        raise ValueError(f"{path} was made by another experiment than that of config.json: {said}")


def told_classes(names: list[str]) -> list[str] | None:
    """What files store of the classes; None where their names are numbers, as of data that names none."""
    return None if names == [str(number) for number in range(len(names))] else names


def check_classes(path: Path, stored: Any, names: list[str]) -> None:
    """Refuses data whose classes are other ones, or in another order, than those that a file was trained with: a model
    answers by number, and a class folder that is renamed may change them all."""
    here = told_classes(names)
    if stored is None or here is None or stored == here:
        return
    number, (then, now) = next(found for found in enumerate(zip_longest(stored, here)) if found[1][0] != found[1][1])
    counts = f"of {len(stored)} there and {len(here)} here"
    said = f"number {number}, {counts}, is {_quoted(then)} there and {_quoted(now)} here"
    raise ValueError(f"{path} was trained with other classes than the data has: {said}; restore their names")


def _quoted(name: str | None) -> str:
    return "absent" if name is None else repr(name)


def _read(path: Path, stored: Any) -> Identity:
    try:
        naming, fields, digest = stored["naming"], stored["fields"], stored["sha256"]
        found = Identity({**fields}, naming + 0)
        whole = found.sha256 == digest
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has an unreadable experiment identity: {error!r}") from error
    if naming != NAMING:
        raise ValueError(f"{path} has an experiment identity of naming {naming}; this version reads naming {NAMING}")
    if not whole:
        raise ValueError(f"{path} has an experiment identity that does not match its SHA-256; the file is damaged")
    return found


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by their dotted names."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(value)


def _plain(value: Any) -> Any:
    """The value as JSON would return it, with integral floats as int."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _canonical_name(name: str) -> str:
    known = [new for new in RENAMED if name == new or name.startswith(f"{new}.")]
    longest = max(known, key=len, default="")
    return RENAMED[longest] + name[len(longest) :] if known else name


def _shown(fields: dict[str, Any], name: str) -> str:
    return json.dumps(fields[name]) if name in fields else "absent"
