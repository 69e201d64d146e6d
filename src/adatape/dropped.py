"""Options of older config.json files that were removed: ignored at their neutral value, refused otherwise."""

from __future__ import annotations

import json
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
READERS = ("selective",)


def without_dropped(text: str | bytes, prefix: str = "") -> str | bytes:
    """The JSON of an experiment without removed options; invalid JSON is returned unchanged."""
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


def is_dropped(name: str, value: Any) -> bool:
    """Whether a dotted field name is a removed option at its neutral value."""
    *place, option = name.split(".")
    return place in [["model", each] for each in PLACES] and option in NEUTRAL and NEUTRAL[option] == value


def _without(model: dict[str, Any], place: str, where: str) -> bool:
    options = model.get(place)
    if not isinstance(options, dict):
        return False
    _check_reader(options, f"{where}.reader")
    dropped = [name for name in NEUTRAL if name in options]
    for name in dropped:
        value = options.pop(name)
        if value != NEUTRAL[name]:
            raise ValueError(f"{where}.{name} is {value!r}; {name} was removed, use {LAST_WITH_ALL}")
    return bool(dropped)


def _check_reader(options: dict[str, Any], where: str) -> None:
    if options.get("reader") in READERS:
        raise ValueError(f"{where} is {options['reader']!r}; this reader was removed, use {LAST_WITH_ALL}")
