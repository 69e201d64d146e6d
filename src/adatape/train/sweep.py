"""Builds experiments from text: combinations of field values, or single settings."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Any

from adatape.config import Experiment, from_dict, to_dict
from adatape.dropped import refuse_renamed
from adatape.train.identity import leaves
from adatape.validation import value_of

SHORT = {"reader": "model.reading"}  # abbreviations of field names


def combinations(experiment: Experiment, over: list[str]) -> list[tuple[dict[str, Any], Experiment]]:
    """The Cartesian product of each `field=value,value` of `over`: the fields set, and the experiment with them."""
    axes = [_axis(text) for text in over]
    names = [name for name, _ in axes]
    grid = []
    for values in itertools.product(*(values for _, values in axes)):
        chosen = dict(zip(names, values, strict=True))
        grid.append((chosen, with_fields(experiment, chosen)))
    return grid


def with_fields(experiment: Experiment, fields: dict[str, Any]) -> Experiment:
    """The experiment with dotted fields, such as `optimizer.lr`, set to other values."""
    values = to_dict(experiment)
    for name, value in fields.items():
        first, _, rest = name.partition(".")
        *path, last = f"{SHORT.get(first, first)}.{rest}".rstrip(".").split(".")
        refuse_renamed([last], "".join(f"{step}." for step in path))
        place = values
        for step in path:
            place = place.get(step) if isinstance(place, dict) else None  # type: ignore[assignment]
        if not isinstance(place, dict) or (last not in place and path[-1:] not in (["options"], ["wrap"])):
            known = [path for path, _ in leaves(values)]
            near = "".join(f"; perhaps {each} was meant" for each in difflib.get_close_matches(name, known, 1))
            raise ValueError(f"{name} is not a field of this experiment{near}; it has {', '.join(known)}")
        place[last] = value
    return from_dict(Experiment, values)


def with_settings(experiment: Experiment, settings: Sequence[str]) -> Experiment:
    """The experiment with each `field=value` of the settings."""
    pairs = [text.partition("=") for text in settings]
    for text, (name, _, value) in zip(settings, pairs, strict=True):
        if not (name and value):
            raise ValueError(f"set is {text!r}; it must be field=value")
    return with_fields(experiment, {name: value_of(value) for name, _, value in pairs})


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise ValueError(f"over is {text!r}; it must be field=value,value")
    return name, [value_of(value) for value in values.split(",")]
