"""A server that says on the terminal where it listens."""

from __future__ import annotations

from functools import partial

from adatape.report.tables import started_table
from adatape.report.terminal import print_table
from adatape.serve.server import Started, run_server


def _print_start(started: Started) -> None:
    print_table(started_table(started))


serve = partial(run_server, on_start=_print_start)
