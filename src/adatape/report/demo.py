"""The demo: AdaTape and a plain Transformer learn parity side by side."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adatape.data.parity import held_out_set
from adatape.evaluate.accuracy import Score
from adatape.evaluate.progress import SILENT, Progress
from adatape.evaluate.reading import parity_example
from adatape.evaluate.result import Result, to_plain
from adatape.recipes.parity import System, parity_small
from adatape.report.figures import draw_demo
from adatape.train.folder import load_run, new_folder, write
from adatape.train.launch import describe
from adatape.train.run import finalize, plain
from adatape.train.trainer import Trainer

SHOWN = 64  # test sequences to choose a telling one from
SYSTEMS: tuple[System, ...] = ("adatape", "transformer")


@dataclass(frozen=True)
class DemoResult(Result):
    results: dict[str, dict[str, Any]]
    """`result.json` of each system"""
    picture: Path
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {**to_plain(self.results), "picture": str(self.picture), "seconds": self.seconds}


def write_demo(out: Path = Path("runs/demo"), seed: int = 0, progress: Progress = SILENT) -> DemoResult:
    """Trains both, about a minute on two cores; writes `demo.png`, `demo.json` and two run folders."""
    _clear(out)
    progress.message("AdaTape and a plain Transformer learn parity, side by side: about a minute on two cores.")
    trainers, curves, seconds = {}, {}, {}
    with ExitStack() as held:
        for system in SYSTEMS:
            experiment = parity_small(system=system, seed=seed)
            held.enter_context(new_folder(out / system, experiment, "cpu", progress.message))
            trainers[system] = Trainer(experiment)
            curves[system] = [(0, trainers[system].evaluate())]
            seconds[system] = 0.0
        _train_side_by_side(trainers, curves, seconds, progress)
        results: dict[str, Any] = {}
        for system, trainer in trainers.items():
            lines = [json.dumps({"kind": "validation", "step": step, **plain(score)}) for step, score in curves[system]]
            (out / system / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            results[system] = finalize(trainer, out / system, seconds[system])
    experiment, model = load_run(out / "adatape")
    sample = parity_example(model, held_out_set(experiment.data.sequence_length or 0, SHOWN))
    picture = draw_demo(out / "demo.png", curves, results["adatape"]["lengths"], *sample)
    summary = DemoResult(results, picture, sum(seconds.values()))
    write(out / "demo.json", summary.as_dict())
    return summary


def _train_side_by_side(
    trainers: dict[System, Trainer],
    curves: dict[System, list[tuple[int, Score]]],
    seconds: dict[System, float],
    progress: Progress,
) -> None:
    steps = {system: trainer.experiment.optimizer.steps for system, trainer in trainers.items()}
    notes = dict.fromkeys(trainers, "")
    while any(trainer.step < steps[system] for system, trainer in trainers.items()):
        for system, trainer in trainers.items():
            began = time.perf_counter()
            for _ in trainer.train(trainer.experiment.evaluate_every):
                progress.update(system, trainer.step, steps[system], notes[system])
            seconds[system] += time.perf_counter() - began
            score = trainer.evaluate()
            curves[system].append((trainer.step, score))
            notes[system] = describe(score)
            progress.update(system, trainer.step, steps[system], notes[system])


def _clear(out: Path) -> None:
    """Removes an earlier demo, and nothing else."""
    if (out / "demo.json").is_file():
        shutil.rmtree(out)
    elif out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and is no earlier demo; choose another --out or remove it")
