"""The report: all runs on one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adatape.config import to_dict
from adatape.evaluate.paper_comparison import shape_of
from adatape.evaluate.result import FIGURE_NAMES, Result, main_figure
from adatape.report.legend import budget_text, caption, rank
from adatape.report.runs import (
    Row,
    Run,
    grouped,
    paper_accuracy_table,
    paper_cost_table,
    read_runs,
    results_table,
    rows_of,
    written,
)
from adatape.report.table import Table
from adatape.train.files import atomic_write, template
from adatape.train.folder import missing_weights

GENERATOR = '<meta name="generator" content="adatape report">'


@dataclass(frozen=True)
class ReportResult(Result):
    out: Path
    runs: int
    rows: list[Row]
    skipped: dict[str, str]
    """folders without a finished run, and why"""
    missing_weights: list[str]


def write_report(folders: Sequence[Path], out: Path = Path("runs/report.html")) -> ReportResult:
    """Writes the page; folders without a finished run are named on it with the reason."""
    _check_out(out)
    runs, skipped = read_runs([folder for folder in folders if folder.resolve() != out.resolve()])
    if not runs:
        why = "; ".join(f"{folder}: {reason}" for folder, reason in skipped.items()) or "no folder was given"
        raise ValueError(f"no finished run to report: {why}")
    groups = grouped(runs)
    rows, named = rows_of(groups), {str(folder): reason for folder, reason in skipped.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as partial:
        partial.write_text(_page(groups, rows, named))
    lacking = [text for group in groups for run in group if (text := missing_weights(run.folder))]
    return ReportResult(out, len(runs), rows, named, lacking)


def _page(groups: Sequence[Sequence[Run]], rows: Sequence[Row], skipped: dict[str, str]) -> str:
    runs = [run for group in groups for run in group]
    return template(Path(__file__).with_name("template.html"), autoescape=True).render(
        many=f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}",
        now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        results=results_table(rows),
        paper=[table for table in (paper_accuracy_table(groups, rows), paper_cost_table(groups)) if table.rows],
        runs=[_article(run) for run in runs],
        skipped=Table(("folder", "why"), list(skipped.items()), words=(0, 1)),
    )


def _article(run: Run) -> dict[str, Any]:
    env = {name: value for name, value in run.env.items() if name != "command"}
    files = {"environment": env, "config.json": to_dict(run.experiment), "result.json": run.result}
    main, budget = main_figure(run.result), run.experiment.model.budget
    pictures = sorted((run.folder / "figures").glob("*.png"), key=lambda path: rank(path.stem))
    return {
        "folder": run.folder,
        "recipe": run.experiment.recipe,
        "model": shape_of(run.experiment),
        "seed": run.experiment.seed,
        "figure": f"{FIGURE_NAMES[main]} {written({main: run.result.get(main)}, main)} %",
        "place": " · ".join(str(env[name]) for name in ("hardware", "device", "date") if env.get(name)),
        "versions": ", ".join(
            f"{each} {env[each]}" for each in ("python", "torch", "timm", "adatape") if env.get(each)
        ),
        "stored": "" if budget is None else f"figures of the trained budget; stored: {budget_text(budget)}",
        "command": run.env.get("command", "the command is not known"),
        "figures": [(caption(path.stem), base64.b64encode(path.read_bytes()).decode()) for path in pictures],
        "missing_weights": missing_weights(run.folder) or "",
        "files": {name: json.dumps(values, indent=2) for name, values in files.items()},
    }


def _check_out(out: Path) -> None:
    """An earlier report is written anew; anything else is not ours to replace."""
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; --out must be a file, as in {out / 'report.html'}")
    if out.is_file() and GENERATOR not in out.read_text(errors="replace")[:2000]:
        raise FileExistsError(f"{out} exists and is no earlier report; choose another --out or remove it")
