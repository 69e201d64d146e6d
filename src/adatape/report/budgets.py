"""One run at several budgets, as a file and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adatape.config import Budget
from adatape.data.sets import open_set
from adatape.evaluate.budget import stored_floor, trained_budget
from adatape.evaluate.progress import SILENT, Progress
from adatape.evaluate.result import Result
from adatape.report.pictures.budget_overview import draw_budget_overview, examples_of
from adatape.train.budgets import budget_row, measure_budgets
from adatape.train.evaluate import test_batches
from adatape.train.folder import environment, write
from adatape.train.lock import write_lock


@dataclass(frozen=True)
class BudgetComparison(Result):
    run: Path
    environment: dict[str, Any]
    trained: Budget
    rows: list[dict[str, Any]]
    lengths: list[int]
    """test samples by tape length at the trained budget"""
    lengths_wrong: list[int]
    left_out: dict[int, str]
    """budgets that the model cannot have, and why"""
    floor: float | None
    """stored in the run, below which no window is read at any of the budgets"""
    picture: Path


def write_budgets(
    folder: Path,
    budgets: Sequence[int],
    device: str = "auto",
    out: Path | None = None,
    trust: bool = False,
    progress: Progress = SILENT,
) -> BudgetComparison:
    """Measures a run at each number of steps; writes `budgets.json` and `budgets.png`, by default into its figures."""
    experiment, model, place, points, usual, left_out = measure_budgets(folder, budgets, device, trust, progress)
    trained = trained_budget(model)
    examples = examples_of(usual, test_batches(experiment, None, place), open_set(experiment.data, "test").names)
    with write_lock(folder) if out is None else nullcontext():
        out = out or folder / "figures"
        out.mkdir(parents=True, exist_ok=True)
        result = BudgetComparison(
            folder,
            environment(str(place)),
            trained,
            [{**budget_row(each), "beyond_trained": each.budget.steps > trained.steps} for each in points],
            torch.bincount(usual.length).tolist(),
            torch.bincount(usual.length[~usual.right]).tolist(),
            left_out,
            stored_floor(model, experiment.model.budget),
            out / "budgets.png",
        )
        write(out / "budgets.json", result.as_dict())
        draw_budget_overview(result.picture, points, usual, examples, model.length_name)
    return result
