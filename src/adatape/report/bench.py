"""Speed of models against their references, as a results file that grows and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adatape.config import Bench
from adatape.evaluate.bench import Row, measure_speed, merged, read_rows
from adatape.evaluate.device import pick_device
from adatape.evaluate.progress import SILENT, Progress
from adatape.evaluate.result import Result
from adatape.train.folder import environment, write


@dataclass(frozen=True)
class BenchResult(Result):
    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row]
    """what was measured; with 0 rounds what the file holds"""
    out: Path | None
    picture: Path | None


def write_bench(
    models: Sequence[str],
    asked: Bench,
    out: Path | None = None,
    plot: Path | None = None,
    progress: Progress = SILENT,
) -> BenchResult:
    """Measures, and adds to the file `out` after every row, so that an interrupted run keeps what it has measured."""
    device, before = pick_device(asked.device), read_rows(out)
    settings = {**vars(asked), "models": list(models), "device": device}
    found, rows = environment(device), []
    for row in measure_speed(models, asked, progress):
        rows.append(row | {name: found[name] for name in ("hardware", "torch", "commit", "date")})
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            write(out, {"environment": found, "settings": settings, "rows": merged(before, rows)})
    every = merged(before, rows)
    picture = None
    if plot:
        from adatape.report.pictures.speed import draw_speed  # a machine that measures may lack matplotlib

        picture = draw_speed(plot, every)
    return BenchResult(found, settings, rows if asked.rounds else every, out, picture)
