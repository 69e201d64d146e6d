"""Runs an experiment from its first step, or from a checkpoint, to its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adatape.config import Experiment
from adatape.data.workers import advise_on_worker_death
from adatape.evaluate.accuracy import Score
from adatape.evaluate.cost import cost, total
from adatape.evaluate.result import main_figure
from adatape.train.checkpoint import has_identity, newest_good, remove_leftovers
from adatape.train.duration import warn_if_too_large
from adatape.train.evaluate import score_run
from adatape.train.folder import (
    CHECKPOINTS,
    RESULT,
    RESULT_FIGURES,
    WEIGHTS,
    check_made_by,
    check_same,
    load_result,
    load_run,
    missing_weights,
    new_folder,
    write,
)
from adatape.train.identity import check_classes, identity, told_classes
from adatape.train.lock import write_lock
from adatape.train.logger import MetricsWriter
from adatape.train.parallel import any_process, full_state_dict, local_device, on_rank_zero, process_group, restarted
from adatape.train.saver import Saver
from adatape.train.stop import Stop, Stopped
from adatape.train.trainer import Stats, Trainer
from adatape.train.weights import write_weights
from adatape.validation import finite

CONFIRMATIONS = 3  # evaluations in a row that must reach `stop_at`
STOP_CHECK_EVERY = 10  # steps between checks of whether any process has received a signal to stop


class TrainStatus(NamedTuple):
    """The progress of a run, for display; figures are means since the last logged line."""

    step: int
    steps: int
    epoch: float | None
    loss: float
    accuracy: float
    length_mean: float
    length_sd: float
    samples_per_second: float
    score: Score | None = None


OnStatus = Callable[[TrainStatus], None]
Say = Callable[[str], None]


def run(
    experiment: Experiment, out: Path, device: str, on_status: OnStatus, *, resume: bool = False, say: Say = print
) -> dict[str, Any]:
    """Trains until `stop_at` or the last step, evaluates the test set once, and writes the folder.

    With `resume`, or after a restart by torchrun, it continues from the newest good checkpoint. A folder into which
    another process writes is refused.
    """
    place = local_device(device)
    with process_group(place) as shard, Stop() as stop, ExitStack() as stack:
        resume = (resume or restarted()) and (out / "config.json").is_file()
        if resume:
            on_rank_zero(lambda: check_same(out, experiment))
            if (out / RESULT).is_file():
                return _stored_result(out, experiment, say)
            on_rank_zero(lambda: stack.enter_context(write_lock(out, say)))
        begun = resume and any((out / CHECKPOINTS).glob("step-*"))
        # Built before the folder is created, so that invalid settings leave no folder.
        trainer = Trainer(experiment, place, shard, pretrained=not begun)
        if not resume:
            new = new_folder(out, experiment, device, say, begun=lambda: trainer.step > 0)
            on_rank_zero(lambda: stack.enter_context(new))
        facts = restore(trainer, out, say) if resume else {}
        warn_if_too_large(trainer, say)
        with advise_on_worker_death(f"`adatape train {out}` resumes from the newest checkpoint"):
            return train_loop(RunLogger(trainer, out, on_status, facts, say), stop)


def _stored_result(out: Path, experiment: Experiment, say: Say) -> dict[str, Any]:
    result, lacking = load_result(out, RESULT_FIGURES), missing_weights(out)
    if lacking:
        say(lacking)
    else:
        on_rank_zero(lambda: check_made_by(out / WEIGHTS, experiment))
    return result


def train_loop(logger: RunLogger, stop: Stop) -> dict[str, Any]:
    trainer = logger.trainer
    steps = 0 if logger.met >= CONFIRMATIONS else trainer.experiment.optimizer.steps  # `stop_at` was already met
    with logger:
        for stats in trainer.train(steps):
            logger.on_step(stats)
            if logger.met >= CONFIRMATIONS:
                break
            if trainer.step < trainer.experiment.optimizer.steps:
                check_stop(logger, stop)
    return logger.finalize()


def check_stop(logger: RunLogger, stop: Stop) -> None:
    """Saves and raises Stopped if any process has received a signal to stop; all stop at the same step."""
    trainer = logger.trainer
    if trainer.shard.world > 1 and trainer.step % STOP_CHECK_EVERY:
        return
    if any_process(stop.code is not None, trainer.device):
        logger.save()
        logger.saver.wait()
        where = f"stopped at step {trainer.step} and saved; `adatape train {logger.out}` resumes from there"
        raise Stopped(stop.code or 143, where)


class RunLogger:
    """Logs, evaluates and saves after each step of a trainer."""

    def __init__(
        self, trainer: Trainer, out: Path, on_status: OnStatus, facts: dict[str, Any], say: Say = print
    ) -> None:
        self.trainer, self.out, self.on_status = trainer, out, on_status
        self.experiment, self.engine = trainer.experiment, trainer.experiment.engine
        self.met, self.best = facts.get("met", 0), facts.get("best", -1.0)
        self.accuracy: float | None = None  # of the current weights, if evaluated; mean AP with several labels
        self.pending: list[Stats] = []
        background = trainer.device.type == "cuda" and trainer.shard.world == 1
        self.saver = Saver(out / CHECKPOINTS, self.experiment, background)
        self.writer = MetricsWriter(out, trainer.step, say) if trainer.shard.rank == 0 else None
        self.began = time.perf_counter() - facts.get("seconds", 0.0)
        self.logged = time.perf_counter()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.saver.wait()
        finally:
            if self.writer is not None:
                self.writer.close()

    def finalize(self, **facts: Any) -> dict[str, Any]:
        return finalize(self.trainer, self.out, **{"seconds": self.seconds, **facts})

    @property
    def seconds(self) -> float:
        return round(time.perf_counter() - self.began, 3)

    def on_step(self, stats: Stats) -> None:
        step, last = self.trainer.step, self.trainer.step == self.experiment.optimizer.steps
        self.pending.append(stats)
        self.accuracy, improved = None, False
        evaluate = last or step % self.experiment.evaluate_every == 0
        if evaluate or step % self.engine.log_every == 0:
            self._log()
        elif self.trainer.device.type == "cpu":  # on a GPU this would synchronise at every step
            self.on_status(self._status())
        if evaluate:
            improved = self._evaluate()
        if improved or last or step % self.engine.checkpoint_every == 0:
            self.save()

    def _status(self) -> TrainStatus:
        rows = torch.stack([torch.stack(list(stats)) for stats in self.pending]).double().cpu()
        self._check_moving(int(rows[-1, Stats._fields.index("skipped")]))
        mean = Stats(*rows.nanmean(0))
        took = max(1e-9, time.perf_counter() - self.logged)
        return TrainStatus(
            step=self.trainer.step,
            steps=self.experiment.optimizer.steps,
            epoch=self.trainer.task.epoch(self.trainer.step),
            loss=float(mean.loss),
            accuracy=float(mean.accuracy),
            length_mean=float(mean.length),
            length_sd=max(0.0, float(mean.length_sq) - float(mean.length) ** 2) ** 0.5,
            samples_per_second=len(self.pending) * self.experiment.optimizer.batch / took,
        )

    def _check_moving(self, skipped: int) -> None:
        if skipped >= self.engine.bad_steps:
            raise ValueError(
                f"loss or gradient was not finite in the {skipped} steps up to step {self.trainer.step}, which changed "
                f"no weight (bad_steps is {self.engine.bad_steps}); lower the rate or check the data. "
                f"Good checkpoints are in {self.out / CHECKPOINTS}"
            )

    def _log(self) -> None:
        status, last = self._status(), self.pending[-1]
        self.pending, self.logged = [], time.perf_counter()
        self.on_status(status)
        if self.writer is not None:
            figures = {
                name: value for name, value in status._asdict().items() if name not in ("step", "steps", "score")
            }
            figures |= {"gradient_norm": float(last.norm), "lr": float(self.trainer.stepper.rate)}
            figures |= unreadable(self.trainer)
            self.writer.write("train", status.step, **figures, seconds=self.seconds)
        self.status = status

    def _evaluate(self) -> bool:
        """Evaluates on validation; returns whether it is the best so far."""
        result, status = self.trainer.evaluate(), self.status
        limit = self.experiment.stop_at
        reached: float = plain(result)[main_figure(plain(result))]
        self.met = self.met + 1 if limit is not None and reached >= limit else 0
        improved, self.best = reached > self.best, max(self.best, reached)
        self.accuracy = reached
        if self.writer is not None:
            self.writer.write("validation", status.step, epoch=status.epoch, **plain(result), seconds=self.seconds)
            self.writer.histogram("validation/lengths", result.lengths, status.step)
        self.on_status(status._replace(score=result))
        self.restart_clock()
        return improved

    def restart_clock(self) -> None:
        """Excludes evaluation from the throughput."""
        self.logged = time.perf_counter()

    def save(self) -> None:
        facts = {"accuracy": self.accuracy, "met": self.met, "best": self.best, "seconds": self.seconds}
        facts["classes"] = told_classes(self.trainer.task.names)
        self.saver.save(self.trainer.step, self.trainer.state(), facts)


def restore(trainer: Trainer, out: Path, say: Say) -> dict[str, Any]:
    """Loads the newest good checkpoint and reports damaged ones; without any checkpoint, starts from step 0."""

    def tell(path: Path, reason: str) -> None:
        if trainer.shard.rank == 0:
            say(f"{path.name} is damaged and was skipped: {reason}")

    remove_leftovers(out / CHECKPOINTS)  # here too, since a run at its end does not save, and so does not prune, again
    found = newest_good(out / CHECKPOINTS, tell)
    if found is not None:
        if trainer.shard.rank == 0 and not has_identity(found):
            say(f"{found.name} does not store its experiment; it is assumed to be this one")
        facts = trainer.load(found)
        check_classes(found, facts.get("classes"), trainer.task.names)
        return facts
    if any((out / CHECKPOINTS).glob("step-*")):
        raise ValueError(f"{out / CHECKPOINTS} has no good checkpoint left; remove {out} to start again")
    return {}


def finalize(trainer: Trainer, out: Path, seconds: float, **facts: Any) -> dict[str, Any]:
    """Saves the weights, averaged if there is an average, evaluates what was saved on the test set, and returns the
    `result.json` that it writes; every process must call it."""
    with trainer.averaged():
        weights = full_state_dict(trainer.model)
    named = {} if told_classes(trainer.task.names) is None else {"classes": trainer.task.names}
    made_by = {**identity(trainer.experiment).to_json(), **named}
    on_rank_zero(lambda: write_weights(out / WEIGHTS, weights, made_by))
    experiment, model = load_run(out)
    whole = total(cost(model))
    result = {
        **plain(score_run(experiment, model, trainer.device, trainer.shard)),
        "steps": trainer.step,
        "seconds": seconds,
        "samples_per_second": trainer.step * trainer.experiment.optimizer.batch / max(seconds, 1e-9),
        "parameters": whole.parameters,
        "gflops": whole.macs / 1e9,
        **unreadable(trainer),
        **facts,
    }
    on_rank_zero(lambda: write(out / RESULT, finite(result)))
    return result


def plain(result: Score) -> dict[str, Any]:
    return {name: value for name, value in result._asdict().items() if value is not None}


def unreadable(trainer: Trainer) -> dict[str, Any]:
    """Counts of images that this process has replaced or converted, if it decodes any."""
    tally = trainer.task.tally
    return {} if tally is None else {"broken_images": len(tally.broken), "converted_images": tally.converted}
