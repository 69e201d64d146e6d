"""What the command line shows: tables, and bars while something runs long."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from adatape.evaluate.progress import Progress
from adatape.report.table import Table, one_line

WIDTH = 200  # of a table in a file or a pipe, at most


class TerminalProgress(Progress):
    """Bars and messages; in a file or a pipe messages only, and of several processes the first one's."""

    def __init__(self, console: Console | None = None) -> None:
        described, note = (_text(each) for each in ("{task.description}", "{task.fields[note]}"))
        # The bar takes what the others leave; without `compact`, hours of time left are wide for nothing.
        bar, left = BarColumn(bar_width=None, table_column=Column(ratio=1)), TimeRemainingColumn(compact=True)
        columns = (described, bar, MofNCompleteColumn(), left, note)
        hidden = not (_is_first() and (console is not None or sys.stdout.isatty()))
        self.bars = Bars(*columns, console=console, expand=True, disable=hidden)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.bars.stop()

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        if task not in self.tasks:
            self.bars.start()
            self.tasks[task] = self.bars.add_task(task, total=total, note="")
        self.bars.update(self.tasks[task], completed=done, note=note)

    def message(self, text: str) -> None:
        if _is_first():
            _print_line(Console() if self.bars.disable else self.bars.console, text)


def _text(form: str) -> TextColumn:
    """Text that is cut, not wrapped, in a narrow terminal: a bar is one line."""
    return TextColumn(form, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))


def print_table(table: Table) -> None:
    if not _is_first():
        return
    shown = table.to_terminal()
    # rich's least width leaves out padding where several columns have one of their own, and cuts the last figure.
    needed = Console(width=WIDTH).measure(shown).minimum + 2 * len(table.columns)
    console = Console(width=max(Console().width, needed))
    if table.rows:
        console.print(shown)
    for note in table.notes:
        _print_line(console, note)


def _print_line(console: Console, text: str) -> None:
    console.print(one_line(text), markup=False, highlight=False, emoji=False, soft_wrap=True)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
