"""Several runs over the same batches, side by side: a GPU that one small model leaves idle trains them all.

Images are read and varied once for all. On a GPU the steps of all models are branches of one CUDA graph, which run at
the same time. A model learns what it would learn alone; only what it draws without a key, as stochastic depth does,
is another sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adatape.config import Experiment
from adatape.data.batch import Batch
from adatape.graph import Tensors, captured, room_to_compile, side_by_side
from adatape.train.distributed import local_device
from adatape.train.folder import new_folder
from adatape.train.loop import Stats, Trainer
from adatape.train.run import Record, Watch
from adatape.train.stop import Stop, Stopped

COMPILED_FOR_EACH = 4  # in training and scoring, with the last batch of a set, and one to spare


def common(experiment: Experiment) -> dict[str, Any]:
    """What runs must have in common to learn from the same batches in one process."""
    settings = experiment.optimizer
    return {
        "data": experiment.data,
        "seed": experiment.seed,
        "optimizer.batch": settings.batch,
        "optimizer.steps": settings.steps,
        "engine.deterministic": experiment.engine.deterministic,
    }


def fleets(experiments: Sequence[Experiment], most: int) -> list[list[int]]:
    """Places of experiments that can train together, at most so many at once, in their order."""
    groups: dict[str, list[int]] = {}
    for place, experiment in enumerate(experiments):
        groups.setdefault(repr(common(experiment)), []).append(place)
    return [group[i : i + most] for group in groups.values() for i in range(0, len(group), most)]


class Fleet:
    """Trainers in step with one another."""

    def __init__(self, experiments: Sequence[Experiment], device: str | torch.device) -> None:
        _check_alike(experiments)
        first = Trainer(experiments[0], device)
        self.trainers = [first, *(Trainer(other, device, beside=first) for other in experiments[1:])]
        on_gpu = first.device.type == "cuda"
        self.streams = [torch.cuda.Stream() for _ in self.trainers] if on_gpu else []
        self.update = captured(self._update) if on_gpu else self._update

    def train(self) -> Iterator[list[Stats]]:
        """From the first step to the last: what each trainer's step did."""
        first = self.trainers[0]
        for trainer in self.trainers:
            trainer.model.train()
        for _, batch in zip(range(first.experiment.optimizer.steps), first.task.batches(0), strict=False):
            for trainer in self.trainers:
                trainer.stepper.set_rate(trainer.step)
            first.seed_noise()
            (rows,) = self.update(*batch)
            for trainer in self.trainers:
                trainer.step += 1
            yield [Stats(*row.unbind()) for row in rows]

    def _update(self, *batch: Tensor) -> Tensors:
        steps = [partial(trainer.take_step, Batch(*batch)) for trainer in self.trainers]
        return (torch.stack(side_by_side(steps, self.streams)),)


def run_together(
    experiments: Sequence[Experiment], folders: Sequence[Path], device: str, watch: Watch = lambda _: None
) -> list[dict[str, Any]]:
    """As `run` for each, in folders that look the same; `watch` sees the first. What is stopped is not resumed.

    A run that fails leaves `{"error": why}` in place of its result, and the others go on. Times are those of all.
    """
    with ExitStack() as held:
        with _room_for(experiments), Stop() as stop:
            fleet = Fleet(experiments, local_device(device))
            for experiment, folder in zip(experiments, folders, strict=True):
                held.enter_context(new_folder(folder, experiment, device, begun=lambda: fleet.trainers[0].step > 0))
            watches = [watch, *[lambda _: None] * (len(folders) - 1)]
            records = [Record(*each, facts={}) for each in zip(fleet.trainers, folders, watches, strict=True)]
            errors: dict[Record, str] = {}
            with ExitStack() as open_records:
                for record in records:
                    open_records.enter_context(record)
                for step, each in enumerate(fleet.train(), 1):
                    _note(records, each, errors)
                    if stop.code is not None and step < experiments[0].optimizer.steps:
                        raise Stopped(stop.code, f"stopped at step {step}; runs side by side begin anew")
            seconds = records[0].seconds
        return [
            {"error": errors[record]} if record in errors else record.conclude(seconds=seconds, together=len(records))
            for record in records
        ]


def _note(records: Sequence[Record], each: Sequence[Stats], errors: dict[Record, str]) -> None:
    for record, stats in zip(records, each, strict=True):
        if record not in errors:
            try:
                record.after(stats)
            except ValueError as error:  # its loss is no number any more
                errors[record] = str(error)
    if records[0].trainer.step % records[0].experiment.evaluate_every == 0:
        for record in records:
            record.restart_clock()


def _room_for(experiments: Sequence[Experiment]) -> AbstractContextManager[None]:
    ways = {experiment.engine.compile for experiment in experiments}
    if ways == {False}:
        return nullcontext()
    if True in ways:
        torch.compiler.reset()  # an earlier fleet's graphs would take up the room; those of blocks serve again
    return room_to_compile(COMPILED_FOR_EACH * len(experiments))


def _check_alike(experiments: Sequence[Experiment]) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}; runs side by side are for one process")
    theirs = common(experiments[0])
    for experiment in experiments:
        if experiment.stop_at is not None:
            raise ValueError(
                f"stop_at is {experiment.stop_at}; runs side by side take all their steps, so leave it out"
            )
        for name, value in common(experiment).items():
            if value != theirs[name]:
                raise ValueError(f"{name} is {value}; beside a run with {theirs[name]} it must be the same")
