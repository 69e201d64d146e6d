"""A table as plain values, rendered for a terminal, as Markdown and as HTML; each form escapes what cells hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adatape.train.files import template

if TYPE_CHECKING:
    from markupsafe import Markup
    from rich.table import Table as RichTable

MARKDOWN = re.compile(r"[\\`*<>\[\]|&~]|(?<!\w)_|_(?!\w)")


@dataclass(frozen=True)
class Table:
    """Columns of `words` are aligned to the left, the others, which hold figures, to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    words: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells; the table has {len(self.columns)} columns")

    def to_terminal(self) -> RichTable:
        from rich.cells import cell_len
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(one_line(self.title), "table.title") if self.title else None, box=None, header_style="bold"
        )
        for n, name in enumerate(self.columns):
            left = n in self.words
            # A title may wrap between words; a figure that is cut is another figure.
            whole = [*name.split(), *(one_line(row[n]) for row in self.rows)]
            longest = None if left else max(map(cell_len, whole), default=0)
            table.add_column(
                Text(one_line(name)), justify="left" if left else "right", overflow="fold", min_width=longest
            )
        for row in self.rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        return table

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(self.to_html())

    def to_markdown(self) -> str:
        lines = [self.columns, ["---" if n in self.words else "--:" for n in range(len(self.columns))], *self.rows]
        cells = [[cell if n == 1 else _markdown(cell) for cell in line] for n, line in enumerate(lines)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        title = f"**{_markdown(self.title)}**" if self.title else ""
        return "\n\n".join(part for part in (title, table, *map(_markdown, self.notes)) if part) + "\n"

    def to_html(self) -> Markup:
        from markupsafe import Markup

        page = template(Path(__file__).with_name("table.html"), autoescape=True)
        return Markup(page.render(table=self, one_line=one_line))


def one_line(text: str) -> str:
    """Without line breaks and control characters, which would break a row or command a terminal."""
    return "".join(each if each.isprintable() else " " if each.isspace() else "�" for each in text)


def _markdown(text: str) -> str:
    return MARKDOWN.sub(lambda found: "\\" + found[0], one_line(text))
