"""Writes benchmark results as rows of a JSONL file under results/, with case, settings and environment."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adatape.train.files import atomic_write
from adatape.train.folder import environment

Row = dict[str, Any]


def add_rows(out: Path, rows: Sequence[Row], device: str, **more: Any) -> None:
    """Appends rows; a row of the same `case` is replaced; `more` is added to the environment."""
    found = environment(device) | more
    lines = out.read_text().splitlines() if out.is_file() else ()
    every = {row["case"]: row for row in map(json.loads, lines)}
    every |= {row["case"]: row | {"environment": found} for row in rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as partial:
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in every.values()))


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The command-line options as JSON values, without the output path."""
    chosen = {name: value for name, value in vars(arguments).items() if name != "out"}
    return {name: str(value) if isinstance(value, Path) else value for name, value in chosen.items()}


def parser_of(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a JSONL file; the row of a case replaces an earlier one")
    return parser
