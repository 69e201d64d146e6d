"""The list of recipes, printed without importing torch."""

from __future__ import annotations

import inspect
from typing import Any

from rich.console import Console
from rich.table import Table

from adatape.recipes import RECIPES


def print_recipes() -> dict[str, Any]:
    rows = {name: inspect.cleandoc(recipe.__doc__ or "") for name, recipe in RECIPES.items()}
    table = Table("recipe", "what", "options", box=None, header_style="bold")
    for name, text in rows.items():
        table.add_row(name, text.splitlines()[0], ", ".join(inspect.signature(RECIPES[name]).parameters))
    Console().print(table)
    return rows
