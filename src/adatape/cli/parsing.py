"""What was typed, as a verb that is ready to be called; what the parser refuses is one line."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tyro

import adatape
from adatape.cli.recipe_options import Resume, examples
from adatape.config import Experiment
from adatape.dropped import refuse_renamed_options
from adatape.recipes import RECIPES

ABOUT = "Transformers whose computation adapts to each input. `adatape --version` prints the version."


def parsed(verbs: Mapping[str, Callable[..., None]], given: list[str]) -> Callable[[], None]:
    """The verb with its options, yet to be called; what the parser refuses is one line."""
    if given[:1] == ["--version"]:
        return lambda: print(f"adatape {adatape.__version__}")
    refuse_renamed_options(given)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            chosen: Callable[[], None] = tyro.extras.subcommand_cli_from_dict(
                {name: _checked(verb) for name, verb in verbs.items()},
                prog="adatape",
                description=ABOUT,
                args=_with_kind(given),
                config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs),
            )
    except SystemExit as stop:
        if stop.code:
            raise ValueError(_refusal(said.getvalue(), given, verbs)) from stop
        print(examples(given), end="")
        raise
    return chosen


def _checked(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The verb, to be called once its options are within their limits."""

    @functools.wraps(verb)
    def choose(*args: Any, **kwargs: Any) -> Callable[[], None]:
        from adatape.validation import call_checked

        return functools.partial(call_checked, verb, *args, **kwargs)

    return choose


def _refusal(box: str, given: list[str], verbs: Iterable[str]) -> str:
    """What the parser says in a box: the first section, and what may have been meant."""
    sections: list[list[str]] = [[]]
    for line in box.strip().splitlines()[1:]:  # the first has the title
        text = line.strip("│╰╯─ ")
        if text.strip("-"):
            sections[-1].append(text)
        elif set(line) & set("─-") and sections[-1]:
            sections.append([])
    words = (" ".join(sections[0]) or " ".join(box.split())).partition(" Got errors:")[0]
    words = re.sub(r" \(applied to [^)]*\)", "", words.partition(" Arguments are applied")[0])
    if _names_nothing(given):
        words = f"{given[1]} is no recipe, no config.json and no run folder"
    near = _near_command(given, verbs) or _near_option(sections[1:], given)
    return f"{words.rstrip('.')}{f'; perhaps {near} was meant' if near else ''}; --help lists what there is"


def _names_nothing(given: list[str]) -> bool:
    """Whether `train` or `sweep` is given a word that is neither a recipe nor a path that is there."""
    if given[:1] not in (["train"], ["sweep"]) or len(given) < 2 or _with_kind(given) != given:
        return False
    return not given[1].startswith("-") and given[1] not in (*RECIPES, "replay", "resume")


def _near_command(given: list[str], verbs: Iterable[str]) -> str | None:
    """The verb or recipe that a word in its place resembles."""
    if not given or given[0].startswith("-"):
        return None
    if given[0] in RECIPES:
        return f"adatape train {given[0]}"
    if given[0] not in verbs:
        return next(iter(difflib.get_close_matches(given[0], list(verbs), 1)), None)
    if given[0] in ("train", "sweep") and len(given) > 1 and given[1] not in RECIPES:
        return next(iter(difflib.get_close_matches(given[1], list(RECIPES), 1)), None)
    return None


def _near_option(sections: list[list[str]], given: list[str]) -> str | None:
    """The parser's first proposal that the command knows; it proposes those of all others too."""
    option, typed = None, f"in adatape {' '.join(given)} "
    for text in itertools.chain.from_iterable(sections):
        if text.startswith("--"):
            option = text.split()[0]
        elif option and text.startswith("in adatape ") and typed.startswith(text.removesuffix("--help")):
            return option if option not in given else None
    return None


def _with_kind(given: list[str]) -> list[str]:
    """A path needs no word that says what it is."""
    if given[:1] in (["train"], ["sweep"]) and len(given) > 1:
        if given[1].endswith(".json"):
            return [given[0], "replay", *given[1:]]
        if given[1] not in RECIPES and Path(given[1]).is_dir():
            return [given[0], "resume", *given[1:]]
    return given


def numbers(name: str, text: str, kind: type[Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}; it must be numbers with commas between") from error


def source_of(what: Any) -> Experiment | Path:
    """The experiment of a recipe, its options checked; or the file or folder that was named."""
    if callable(what):
        from adatape.validation import call_checked

        experiment: Experiment = call_checked(what.func, *what.args, **what.keywords)
        return experiment
    path: Path = what.folder if isinstance(what, Resume) else what.config
    return path
