"""Turns the death of a DataLoader worker, by a signal or lack of memory, into a one-line error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

END = object()
ADVICE = "usually the machine has run out of memory: lower engine.workers or free some memory"


class WorkerDied(OSError):  # noqa: N818
    """A DataLoader worker has ended unexpectedly."""


def items_of(loader: Any) -> Generator[Any, None, None]:
    """Yields a DataLoader's items; raises WorkerDied if a worker ends.

    torch's SIGCHLD handler raises in the main thread at any point, even while a checkpoint is written. torch also
    checks its workers when data is late, so the previous handler is restored.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if in_main else None
    items = iter(loader)
    if in_main:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
    while (item := _received(items)) is not END:
        yield item


@contextmanager
def advise_on_worker_death(then: str) -> Iterator[None]:
    """Adds `then`, what to do, to the message of WorkerDied."""
    try:
        yield
    except WorkerDied as error:
        raise WorkerDied(f"{error}; {then}") from error


def _received(items: Iterator[Any]) -> Any:
    """The next item. Workers return their own errors as values, so an exception here means that one has died."""
    try:
        return next(items, END)
    except (RuntimeError, OSError, EOFError) as error:
        if isinstance(error, RuntimeError) and "unexpectedly" not in str(error):
            raise
        raise WorkerDied(f"{_death(items)}; {ADVICE}") from error


def _death(items: Iterator[Any]) -> str:
    workers = getattr(items, "_workers", [])
    wait([worker.sentinel for worker in workers], timeout=5)  # pipes break before the exit code is known
    for worker in workers:
        if worker.exitcode is not None and worker.exitcode < 0:
            return f"data worker {worker.pid} was killed by {signal.Signals(-worker.exitcode).name}"
        if worker.exitcode:
            return f"data worker {worker.pid} exited with code {worker.exitcode}"
    return "a data worker has died"
