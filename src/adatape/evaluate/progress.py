"""How a function that runs long tells how far it has come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """Override what you want to hear; this class, the default of every function, does nothing."""

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total` steps of a named task are finished."""

    def message(self, text: str) -> None:
        """One line that is worth keeping, such as a score or a warning."""


SILENT = Progress()


def with_progress(items: Iterable[T], task: str, total: int, progress: Progress) -> Iterator[T]:
    """The items, each counted once what is done with it is done."""
    for done, item in enumerate(items, 1):
        yield item
        progress.update(task, done, total)
