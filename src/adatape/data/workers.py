"""Data workers that die, by a signal or for want of memory: noticed where data is asked for, and said in one line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

END = object()
ADVICE = "most often the machine has run out of memory, so lower engine.workers or free some"


class WorkerDied(OSError):  # noqa: N818  it names a state, as FileNotFound would
    """A process that decodes images has ended before it should."""


def items_of(loader: Any) -> Generator[Any, None, None]:
    """What a DataLoader gives, until its end or a worker's.

    Torch raises an error from a signal handler, in the midst of whatever the main thread does, be it a checkpoint. It
    also looks at its workers when data is late, which is soon enough, so that the handler is taken away again.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if in_main else None
    items = iter(loader)
    if in_main:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
    while (item := _received(items)) is not END:
        yield item


@contextmanager
def deaths_told(then: str) -> Iterator[None]:
    """Adds what can be done to the news of a worker's death."""
    try:
        yield
    except WorkerDied as error:
        raise WorkerDied(f"{error}; {then}") from error


def _received(items: Iterator[Any]) -> Any:
    """What workers say of images comes as values; an error on the way is a worker that died, perhaps as it sent."""
    try:
        return next(items, END)
    except (RuntimeError, OSError, EOFError) as error:
        if isinstance(error, RuntimeError) and "unexpectedly" not in str(error):
            raise
        raise WorkerDied(f"{_death(items)}; {ADVICE}") from error


def _death(items: Iterator[Any]) -> str:
    workers = getattr(items, "_workers", [])
    wait([worker.sentinel for worker in workers], timeout=5)  # its pipes break before it is known to be gone
    for worker in workers:
        if worker.exitcode is not None and worker.exitcode < 0:
            return f"data worker {worker.pid} was killed by {signal.Signals(-worker.exitcode).name}"
        if worker.exitcode:
            return f"data worker {worker.pid} exited with code {worker.exitcode}"
    return "a data worker has died"
