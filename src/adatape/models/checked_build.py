"""Builds a model from user-given options; an error of its constructor becomes one line that names the option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
from annotated_types import Ge, Le

from adatape.config import ReaderConfig
from adatape.limits import Depth, PartialShare, Pixels, Positive, Quantity, QuantityOrZero, Width
from adatape.validation import check_values, first_line

T = TypeVar("T")
# What constructors of timm and torch raise on invalid arguments: assertions, or errors from within.
REFUSALS = (TypeError, ValueError, AssertionError, RuntimeError, ArithmeticError, LookupError, AttributeError)


class OptionLimits:
    """Limits of options that determine a model's size, so that a typing error does not exhaust the memory."""

    img_size: Pixels | tuple[Pixels, Pixels]
    patch_size: Pixels | tuple[Pixels, Pixels]
    bank_patch: Pixels
    patch: Pixels
    in_chans: Annotated[int, Ge(1), Le(4096)]
    num_classes: Annotated[int, Ge(0), Le(10_000_000)]
    embed_dim: Width
    depth: Depth
    num_heads: Width
    bank_size: Annotated[int, Ge(1), Le(100_000_000)]
    class_mlp_ratio: Positive
    mlp_ratio: Annotated[float, Ge(0), Le(1000)]
    reg_tokens: QuantityOrZero
    layer: QuantityOrZero
    drop_rate: PartialShare
    pos_drop_rate: PartialShare
    patch_drop_rate: PartialShare
    proj_drop_rate: PartialShare
    attn_drop_rate: PartialShare
    drop_path_rate: PartialShare
    steps: Quantity


LIMITED: dict[str, Any] = {
    **get_type_hints(ReaderConfig, include_extras=True),
    **get_type_hints(OptionLimits, include_extras=True),
}


def build_checked(build: Callable[..., T], name: str, options: Mapping[str, Any], where: str = "", **given: Any) -> T:
    """Returns `build(**given, **options)`; `where` is the options' field in error messages, as in `model.options`."""
    prefix = f"{where}." if where else ""
    check_values(LIMITED, options, prefix)
    try:
        return build(**{**given, **options})
    except REFUSALS as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
        if out_of_memory or _is_our_error(error):
            raise
        shape = {each: value for each, value in given.items() if not each.startswith("pretrained")}
        if shape != given and _builds(build, {**shape, **options}):
            raise ValueError(f"model.pretrained has weights that do not fit {name}: {first_line(error)}") from error
        if not options:
            raise ValueError(f"{name} cannot be built: {first_line(error)}") from error
        wrong = next((each for each in options if _builds(build, {**shape, **_without(options, each)})), None)
        said = f"{prefix}{wrong} is {options[wrong]!r}" if wrong else f"{where or 'options'} is {dict(options)}"
        raise ValueError(f"{said}; {name} does not take {'it' if wrong else 'them'}: {first_line(error)}") from error


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {each: value for each, value in options.items() if each != name}


def _builds(build: Callable[..., Any], options: dict[str, Any]) -> bool:
    try:
        with torch.device("meta"):
            build(**options)
    except REFUSALS:
        return False
    return True


def _is_our_error(error: Exception) -> bool:
    """Whether this package raised the error; its messages already name field, value and limit."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    return isinstance(error, ValueError) and frames[-1].frame.f_globals.get("__name__", "").startswith("adatape.")
