"""Options that several verbs share, and how a verb's result is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from adatape.evaluate.result import Result
    from adatape.report.table import Table

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="a run folder")]
Device = Annotated[str, tyro.conf.arg(help="cpu, cuda, or auto")]
Json = Annotated[bool, tyro.conf.arg(help="print one JSON object as the last line")]
Trust = Annotated[
    bool,
    tyro.conf.arg(
        help="the run is your own: it may download, open URLs, read weights elsewhere and link out of its folder"
    ),
]


def with_bars(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a function that tells its progress, with bars on the terminal."""
    from adatape.report.terminal import TerminalProgress

    with TerminalProgress() as progress:
        return function(*args, **options, progress=progress)


def show(found: Result, table: Callable[[Any], Table], json: bool) -> None:
    from adatape.report.terminal import print_table

    print_table(table(found))
    if json:
        print(found.to_json())
