"""Options of older config.json files: removed ones are ignored at their neutral value, renamed ones are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LAST_WITH_ALL = "version 0.1.0 at commit 1421723"
PLACES = ("reading", "options", "wrap")  # of the model
# Removed options, each with the value at which it had no effect.
NEUTRAL: dict[str, Any] = {
    "doubts": False,
    "haste": 1.0,
    "least": 0,
    "uncut": 0.0,
    "floor": 0.5,
    "echo": False,
    "leave": None,
    "still": None,
}
OF_WINDOWS = ("floor",)  # what models that read windows have under the name of a removed option
READERS = ("selective",)
RENAMED = {"hide": "bank_dropout", "noise": "query_noise"}  # former name to present name
# Options of recipes whose former name means something else now: the recipe, the name, and what to type in its place.
RENAMED_OPTIONS = {
    (recipe, "--steps"): "--tape-steps for tape tokens, or --epochs for the length of training"
    for recipe in ("cifar10", "cifar100")
}


def without_dropped(text: str | bytes, prefix: str = "") -> str | bytes:
    """The JSON of an experiment without removed options and with present names; invalid JSON is returned unchanged."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict):
        return text
    _check_reader(model, f"{prefix}model.reader")
    found = [_without(model, place, f"{prefix}model.{place}") for place in PLACES]
    return json.dumps(values) if any(found) else text


def is_dropped(name: str, fields: Mapping[str, Any]) -> bool:
    """Whether a dotted name among an experiment's fields is a removed option at its neutral value."""
    place, _, option = name.rpartition(".")
    removed = _removed(fields.get(f"{place}.bank"))
    return place in [f"model.{each}" for each in PLACES] and option in removed and removed[option] == fields[name]


def refuse_renamed(names: Iterable[str], where: str = "") -> None:
    """Raises for a former name that is typed, not read from a file, with its present name."""
    for name in names:
        if name in RENAMED:
            raise ValueError(f"{where}{name} is now called {where}{RENAMED[name]}")


def refuse_renamed_options(given: Sequence[str]) -> None:
    """Raises for an option of a recipe, as typed, whose name means something else now."""
    for (recipe, option), now in RENAMED_OPTIONS.items():
        if recipe in given[1:2] and any(word.partition("=")[0] == option for word in given):
            raise ValueError(f"{option} of {recipe} had two meanings; type {now}")


def _without(model: dict[str, Any], place: str, where: str) -> bool:
    options = model.get(place)
    if not isinstance(options, dict):
        return False
    _check_reader(options, f"{where}.reader")
    removed = _removed(options.get("bank"))
    dropped = [name for name in removed if name in options]
    for name in dropped:
        value = options.pop(name)
        if value != removed[name]:
            raise ValueError(f"{where}.{name} is {value!r}; {name} was removed, use {LAST_WITH_ALL}")
    renamed = [name for name in RENAMED if name in options]
    for name in renamed:
        if RENAMED[name] in options:
            raise ValueError(f"{where}.{name} and {where}.{RENAMED[name]} are one option; leave out {name}")
        options[RENAMED[name]] = options.pop(name)
    return bool(dropped or renamed)


def _removed(bank: Any) -> dict[str, Any]:
    return {name: value for name, value in NEUTRAL.items() if bank != "windows" or name not in OF_WINDOWS}


def _check_reader(options: dict[str, Any], where: str) -> None:
    if options.get("reader") in READERS:
        raise ValueError(f"{where} is {options['reader']!r}; this reader was removed, use {LAST_WITH_ALL}")
