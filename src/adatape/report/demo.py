"""The demo: AdaTape and a plain Transformer learn parity side by side."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adatape.config import Experiment, Parity
from adatape.data.parity import held_out_set
from adatape.evaluate.accuracy import Score
from adatape.evaluate.reading import telling_sequence
from adatape.recipes.parity import System, parity_small
from adatape.report.figures import draw_demo
from adatape.report.terminal import TABLE, progress_bar
from adatape.report.training import describe
from adatape.train.folder import load_run, new_folder
from adatape.train.loop import Trainer
from adatape.train.run import conclude, plain

SHOWN = 64  # test sequences to choose a telling one from
SYSTEMS: tuple[System, ...] = ("adatape", "transformer")


def show_demo(out: Path, seed: int) -> dict[str, Any]:
    """Trains both, prints a table, writes `demo.png` and two run folders."""
    _clear(out)
    Console().print("AdaTape and a plain Transformer learn parity, side by side: about a minute on two cores.")
    with ExitStack() as held:
        return _demo(out, seed, held)


def _demo(out: Path, seed: int, held: ExitStack) -> dict[str, Any]:
    trainers, curves, seconds = {}, {}, {}
    for system in SYSTEMS:
        experiment = parity_small(system=system, seed=seed)
        held.enter_context(new_folder(out / system, experiment, "cpu"))
        trainers[system] = Trainer(experiment)
        curves[system] = [(0, trainers[system].evaluate())]
        seconds[system] = 0.0
    _train_side_by_side(trainers, curves, seconds)
    results: dict[str, Any] = {}
    for system, trainer in trainers.items():
        lines = [json.dumps({"kind": "validation", "step": step, **plain(result)}) for step, result in curves[system]]
        (out / system / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        results[system] = conclude(trainer, out / system, seconds[system])
    experiment, model = load_run(out / "adatape")
    sample = telling_sequence(model, held_out_set(_length(experiment), SHOWN))
    picture = draw_demo(out / "demo.png", curves, results["adatape"]["lengths"], *sample)
    _print_table(results, picture)
    summary = {**results, "picture": str(picture), "seconds": sum(seconds.values())}
    (out / "demo.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _train_side_by_side(
    trainers: dict[System, Trainer], curves: dict[System, list[tuple[int, Score]]], seconds: dict[System, float]
) -> None:
    with progress_bar() as bar:
        tasks = {
            system: bar.add_task(f"{system:12s}", total=trainer.experiment.optimizer.steps, note="")
            for system, trainer in trainers.items()
        }
        while any(trainer.step < trainer.experiment.optimizer.steps for trainer in trainers.values()):
            for system, trainer in trainers.items():
                began = time.perf_counter()
                for _ in trainer.train(trainer.experiment.evaluate_every):
                    bar.advance(tasks[system])
                seconds[system] += time.perf_counter() - began
                result = trainer.evaluate()
                curves[system].append((trainer.step, result))
                bar.update(tasks[system], note=describe(result))


def _length(experiment: Experiment) -> int:
    assert isinstance(experiment.data, Parity)
    return experiment.data.length


def _print_table(results: dict[str, Any], picture: Path) -> None:
    table = Table("system", "test accuracy", "tape length", "parameters", "MFLOPs", "training", title="parity", **TABLE)
    for system, result in results.items():
        read = f"{result['length_mean']:.1f} ± {result['length_var'] ** 0.5:.1f}" if system == "adatape" else "–"
        size, work = f"{result['parameters'] / 1e6:.3f} M", f"{result['gflops'] * 1e3:.2f}"
        table.add_row(system, f"{result['accuracy']:.2%}", read, size, work, f"{result['seconds']:.0f} s")
    console = Console()
    console.print(table)
    console.print(f"picture: {picture}", highlight=False)


def _clear(out: Path) -> None:
    """Removes an earlier demo, and nothing else."""
    if (out / "demo.json").is_file():
        shutil.rmtree(out)
    elif out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and is no earlier demo; choose another --out or remove it")
