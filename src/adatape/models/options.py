"""The model options that a config file or the command line may set: those that determine its shape, by name and type.

They are read from the constructors' signatures. Other arguments of `timm.create_model` name weights, files, URLs or
classes; with them a run folder from someone else could make the program download or read arbitrary files.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from timm.models.vision_transformer import VisionTransformer

from adatape.config import ReaderConfig
from adatape.models import build, hub
from adatape.models.adatape import AdaTape
from adatape.models.avit import AViT
from adatape.models.join import TapeJoin
from adatape.models.ponder import PonderNet
from adatape.models.universal import UniversalStage, build_uvit
from adatape.models.vit import build_vit3ffn
from adatape.windows.options import WindowOptions

Kinds = dict[str, tuple[Any, ...]]
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def _named_kinds(*constructors: Callable[..., Any]) -> Kinds:
    """The types of all arguments that JSON can represent, by name; classes, functions and modules are left out."""
    found: Kinds = {}
    for constructor in constructors:
        for name, argument in inspect.signature(constructor, eval_str=True).parameters.items():
            if argument.kind is not argument.VAR_KEYWORD:
                found[name] = tuple(dict.fromkeys((*found.get(name, ()), *_written_kinds(argument.annotation))))
    return {name: kinds for name, kinds in found.items() if set(kinds) - {NoneType}}


def _written_kinds(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:  # `build_checked` checks its limits
        return _written_kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [kind for option in get_args(hint) for kind in _written_kinds(option)]
    numbers = get_origin(hint) is tuple and all(part in WORDS for part in get_args(hint))
    return [hint] if hint in WORDS or get_origin(hint) is Literal or numbers else []


WRAPPING = _named_kinds(build.wrap, AdaTape, TapeJoin, ReaderConfig, WindowOptions)
SHAPING = _named_kinds(
    *(build.build, build.wrap, AdaTape, TapeJoin, ReaderConfig, WindowOptions, hub.build),
    *(build_uvit, UniversalStage, AViT, PonderNet, build_vit3ffn, VisionTransformer),
)


def check_options(where: str, options: Mapping[str, Any], known: Kinds = SHAPING) -> None:
    """Raises for the first option that is not known or has the wrong type."""
    for name, value in options.items():
        if name not in known:
            raise ValueError(
                f"{where}.{name} is {reprlib.repr(value)}; {name} is not a permitted option, use one of: "
                f"{', '.join(sorted(known))}"
            )
        if not any(_fits(kind, value) for kind in known[name]):
            *most, last = (word for kind in known[name] for word in _in_words(kind))
            wanted = f"{', '.join(most)} or {last}" if most else last
            raise ValueError(f"{where}.{name} is {reprlib.repr(value)}; it must be {wanted}")


def check_wrap(where: str, options: Mapping[str, Any]) -> None:
    """`check_options` for the options of `adatape.wrap`."""
    check_options(where, options, WRAPPING)


def _fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        fits = isinstance(value, list | tuple) and len(value) == len(get_args(kind))
        return fits and all(_fits(*pair) for pair in zip(get_args(kind), value, strict=True))
    return type(value) is kind or (kind is float and type(value) is int)


def _in_words(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [repr(choice) for choice in get_args(kind)]
    if get_origin(kind) is tuple:
        return [f"{len(get_args(kind))} of {WORDS[get_args(kind)[0]]}"]
    return [WORDS[kind]]
