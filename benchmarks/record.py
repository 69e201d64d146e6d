"""What a benchmark found, as rows of a JSONL file under results/: each with its case, settings and environment."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adatape.train.files import whole
from adatape.train.folder import environment

Row = dict[str, Any]


def add_rows(out: Path, rows: Sequence[Row], device: str, **more: Any) -> None:
    """Each after the others, or in the place of the row of the same `case`; `more` is the environment's."""
    found = environment(device) | more
    lines = out.read_text().splitlines() if out.is_file() else ()
    every = {row["case"]: row for row in map(json.loads, lines)}
    every |= {row["case"]: row | {"environment": found} for row in rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as partial:
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in every.values()))


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was chosen on the command line, in JSON's words; where it goes does not matter."""
    chosen = {name: value for name, value in vars(arguments).items() if name != "out"}
    return {name: str(value) if isinstance(value, Path) else value for name, value in chosen.items()}


def parser_of(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a JSONL file; the row of a case replaces an earlier one")
    return parser
