"""The command line: parse, call, print. Nothing here imports torch before a verb needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from adatape.cli.models import bench, cost, models, recipes
from adatape.cli.parsing import parsed
from adatape.cli.runs import budget, demo, evaluate, export, fewshot, figures, release, report, serve, sweep, train
from adatape.extras import how_to_install

VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "train": train,
    "sweep": sweep,
    "eval": evaluate,
    "budget": budget,
    "fewshot": fewshot,
    "figures": figures,
    "report": report,
    "export": export,
    "serve": serve,
    "release": release,
    "cost": cost,
    "bench": bench,
    "models": models,
    "recipes": recipes,
}


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        parsed(VERBS, list(sys.argv[1:] if arguments is None else arguments))()
    except BrokenPipeError as error:  # whoever reads has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from error
    except KeyboardInterrupt as error:
        _end("stopped", 130, error)
    except (ValueError, OSError) as error:
        _end(" ".join(str(error).split()), 2, error)
    except Exception as error:
        code = getattr(error, "code", None)  # a run that a signal stopped; its class lies behind torch
        if isinstance(code, int):
            _end(str(error), code, error)
        if _was_interrupted(error):
            _end("stopped", 130, error)
        missing = isinstance(error, ModuleNotFoundError) and how_to_install(error.name)
        if missing:
            _end(missing, 2, error)
        if _is_out_of_memory(error):
            reason = str(error).strip().partition("\n")[0]
            _end(f"the memory does not suffice: {reason}; smaller batches or a smaller model need less", 2, error)
        raise


def _end(text: str, code: int, error: BaseException) -> NoReturn:
    print(f"adatape: {text}", file=sys.stderr)
    raise SystemExit(code) from error


def _was_interrupted(error: BaseException | None) -> bool:
    """Libraries that are interrupted while they are imported may say that they cannot be."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a class of its own for a GPU's memory only."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)
