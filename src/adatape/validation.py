"""Checks values from files, the command line and Python callers against the limits declared in type hints.

pydantic is imported inside functions, so that `adatape --help` does not import it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from annotated_types import BaseMetadata

from adatape.config import Experiment
from adatape.dropped import without_dropped
from adatape.limits import is_folder_name

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
Problem = dict[str, Any]  # one of pydantic's errors: type, loc, input, ctx

LARGEST_FILE = 16_000_000  # bytes of a config.json or result.json
NAMED = 3  # problems that an error message names
SHOWN, REASON = 60, 200  # maximum characters of a value, and of a library's reason, in an error message
KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "string_unicode": "text",
    "bool_type": "true or false",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "tuple_type": "a list",
    "none_required": "null",
    "predicate_failed": is_folder_name.__doc__,  # the only predicate in use
}
LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
FIRST = ("unexpected_keyword_argument", "missing")  # reported first: a wrong name often causes the other errors


def read_record(kind: type[T], path: Path) -> T:
    """Reads a record from a JSON file; errors are one line that names the file, the field and its limit."""
    record: T = _parsed(kind, file_bytes(path), f"{path}: ", path)
    return record


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file."""
    try:
        found = json.loads(file_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} contains {_shown(found)}; it must be a JSON object")
    return found


def file_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; it must have at most {LARGEST_FILE:,}")
    return path.read_bytes()


def from_values(kind: type[T], values: Any, source: str = "") -> T:
    """Makes a record from JSON values."""
    prefix = f"{source}: " if source else ""
    try:
        text = json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{prefix}{kind.__name__} cannot be written as JSON: {error}") from error
    record: T = _parsed(kind, text, prefix)
    return record


def check(record: Any) -> None:
    """Raises if a record made in Python has a value outside its field's limits."""
    from_values(type(record), dataclasses.asdict(record))


def check_values(hints: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raises if a value is outside the limits that the type hint of its name declares."""
    from pydantic import ValidationError

    for name, value in values.items():
        if name not in hints or not _has_limits(hints[name]):
            continue
        # Validated as JSON: lists are then accepted for tuples, but not strings for numbers.
        try:
            _adapter(hints[name]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            problems: list[Any] = error.errors(include_url=False)
            raise ValueError(_sentence(f"{prefix}{name}", *problems)) from error
        except TypeError as error:
            raise ValueError(f"{prefix}{name} is {_shown(value)}: {error}") from error


def call_checked(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function after checking its arguments against the limits in its signature."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    check_values(get_type_hints(function, include_extras=True), given)
    return function(*args, **kwargs)


def _has_limits(hint: Any) -> bool:
    metadata = getattr(hint, "__metadata__", ())
    return any(isinstance(each, BaseMetadata) for each in metadata) or any(map(_has_limits, get_args(hint)))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _parsed(kind: Any, text: str | bytes, prefix: str, path: Path | None = None) -> Any:
    from pydantic import ValidationError

    text = without_dropped(text, prefix) if kind is Experiment else text
    try:
        record = _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        problems: list[Any] = error.errors(include_url=False)
        if problems[0]["type"] == "json_invalid":
            raise ValueError(f"{path or kind.__name__} is not JSON: {problems[0]['ctx']['error']}") from error
        raise ValueError(prefix + _in_words(kind, problems)) from error
    if isinstance(record, Experiment):
        _check_together(record, prefix)
    return record


def _check_together(experiment: Experiment, prefix: str) -> None:
    """Checks limits of one field that depend on another."""
    augment, settings = getattr(experiment.data, "augment", None), experiment.optimizer
    if augment is not None and augment.area[0] > augment.area[1]:
        raise ValueError(f"{prefix}data.augment.area is {list(augment.area)}; the first must be at most the second")
    for name, rate in (("lr", settings.lr), ("new_lr", settings.new_lr)):
        if settings.schedule != "constant" and rate is not None and settings.floor > rate:
            raise ValueError(f"{prefix}optimizer.floor is {settings.floor}; it must be at most {name}, {rate}")
    if experiment.data.several_labels and experiment.loss != "sigmoid":
        raise ValueError(f"{prefix}loss is {experiment.loss}; images with several labels need sigmoid")


def _in_words(kind: type, problems: Sequence[Problem]) -> str:
    """The first problem as one sentence; several wrong or missing names are all listed."""
    places = [(*_place(kind, problem["loc"]), problem) for problem in _likely(problems)]
    path, holder, first = min(places, key=lambda each: (*FIRST, each[2]["type"]).index(each[2]["type"]))
    alike = [(each, problem) for each, its, problem in places if its is holder and problem["type"] == first["type"]]
    if first["type"] in FIRST:
        names, where = ", ".join(sorted(each[-1] for each, _ in alike)), ".".join(path[:-1]) or holder.__name__
        if first["type"] == "missing":
            return f"{where} lacks {names}"
        known = ", ".join(sorted(field.name for field in dataclasses.fields(holder)))
        return f"{where} has no field {names}; it has {known}"
    return _sentence(".".join(path) or kind.__name__, *(problem for each, _, problem in places if each == path))


def _likely(problems: Sequence[Problem]) -> list[Problem]:
    """For a field of a union type, the problems of the record with the fewest unknown names."""
    strange: dict[tuple[Any, ...], dict[str, int]] = {}
    for problem in problems:
        for place, tag in _tags(problem["loc"]):
            counts = strange.setdefault(place, {})
            counts[tag] = counts.get(tag, 0) + (problem["type"] == "unexpected_keyword_argument")
    chosen = {place: min(counts, key=lambda tag: counts[tag]) for place, counts in strange.items()}
    return [each for each in problems if all(chosen[place] == tag for place, tag in _tags(each["loc"]))]


def _tags(loc: Sequence[Any]) -> list[tuple[tuple[Any, ...], str]]:
    """The record names that pydantic inserts into `loc` for fields of a union type."""
    return [(tuple(loc[:n]), part) for n, part in enumerate(loc) if isinstance(part, str) and part[:1].isupper()]


def _place(kind: Any, loc: Sequence[Any]) -> tuple[list[str], Any]:
    """The path of field names to a problem, and the record that holds the last field."""
    path: list[str] = []
    holder, hint = kind, kind
    for part in loc:
        records = {each.__name__: each for each in _records(hint)}
        if part in records:
            hint = records[part]
        elif isinstance(part, int):
            path.append(str(part))
        elif records:
            [holder] = records.values()
            path.append(part)
            hint = get_type_hints(holder, include_extras=True).get(part)
    return path, holder


def _records(hint: Any) -> list[Any]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [record for option in get_args(hint) for record in _records(option)]


def _sentence(name: str, *problems: Problem) -> str:
    """`optimizer.ema is 2; it must be less than 1`; for a union type all alternatives are named."""
    return f"{name} is {_shown(problems[0]['input'])}; it must be {' or '.join(dict.fromkeys(map(_limit, problems)))}"


def _limit(problem: Problem) -> str:
    kind, given = problem["type"], problem.get("ctx", {})
    if kind in LIMITS:
        words, key = LIMITS[kind]
        return f"{words} {given[key]:,.12g}"
    if kind == "literal_error":
        options = given["expected"].replace("'", "").replace(" or ", ", ")
        return f"one of {options}" if "," in options else options
    if kind in ("too_long", "too_short"):
        return f"a list of {given.get('max_length', given.get('min_length'))}"
    return KINDS.get(kind) or problem["msg"]


def value_of(text: str) -> Any:
    """What was typed as JSON where it is some, else as text."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return float(text) if text == "inf" else text


def first_few(problems: Sequence[str]) -> str:
    """The first problems in one line; further ones are counted."""
    more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
    return "; ".join(problems[:NAMED]) + more


def first_line(error: BaseException) -> str:
    """An exception's text, as `str` has it, on one line of at most REASON characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= REASON else f"{text[: REASON - 1]}…"


def one_line(error: Exception) -> str:
    """An exception's text on one line of at most REASON characters."""
    said = getattr(error, "strerror", None) or (error.args[0] if error.args else "")
    return " ".join(str(said).split())[:REASON] or type(error).__name__


def finite(value: Any) -> Any:
    """Replaces non-finite numbers by None, since JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
