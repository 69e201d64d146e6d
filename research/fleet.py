"""Trains several small models at the same time on one GPU.

On a GPU the steps of all models are parallel branches of one CUDA graph. Runs that have data, seed and batch in common
share their batches, so that images are read and augmented once for all of them. Results equal those of single runs,
except for random numbers drawn without a key (stochastic depth). SIGTERM saves all of them, and `--resume` goes on.

    python research/fleet.py CONFIG.json --over seed=0,1,2 --over optimizer.lr=1e-3,3e-4 --together 8 --out runs/fleet
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adatape.config import Experiment
from adatape.cuda_graphs import Tensors, cuda_graphed, raised_recompile_limit
from adatape.data.batch import Batch
from adatape.train.checkpoint import checkpoints
from adatape.train.folder import CHECKPOINTS, check_same, load_config, new_folder
from adatape.train.lock import write_lock
from adatape.train.parallel import local_device
from adatape.train.run import OnStatus, RunLogger, restore
from adatape.train.stop import Stop, Stopped
from adatape.train.sweep import combinations
from adatape.train.task import Task, build_for
from adatape.train.trainer import Stats, Trainer

SHOWN = ("accuracy", "length_mean", "gflops", "steps", "error")
COMPILED_FOR_EACH = 4  # graphs per model: training, evaluation, the last batch of a set, and one spare


def in_step(experiment: Experiment) -> dict[str, Any]:
    """The fields that must be equal for runs that train together."""
    return {"optimizer.steps": experiment.optimizer.steps, "engine.deterministic": experiment.engine.deterministic}


def batches_of(experiment: Experiment) -> str:
    """Equal for runs that share their batches."""
    return repr((experiment.data, experiment.seed, experiment.optimizer.batch))


def fleets(experiments: Sequence[Experiment], most: int, folders: Sequence[Path] = ()) -> list[list[int]]:
    """Groups of indices of experiments that can train together, at most `most` in each; those that share come first.

    Runs that go on in their `folders` are grouped by the step at which they stand, which may differ after a kill.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    stand = [step_in(folder) for folder in folders] or [0] * len(experiments)
    for place, experiment in enumerate(experiments):
        alike = groups.setdefault(repr((in_step(experiment), stand[place])), {})
        alike.setdefault(batches_of(experiment), []).append(place)
    queues = [[place for sharing in alike.values() for place in sharing] for alike in groups.values()]
    return [queue[i : i + most] for queue in queues for i in range(0, len(queue), most)]


def step_in(folder: Path) -> int:
    """The step of a run folder's newest checkpoint; 0 if there is none."""
    found = checkpoints(folder / CHECKPOINTS)
    return int(found[-1].name.removeprefix("step-")) if found else 0


class Fleet:
    """Trainers that take their steps together."""

    def __init__(self, experiments: Sequence[Experiment], device: str | torch.device) -> None:
        _check_alike(experiments)
        self.trainers: list[Trainer] = []
        self.sources: dict[str, Task] = {}  # one for all runs that share batches
        for experiment in experiments:
            known = self.sources.get(batches_of(experiment))
            trainer = Trainer(experiment, device, task=known and _shared(known, experiment))
            self.sources.setdefault(batches_of(experiment), trainer.task)
            self.trainers.append(trainer)
        on_gpu = self.trainers[0].device.type == "cuda"
        self.streams = [torch.cuda.Stream() for _ in self.trainers] if on_gpu else []
        self.update = cuda_graphed(self._update) if on_gpu else self._update

    def train(self) -> Iterator[list[Stats]]:
        """Trains all steps that are left; yields the figures of every trainer."""
        first, taken = self.trainers[0], [trainer.step for trainer in self.trainers]
        if len(set(taken)) > 1:
            raise ValueError(f"the runs stand at steps {taken}; they must be at the same one: remove their folders")
        for trainer in self.trainers:
            trainer.model.train()
        batches = zip(*(task.batches(first.step) for task in self.sources.values()), strict=True)  # endless
        for _, each in zip(range(first.step, first.experiment.optimizer.steps), batches, strict=False):
            for trainer in self.trainers:
                trainer.stepper.set_rate(trainer.step)
            first.seed_noise()
            (rows,) = self.update(*(part for batch in each for part in batch))
            for trainer in self.trainers:
                trainer.step += 1
            yield [Stats(*row.unbind()) for row in rows]

    def _update(self, *parts: Tensor) -> Tensors:
        pieces = [Batch(*parts[i : i + len(Batch._fields)]) for i in range(0, len(parts), len(Batch._fields))]
        batches = dict(zip(self.sources, pieces, strict=True))
        steps = [partial(trainer.take_step, batches[batches_of(trainer.experiment)]) for trainer in self.trainers]
        return (torch.stack(side_by_side(steps, self.streams)),)


def side_by_side(calls: Sequence[Callable[[], Tensor]], streams: Sequence[torch.cuda.Stream]) -> list[Tensor]:
    """Runs each call on its own stream, so that a captured graph has parallel branches; without streams in sequence."""
    if not streams:
        return [call() for call in calls]
    here, given = torch.cuda.current_stream(), []
    for call, stream in zip(calls, streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            given.append(call())
    for stream in streams:
        here.wait_stream(stream)
    return given


def _shared(task: Task, experiment: Experiment) -> Task:
    """One experiment's data with another's model."""
    return task._replace(build=lambda weights: build_for(experiment, weights))


def run_together(
    experiments: Sequence[Experiment],
    folders: Sequence[Path],
    device: str,
    watch: OnStatus = lambda _: None,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """As `run` for each experiment, with the same folders; `watch` gets the first run.

    The result of a failed run is `{"error": why}`, and the others continue. Times are those of all runs together.
    """
    with ExitStack() as held:
        with _room_for(experiments), Stop() as stop:
            fleet = Fleet(experiments, local_device(device))
            facts = [
                held.enter_context(_folder_of(*each, device, resume))
                for each in zip(fleet.trainers, folders, strict=True)
            ]
            watches = [watch, *[lambda _: None] * (len(folders) - 1)]
            loggers = [RunLogger(*each) for each in zip(fleet.trainers, folders, watches, facts, strict=True)]
            errors: dict[RunLogger, str] = {}
            with ExitStack() as open_loggers:
                for logger in loggers:
                    open_loggers.enter_context(logger)
                for each in fleet.train():
                    _note(loggers, each, errors)
                    step = fleet.trainers[0].step
                    if stop.code is not None and step < experiments[0].optimizer.steps:
                        _save(loggers)
                        raise Stopped(stop.code, f"stopped at step {step} and saved")
            seconds = loggers[0].seconds
        return [
            {"error": errors[logger]} if logger in errors else logger.finalize(seconds=seconds, together=len(loggers))
            for logger in loggers
        ]


@contextmanager
def _folder_of(trainer: Trainer, folder: Path, device: str, resume: bool) -> Iterator[dict[str, Any]]:
    """Holds the folder of a new run, or of one that goes on from its checkpoint; gives the facts saved with that."""
    if resume and (folder / "config.json").is_file():
        check_same(folder, trainer.experiment)
        with write_lock(folder, print):
            yield restore(trainer, folder, print)
    else:
        with new_folder(folder, trainer.experiment, device, begun=lambda: trainer.step > 0):
            yield {}


def _save(loggers: Sequence[RunLogger]) -> None:
    for logger in loggers:
        logger.save()
    for logger in loggers:
        logger.saver.wait()


def _note(loggers: Sequence[RunLogger], each: Sequence[Stats], errors: dict[RunLogger, str]) -> None:
    for logger, stats in zip(loggers, each, strict=True):
        if logger not in errors:
            try:
                logger.on_step(stats)
            except ValueError as error:  # non-finite loss
                errors[logger] = str(error)
    if any(logger.trainer.step % logger.experiment.evaluate_every == 0 for logger in loggers):
        for logger in loggers:
            logger.restart_clock()


def _room_for(experiments: Sequence[Experiment]) -> AbstractContextManager[None]:
    ways = {experiment.engine.compile for experiment in experiments}
    if ways == {False}:
        return nullcontext()
    if True in ways:
        torch.compiler.reset()  # graphs of earlier fleets count against the limit; those of blocks are reused
    return raised_recompile_limit(COMPILED_FOR_EACH * len(experiments))


def _check_alike(experiments: Sequence[Experiment]) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}; runs side by side are for one process")
    theirs = in_step(experiments[0])
    for experiment in experiments:
        if experiment.stop_at is not None:
            raise ValueError(
                f"stop_at is {experiment.stop_at}; runs side by side take all their steps, so leave it out"
            )
        for name, value in in_step(experiment).items():
            if value != theirs[name]:
                raise ValueError(f"{name} is {value}; it must be {theirs[name]}, as in the first run")


def sweep_together(
    experiment: Experiment, over: list[str], out: Path, device: str, most: int, resume: bool = False
) -> list[dict[str, Any]]:
    """Trains every combination of fields, at most `most` at a time; one row for each, in their order."""
    grid = combinations(experiment, over)
    rows: list[dict[str, Any]] = [{} for _ in grid]
    every = [out / str(place) for place in range(len(grid))]
    for places in fleets([each for _, each in grid], most, every):
        folders = [every[place] for place in places]
        results = run_together([grid[place][1] for place in places], folders, device, resume=resume)
        for place, result in zip(places, results, strict=True):
            rows[place] = {**grid[place][0], **{key: result[key] for key in SHOWN if key in result}}
    (out / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config.json of an experiment of your own")
    parser.add_argument("--over", action="append", required=True, metavar="FIELD=VALUE,…")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--together", type=int, default=8, help="runs side by side, at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="go on with runs that were stopped")
    given = parser.parse_args(arguments)
    experiment = load_config(given.config, trust=True)
    try:
        rows = sweep_together(experiment, given.over, given.out, given.device, given.together, given.resume)
    except Stopped as stopped:
        parser.exit(stopped.code, f"{stopped}; with --resume all of them go on\n")
    print("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
