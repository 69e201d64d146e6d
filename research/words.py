"""A run described by text, as in `adatape patch=8 epochs=24 optimizer.warmup=500`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from adatape.config import Experiment
from adatape.train.sweep import with_fields
from adatape.validation import value_of


class ParsedRun(NamedTuple):
    """A run described by text: a system, then arguments of a recipe and fields of its experiment as name=value."""

    system: str
    keywords: dict[str, Any]
    fields: dict[str, Any]


def parse_run(recipe: Callable[..., Experiment], text: str) -> ParsedRun:
    """Parses the text; names in the recipe's signature are its arguments, others are fields."""
    system, *words = text.split()
    values = {name: value_of(value) for name, _, value in (word.partition("=") for word in words)}
    taken = inspect.signature(recipe).parameters
    keywords = {name: value for name, value in values.items() if name in taken}
    return ParsedRun(system, keywords, {name: value for name, value in values.items() if name not in taken})


def experiment_of(recipe: Callable[..., Experiment], text: str, **given: Any) -> Experiment:
    system, keywords, fields = parse_run(recipe, text)
    return with_fields(recipe(system=system, **given, **keywords), fields)
