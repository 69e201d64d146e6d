"""The recipes as choices of `train` and `sweep`: their options in groups with help, and their examples."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from adatape.config import Experiment
from adatape.recipes import RECIPES
from adatape.recipes.options import GROUPS, Option, option_of

COMMANDS = ("adatape ", "torchrun ")  # with which lines of a docstring begin that are to be typed
WRAP, INDENT = 80, " " * 4


@dataclass(frozen=True)
class Replay:
    """Run the experiment of a config.json again, into a new folder."""

    config: tyro.conf.Positional[Path]
    """a config.json, such as that of a run folder"""


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest good checkpoint."""

    folder: tyro.conf.Positional[Path]
    """a run folder"""


def recipe_choice() -> Any:
    choice: Any = Replay | Resume
    for name, recipe in RECIPES.items():
        built, title = functools.partial(_grouped, name, recipe), _title_and_rest(recipe)[0]
        choice = (
            choice | Annotated[Experiment, tyro.conf.subcommand(name, constructor_factory=built, description=title)]
        )
    return Annotated[choice, tyro.conf.arg(name="")]  # without a name, so that groups are called by theirs alone


@functools.cache
def _grouped(name: str, recipe: Callable[..., Experiment]) -> Callable[..., Callable[[], Experiment]]:
    """The recipe with its options, in groups with their help; yet to be called, so that its refusals are ours to print.

    Every group is a dataclass, which is how the parser knows that options belong together.
    """
    hints = get_type_hints(recipe, include_extras=True)
    groups: dict[str, list[Any]] = {group: [] for group in GROUPS}
    for parameter in inspect.signature(recipe).parameters.values():
        option = option_of(name, parameter.name)
        groups[option.group].append(_documented(parameter, hints[parameter.name], option))
    kinds = {group: _struct(group, fields) for group, fields in groups.items() if fields}

    def choose(**chosen: Any) -> Callable[[], Experiment]:
        return functools.partial(
            recipe, **{key: value for each in chosen.values() for key, value in vars(each).items()}
        )

    parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, annotation=kinds[each]) for each in kinds]
    choose.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    choose.__annotations__ = dict(kinds)
    return choose


def _documented(parameter: inspect.Parameter, hint: Any, option: Option) -> Any:
    """A field of a group's dataclass; what None stands for is said in its place."""
    default = parameter.default
    stated = f"(default: {option.none})" if default is None and option.none else None
    metavar = _metavar(hint) if default is None else None
    hint = Annotated[hint, tyro.conf.arg(help=option.help(), help_behavior_hint=stated, metavar=metavar)]
    required = default is inspect.Parameter.empty
    return (parameter.name, hint) if required else (parameter.name, hint, default)


def _metavar(hint: Any) -> str | None:
    """The type of an option that may be None: INT in place of {None}|INT."""
    kinds = {get_args(each)[0] if get_origin(each) is Annotated else each for each in get_args(hint)} - {type(None)}
    return str(kinds.pop().__name__).upper() if len(kinds) == 1 else None


def _struct(group: str, fields: list[Any]) -> type:
    struct = dataclasses.make_dataclass(group, fields, kw_only=True, repr=False, eq=False)
    struct.__doc__ = ""  # else the parser prints the constructor's signature
    return struct


def _title_and_rest(recipe: Callable[..., Experiment]) -> tuple[str, str]:
    title, _, rest = inspect.cleandoc(recipe.__doc__ or "").partition("\n\n")
    return " ".join(title.split()), rest


def examples(given: list[str]) -> str:
    """What is printed below the help of a recipe: its commands, and what they gave, on lines of their own."""
    recipe = RECIPES.get(given[1]) if given[:1] in (["train"], ["sweep"]) and len(given) > 1 else None
    blocks: list[list[str]] = []  # a command, or the lines of a note
    for line in _title_and_rest(recipe)[1].splitlines() if recipe else ():
        if line.startswith(COMMANDS) or not blocks or blocks[-1][0].startswith(COMMANDS):
            blocks.append([])
        blocks[-1].append(line)
    lines = [_example(block) for block in blocks]
    return "\n".join(["", "examples:", *lines, ""]) if lines else ""


def _example(block: list[str]) -> str:
    if block[0].startswith(COMMANDS):
        return f"  {block[0]}"
    return textwrap.fill(" ".join(block), WRAP, initial_indent=INDENT, subsequent_indent=INDENT)
