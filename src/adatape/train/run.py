"""Runs an experiment from its first step, or from a checkpoint, to its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adatape.config import Experiment
from adatape.data.workers import deaths_told
from adatape.evaluate.accuracy import Score
from adatape.evaluate.cost import cost, total
from adatape.train.checkpoint import has_identity, newest_good, sweep
from adatape.train.distributed import agreed, joined, local_device, on_first, restarted, whole_state
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
from adatape.train.identity import identity
from adatape.train.journal import Journal
from adatape.train.lock import writing
from adatape.train.loop import Stats, Trainer
from adatape.train.saver import Saver
from adatape.train.stop import Stop, Stopped
from adatape.train.weights import write_weights
from adatape.validation import finite

CONFIRMATIONS = 3  # evaluations in a row that must reach `stop_at`
ASKED_EVERY = 10  # steps between checks of whether any process was asked to stop


class Moment(NamedTuple):
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


Watch = Callable[[Moment], None]
Say = Callable[[str], None]


def run(
    experiment: Experiment, out: Path, device: str, watch: Watch, *, resume: bool = False, say: Say = print
) -> dict[str, Any]:
    """Trains until `stop_at` or the last step, evaluates the test set once, and writes the folder.

    With `resume`, or after a restart by torchrun, it continues from the newest good checkpoint. A folder into which
    another process writes is refused.
    """
    place = local_device(device)
    with joined(place) as part, Stop() as stop, ExitStack() as held:
        resume = (resume or restarted()) and (out / "config.json").is_file()
        if resume:
            on_first(lambda: check_same(out, experiment))
            if (out / RESULT).is_file():
                return _stored_result(out, experiment, say)
            on_first(lambda: held.enter_context(writing(out, say)))
        begun = resume and any((out / CHECKPOINTS).glob("step-*"))
        # Built before the folder is created, so that invalid settings leave no folder.
        trainer = Trainer(experiment, place, part, pretrained=not begun)
        if not resume:
            new = new_folder(out, experiment, device, say, begun=lambda: trainer.step > 0)
            on_first(lambda: held.enter_context(new))
        facts = go_back(trainer, out, say) if resume else {}
        with deaths_told(f"`adatape train {out}` resumes from the newest checkpoint"):
            return carry_out(Record(trainer, out, watch, facts, say), stop)


def _stored_result(out: Path, experiment: Experiment, say: Say) -> dict[str, Any]:
    result, lacking = load_result(out, RESULT_FIGURES), missing_weights(out)
    if lacking:
        say(lacking)
    else:
        on_first(lambda: check_made_by(out / WEIGHTS, experiment))
    return result


def carry_out(record: Record, stop: Stop) -> dict[str, Any]:
    trainer = record.trainer
    steps = 0 if record.met >= CONFIRMATIONS else trainer.experiment.optimizer.steps  # `stop_at` was already met
    with record:
        for stats in trainer.train(steps):
            record.after(stats)
            if record.met >= CONFIRMATIONS:
                break
            if trainer.step < trainer.experiment.optimizer.steps:
                heed(record, stop)
    return record.conclude()


def heed(record: Record, stop: Stop) -> None:
    """Saves and raises Stopped if any process was asked to stop; all processes stop at the same step."""
    trainer = record.trainer
    if trainer.part.world > 1 and trainer.step % ASKED_EVERY:
        return
    if agreed(stop.code is not None, trainer.device):
        record.save()
        record.saver.wait()
        where = f"stopped at step {trainer.step} and saved; `adatape train {record.out}` resumes from there"
        raise Stopped(stop.code or 143, where)


class Record:
    """Logs, evaluates and saves after each step of a trainer."""

    def __init__(self, trainer: Trainer, out: Path, watch: Watch, facts: dict[str, Any], say: Say = print) -> None:
        self.trainer, self.out, self.watch = trainer, out, watch
        self.experiment, self.engine = trainer.experiment, trainer.experiment.engine
        self.met, self.best = facts.get("met", 0), facts.get("best", -1.0)
        self.accuracy: float | None = None  # of the current weights, if evaluated
        self.pending: list[Stats] = []
        beside = trainer.device.type == "cuda" and trainer.part.world == 1
        self.saver = Saver(out / CHECKPOINTS, self.experiment, beside)
        self.journal = Journal(out, trainer.step, say) if trainer.part.rank == 0 else None
        self.began = time.perf_counter() - facts.get("seconds", 0.0)
        self.logged = time.perf_counter()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.saver.wait()
        finally:
            if self.journal is not None:
                self.journal.close()

    def conclude(self, **facts: Any) -> dict[str, Any]:
        return conclude(self.trainer, self.out, **{"seconds": self.seconds, **facts})

    @property
    def seconds(self) -> float:
        return round(time.perf_counter() - self.began, 3)

    def after(self, stats: Stats) -> None:
        step, last = self.trainer.step, self.trainer.step == self.experiment.optimizer.steps
        self.pending.append(stats)
        self.accuracy, improved = None, False
        evaluate = last or step % self.experiment.evaluate_every == 0
        if evaluate or step % self.engine.log_every == 0:
            self._log()
        elif self.trainer.device.type == "cpu":  # on a GPU this would synchronise at every step
            self.watch(self._look())
        if evaluate:
            improved = self._evaluate()
        if improved or last or step % self.engine.checkpoint_every == 0:
            self.save()

    def _look(self) -> Moment:
        rows = torch.stack([torch.stack(list(stats)) for stats in self.pending]).double().cpu()
        self._check_moving(int(rows[-1, Stats._fields.index("skipped")]))
        mean = Stats(*rows.nanmean(0))
        took = max(1e-9, time.perf_counter() - self.logged)
        return Moment(
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
        moment, last = self._look(), self.pending[-1]
        self.pending, self.logged = [], time.perf_counter()
        self.watch(moment)
        if self.journal is not None:
            figures = {
                name: value for name, value in moment._asdict().items() if name not in ("step", "steps", "score")
            }
            figures |= {"gradient_norm": float(last.norm), "lr": float(self.trainer.stepper.rate)}
            figures |= unreadable(self.trainer)
            self.journal.write("train", moment.step, **figures, seconds=self.seconds)
        self.moment = moment

    def _evaluate(self) -> bool:
        """Evaluates on validation; returns whether it is the best so far."""
        result, moment = self.trainer.evaluate(), self.moment
        limit = self.experiment.stop_at
        self.met = self.met + 1 if limit is not None and result.accuracy >= limit else 0
        improved, self.best = result.accuracy > self.best, max(self.best, result.accuracy)
        self.accuracy = result.accuracy
        if self.journal is not None:
            self.journal.write("validation", moment.step, epoch=moment.epoch, **plain(result), seconds=self.seconds)
            self.journal.histogram("validation/lengths", result.lengths, moment.step)
        self.watch(moment._replace(score=result))
        self.restart_clock()
        return improved

    def restart_clock(self) -> None:
        """Excludes evaluation from the throughput."""
        self.logged = time.perf_counter()

    def save(self) -> None:
        facts = {"accuracy": self.accuracy, "met": self.met, "best": self.best, "seconds": self.seconds}
        self.saver.save(self.trainer.step, self.trainer.state(), facts)


def go_back(trainer: Trainer, out: Path, say: Say) -> dict[str, Any]:
    """Loads the newest good checkpoint and reports damaged ones; without any checkpoint, starts from step 0."""

    def tell(path: Path, reason: str) -> None:
        if trainer.part.rank == 0:
            say(f"{path.name} is damaged and was skipped: {reason}")

    sweep(out / CHECKPOINTS)  # here too, since a run at its end does not save, and so does not prune, again
    found = newest_good(out / CHECKPOINTS, tell)
    if found is not None:
        if trainer.part.rank == 0 and not has_identity(found):
            say(f"{found.name} does not store its experiment; it is assumed to be this one")
        return trainer.load(found)
    if any((out / CHECKPOINTS).glob("step-*")):
        raise ValueError(f"{out / CHECKPOINTS} has no good checkpoint left; remove {out} to start again")
    return {}


def conclude(trainer: Trainer, out: Path, seconds: float, **facts: Any) -> dict[str, Any]:
    """Saves the weights, evaluates the saved weights on the test set, and writes and returns `result.json`."""
    save_weights(trainer, out)
    experiment, model = load_run(out)
    whole = total(cost(model))
    result = {
        **plain(score_run(experiment, model, trainer.device, trainer.part)),
        "steps": trainer.step,
        "seconds": seconds,
        "samples_per_second": trainer.step * trainer.experiment.optimizer.batch / max(seconds, 1e-9),
        "parameters": whole.parameters,
        "gflops": whole.macs / 1e9,
        **unreadable(trainer),
        **facts,
    }
    on_first(lambda: write(out / RESULT, finite(result)))
    return result


def save_weights(trainer: Trainer, out: Path) -> None:
    """Saves the averaged weights if there are any, else the current ones; every process must call it."""
    with trainer.averaged():
        weights = whole_state(trainer.model)
    on_first(lambda: write_weights(out / WEIGHTS, weights, identity(trainer.experiment).to_json()))


def plain(result: Score) -> dict[str, Any]:
    return {name: value for name, value in result._asdict().items() if value is not None}


def unreadable(trainer: Trainer) -> dict[str, Any]:
    """Counts of images that this process has replaced or converted, if it decodes any."""
    tally = trainer.task.tally
    return {} if tally is None else {"broken_images": len(tally.broken), "converted_images": tally.converted}
