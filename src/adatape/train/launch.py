"""Training, sweeping and scoring as one call each, from an experiment or from a folder."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adatape.config import Budget, Experiment
from adatape.evaluate.accuracy import Score
from adatape.evaluate.cost import cost, total
from adatape.evaluate.device import pick_device
from adatape.evaluate.progress import SILENT, Progress
from adatape.evaluate.result import FIGURE_NAMES, Result, main_figure, to_plain
from adatape.train.duration import DurationTeller
from adatape.train.evaluate import score_run
from adatape.train.folder import load_config, load_run
from adatape.train.run import OnStatus, TrainStatus, plain, run
from adatape.train.sweep import combinations, with_settings
from adatape.train.trust import check_links, untrusted

SWEPT = ("accuracy", "mean_ap", "length_mean", "gflops", "gflops_mean", "steps")


@dataclass(frozen=True)
class Trained(Result):
    result: dict[str, Any]
    """`result.json` of the folder"""
    out: Path

    def as_dict(self) -> dict[str, Any]:
        return {**to_plain(self.result), "out": str(self.out)}


@dataclass(frozen=True)
class Swept(Result):
    rows: list[dict[str, Any]]
    """what was set for a run, then its figures"""
    out: Path


@dataclass(frozen=True)
class Evaluated(Result):
    score: Score
    parameters: int
    gflops: float
    """at the full budget"""
    length: int | None
    """of a sequence; None for images"""
    stored: Budget | None = None
    """the budget that is stored in the run, at which it was scored; None: as trained"""

    def as_dict(self) -> dict[str, Any]:
        known = {"length": self.length, "budget": to_plain(self.stored)}
        known = {name: value for name, value in known.items() if value is not None}
        return {**known, **plain(self.score), "parameters": self.parameters, "gflops": self.gflops}


def train_to_folder(
    what: Experiment | Path,
    out: Path | None = None,
    device: str = "auto",
    settings: Sequence[str] = (),
    resume: bool = False,
    trust: bool = False,
    progress: Progress = SILENT,
) -> Trained:
    """Runs an experiment, or the one of a config.json, into a new folder; a run folder goes on where it stopped.

    `settings` are `field=value`. Without `trust`, what a file says and the settings do not may fetch nothing.
    """
    going_on = isinstance(what, Path) and what.is_dir()
    experiment = _experiment(what, settings, trust)
    folder = what if isinstance(what, Path) and going_on else out or _own_folder(experiment.recipe)
    if (folder / "config.json").is_file() and not trust:
        check_links(folder)
    device = pick_device(device)
    on_status = _report_to(experiment, progress, DurationTeller(progress.message) if device == "cpu" else None)
    result = run(experiment, folder, device, on_status, resume=going_on or resume, say=progress.message)
    return Trained(result, folder)


def sweep_to_folder(
    what: Experiment | Path,
    over: Sequence[str],
    out: Path | None = None,
    device: str = "auto",
    trust: bool = False,
    progress: Progress = SILENT,
) -> Swept:
    """Runs every combination of `field=value,value`, one after the other, each into a folder of its own."""
    if not over:
        raise ValueError("over is empty; say what to sweep, as in --over seed=0,1,2")
    experiment = _experiment(what, (), trust=True)
    grid = combinations(experiment, list(over))
    if isinstance(what, Path) and not trust:
        grid = [(chosen, untrusted(each, chosen)) for chosen, each in grid]
    out, device = out or free_folder(f"{experiment.recipe}-sweep"), pick_device(device)
    rows = []
    for place, (chosen, each) in enumerate(grid):
        progress.update("sweep", place, len(grid), " ".join(f"{key}={value}" for key, value in chosen.items()))
        result = run(each, out / str(place), device, lambda _: None, say=progress.message)
        rows.append({**chosen, **{key: result[key] for key in SWEPT if key in result}})
    progress.update("sweep", len(grid), len(grid))
    (out / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    return Swept(rows, out)


def evaluate_run(folder: Path, length: int | None = None, device: str = "auto", trust: bool = False) -> Evaluated:
    """A finished run's accuracy or mean AP, sequence length and cost on the test set, as in the paper's ablations."""
    with warnings.catch_warnings():  # reading further than trained is what `length` asks for
        warnings.simplefilter("ignore", UserWarning)
        experiment, model = load_run(folder, length, trust=trust)
    score = score_run(experiment, model, torch.device(pick_device(device)), length=length)
    whole = total(cost(model))
    length = length or experiment.data.sequence_length
    return Evaluated(score, whole.parameters, whole.macs / 1e9, length, experiment.model.budget)


def free_folder(recipe: str) -> Path:
    return next(path for n in itertools.count(1) if not (path := Path("runs") / f"{recipe}-{n}").exists())


def _own_folder(recipe: str) -> Path:
    """Several processes, or a restart of one, would each find another folder free."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("out is not given; processes that train together need one folder, so say --out DIR")
    return free_folder(recipe)


def _experiment(what: Experiment | Path, settings: Sequence[str], trust: bool) -> Experiment:
    """One made in Python is the user's own; of a file's, what the user has not set may fetch nothing."""
    if isinstance(what, Experiment):
        return with_settings(what, settings) if settings else what
    experiment = load_config(what / "config.json" if what.is_dir() else what, trust=True)
    experiment = with_settings(experiment, settings) if settings else experiment
    return experiment if trust else untrusted(experiment, [field.partition("=")[0].strip() for field in settings])


def _report_to(experiment: Experiment, progress: Progress, duration: DurationTeller | None = None) -> OnStatus:
    right = "all right" if experiment.data.several_labels else "acc"

    def on_status(status: TrainStatus) -> None:
        progress.update(experiment.recipe, status.step, status.steps, _now(status, right))
        if duration is not None:
            duration.on_step(status.step, status.steps)
        if status.score is not None:
            epoch = "" if status.epoch is None else f"epoch {status.epoch:6.1f}  "
            where = f"step {status.step:6d}  {epoch}"
            progress.message(f"{where}train loss {status.loss:.4f}  validation {describe(status.score)}")

    return on_status


def _now(status: TrainStatus, right: str) -> str:
    """Short, so that it fits beside a bar in 80 columns."""
    tape = f" tape {status.length_mean:.1f}" if status.length_mean else ""
    return f"loss {status.loss:.3g} {right} {status.accuracy:.1%}{tape} {status.samples_per_second:,.0f}/s"


def describe(score: Score) -> str:
    tape = f", tape {score.length_mean:.1f} ± {score.length_var**0.5:.1f}" if score.length_mean else ""
    name = main_figure(score._asdict())
    return f"{FIGURE_NAMES[name]} {getattr(score, name):.2%}{tape}"
