"""The demo: AdaTape and a plain Transformer learn parity; then AdaTape learns to find digits on a large canvas."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from adatape.config import Experiment
from adatape.data.batch import Shard
from adatape.data.images import haystack_of
from adatape.data.parity import held_out_set
from adatape.data.sets import open_set
from adatape.evaluate.accuracy import Score, score
from adatape.evaluate.difficulty import spearman
from adatape.evaluate.progress import SILENT, Progress
from adatape.evaluate.reading import collect, parity_example
from adatape.evaluate.result import Result, to_plain
from adatape.models.base import Adaptive
from adatape.recipes.haystack import haystack
from adatape.recipes.parity import System, parity_small
from adatape.report.figures import draw_parity
from adatape.report.pictures.haystack import draw_haystack
from adatape.train.folder import load_run, new_folder, write
from adatape.train.launch import describe
from adatape.train.run import finalize, plain
from adatape.train.trainer import Trainer

Part = Literal["parity", "haystack"]
SHOWN = 64  # test sequences to choose a telling one from
SYSTEMS: tuple[System, ...] = ("adatape", "transformer")
FLOOR = 0.3  # on the scan's probability, chosen on validation canvases
CPU = torch.device("cpu")


@dataclass(frozen=True)
class DemoResult(Result):
    results: dict[str, dict[str, Any]]
    """`result.json` of each run; haystack's also has `budgets`, a score for each, and `rho`"""
    pictures: list[Path]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {**to_plain(self.results), "pictures": [str(path) for path in self.pictures], "seconds": self.seconds}


def write_demo(
    out: Path = Path("runs/demo"), seed: int = 0, only: Part | None = None, progress: Progress = SILENT
) -> DemoResult:
    """Trains for about three minutes on two cores; writes pictures, `demo.json` and a run folder for each model."""
    if (out / "demo.json").is_file():
        shutil.rmtree(out)
    elif out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and is no earlier demo; choose another --out or remove it")
    results: dict[str, dict[str, Any]] = {}
    pictures = []
    for part, write_part in PARTS.items():
        if only in (None, part):
            found, picture = write_part(out, seed, progress)
            results |= found
            pictures.append(picture)
    summary = DemoResult(results, pictures, sum(result["seconds"] for result in results.values()))
    write(out / "demo.json", summary.as_dict())
    return summary


def _write_parity(out: Path, seed: int, progress: Progress) -> tuple[dict[str, dict[str, Any]], Path]:
    progress.message("AdaTape and a plain Transformer learn parity, side by side: about a minute on two cores.")
    results, curves = _train({system: parity_small(system=system, seed=seed) for system in SYSTEMS}, out, progress)
    experiment, model = load_run(out / "adatape")
    sample = parity_example(model, held_out_set(experiment.data.sequence_length or 0, SHOWN))
    accuracy = {system: [(step, each.accuracy) for step, each in points] for system, points in curves.items()}
    return results, draw_parity(out / "demo.png", accuracy, results["adatape"]["lengths"], sample)


def _write_haystack(out: Path, seed: int, progress: Progress) -> tuple[dict[str, dict[str, Any]], Path]:
    progress.message("AdaTape finds small digits on a large canvas: about two minutes on two cores.")
    results, _ = _train({"haystack": haystack(seed=seed)}, out, progress)
    experiment, model = load_run(out / "haystack")
    results["haystack"] |= _reads(experiment, model)
    model.set_budget(threshold=FLOOR)
    return results, draw_haystack(out / "haystack.png", model, haystack_of(train=False))


PARTS = {"parity": _write_parity, "haystack": _write_haystack}


def _reads(experiment: Experiment, model: Adaptive) -> dict[str, Any]:
    """Scores with all windows, with as many as a canvas needs, and with one; and how lengths follow digits."""
    test = open_set(experiment.data, "test")
    budgets, rho = [], 0.0
    for steps, floor in ((None, 0.0), (None, FLOOR), (1, 0.0)):
        model.set_budget(steps, floor)
        batches = test.evaluation_batches(test.eval_batch, Shard(), CPU)
        found = plain(score(model, batches, costs=True))
        budgets.append({"steps": model.budget().steps, "floor": floor, **found})  # type: ignore[union-attr]
        if floor:
            lengths = collect(model, test.evaluation_batches(test.eval_batch, Shard(), CPU)).length
            rho = spearman(lengths, torch.from_numpy(haystack_of(train=False).digits)).rho
    model.set_budget(threshold=0.0)
    return {"budgets": budgets, "rho": rho}


def _train(
    experiments: Mapping[Any, Experiment], out: Path, progress: Progress
) -> tuple[dict[str, Any], dict[Any, list[tuple[int, Score]]]]:
    """Trains all of them, in turns; returns results and learning curves by name."""
    trainers, curves, seconds = {}, {}, {}
    with ExitStack() as held:
        for name, experiment in experiments.items():
            held.enter_context(new_folder(out / name, experiment, "cpu", progress.message))
            trainers[name] = Trainer(experiment)
            curves[name] = [(0, trainers[name].evaluate())]
            seconds[name] = 0.0
        steps = {name: experiment.optimizer.steps for name, experiment in experiments.items()}
        notes = dict.fromkeys(trainers, "")
        while any(trainer.step < steps[name] for name, trainer in trainers.items()):
            for name, trainer in trainers.items():
                began = time.perf_counter()
                for _ in trainer.train(trainer.experiment.evaluate_every):
                    progress.update(name, trainer.step, steps[name], notes[name])
                seconds[name] += time.perf_counter() - began
                found = trainer.evaluate()
                curves[name].append((trainer.step, found))
                notes[name] = describe(found)
                progress.update(name, trainer.step, steps[name], notes[name])
        results: dict[str, Any] = {}
        for name, trainer in trainers.items():
            lines = [json.dumps({"kind": "validation", "step": step, **plain(each)}) for step, each in curves[name]]
            (out / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            results[name] = finalize(trainer, out / name, seconds[name])
    return results, curves
