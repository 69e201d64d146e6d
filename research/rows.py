"""A study is one JSONL file under results/, a run is one row of it: config, environment, result, a short curve.

    python research/rows.py results/mine.jsonl runs/mine          a row for every run folder below runs/mine

Files that `look.py` writes (`reading`, `budgets`, `fewshot`, `difficulty`) become parts of the row. Rows stay when the
code that made them is removed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from adatape.train.files import atomic_write
from adatape.train.logger import METRICS, read_metrics

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"
CLOSER = ("reading", "budgets", "fewshot", "difficulty")
POINTS = 12  # points of a curve, for each kind of line
FIGURES = ("kind", "step", "loss", "accuracy", "length_mean")
HELD_OUT = ("accuracy", "length_mean", "length_var")


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def add_rows(path: Path, new: Sequence[Row], key: str = "run") -> None:
    """Appends rows; a row of the same run is replaced."""
    rows = {row[key]: row for row in read_rows(path)}
    write_rows(path, (rows | {row[key]: row for row in new}).values())


def row_of(folder: Path, name: str) -> Row:
    """The row of a run folder; an unfinished run has no `result`."""
    row: Row = {"run": name, "config": _json(folder / "config.json"), "environment": _json(folder / "env.json")}
    if (folder / "result.json").is_file():
        row["result"] = _json(folder / "result.json")
    lines = read_metrics(folder / METRICS).lines
    scored = [line for line in lines if line["kind"] == "validation"]
    if row["config"]["data"].get("validate_on") is not None and scored:
        row["held_out"] = {figure: scored[-1][figure] for figure in HELD_OUT}
    row["curve"] = curve_of(lines)
    return row | {part: _json(path) for part in CLOSER if (path := folder / f"{part}.json").is_file()}


def curve_of(lines: Sequence[Row]) -> list[Row]:
    """At most POINTS lines of each kind, with the last one, reduced to the figures of curves."""
    found = []
    for kind in dict.fromkeys(line["kind"] for line in lines):
        of_kind = [line for line in lines if line["kind"] == kind]
        step = -(-len(of_kind) // POINTS)
        found += of_kind[::-step][::-1]
    return [{figure: line[figure] for figure in FIGURES if figure in line} for line in found]


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the study's JSONL file")
    parser.add_argument("runs", type=Path, help="a folder that holds run folders, at any depth")
    arguments = parser.parse_args(given)
    folders = sorted(path.parent for path in arguments.runs.rglob("config.json"))
    add_rows(arguments.out, [row_of(folder, str(folder.relative_to(arguments.runs))) for folder in folders])
    print(f"{arguments.out}: {len(folders)} runs")


if __name__ == "__main__":
    main()
