"""Trainer: trains one experiment step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from adatape.config import Experiment
from adatape.counter_rng import key_of
from adatape.cuda_graphs import cuda_graphed
from adatape.data.batch import Batch, Shard
from adatape.evaluate.accuracy import Score, is_right, score
from adatape.records import Output
from adatape.train.checkpoint import load, save
from adatape.train.optim import Stepper
from adatape.train.parallel import all_gather_rows, all_reduce, wrap_parallel
from adatape.train.task import Task, task_of
from adatape.validation import check

NOISE = 7  # first word of the key of torch's generator, for dropout and stochastic depth


class Stats(NamedTuple):
    """Figures of one step, as tensors on the device; reading them synchronises."""

    loss: Tensor  # with the length loss
    norm: Tensor  # of the gradient, before clipping
    accuracy: Tensor  # against the most probable class of a mixed label; with several labels, all must be right
    length: Tensor  # mean tape length
    length_sq: Tensor  # mean of its square
    skipped: Tensor  # steps in a row without a finite loss and gradient


class Trainer:
    """Model, optimizer and step of one experiment; a step is a function of weights, seed and step number."""

    def __init__(
        self,
        experiment: Experiment,
        device: str | torch.device = "cpu",
        shard: Shard | None = None,
        task: Task | None = None,  # data and model; None builds them from the experiment
        pretrained: bool = True,  # False skips pretrained weights, for a checkpoint that is loaded next
    ) -> None:
        check(experiment)
        self.experiment, self.device, self.shard, self.step = experiment, torch.device(device), shard or Shard(), 0
        engine, on_gpu = experiment.engine, self.device.type == "cuda"
        torch.set_float32_matmul_precision("high" if on_gpu else "highest")  # scores are read in float64 either way
        torch.use_deterministic_algorithms(engine.deterministic)
        self.task: Task = task or task_of(experiment, self.shard, self.device)
        _check_parts(experiment, self.shard)
        torch.manual_seed(experiment.seed)
        self.model = self.task.build(pretrained).to(self.device)
        if engine.compile == "blocks":
            self.model.compile_blocks()
        self.parallel_model = wrap_parallel(self.model, engine.shard, engine.accumulate)
        self.stepper = Stepper(self.model, experiment.optimizer)
        self.forward = torch.compile(self.parallel_model) if engine.compile is True else self.parallel_model
        self.update = self.take_step
        if on_gpu and self.shard.world == 1:
            replay = cuda_graphed(lambda *batch: (self.take_step(Batch(*batch)),))
            self.update = lambda batch: replay(*batch)[0]

    def train(self, steps: int) -> Iterator[Stats]:
        """Trains at most `steps` steps, and yields the figures of each."""
        steps = min(steps, self.experiment.optimizer.steps - self.step)
        if steps <= 0:
            return
        self.model.train()
        batches = self.task.batches(self.step)
        for _, batch in zip(range(steps), batches, strict=False):  # batches are endless
            self.stepper.set_rate(self.step)
            self.seed_noise()
            stats = self.update(batch)
            self.step += 1
            yield Stats(*stats.unbind())

    def seed_noise(self) -> None:
        """Seeds torch's generator by step, so that dropout does not depend on earlier draws."""
        torch.manual_seed(key_of(NOISE, self.experiment.seed, self.step, self.shard.rank))

    def evaluate(self, on: str = "validation") -> Score:
        """Evaluates the averaged weights if there are any, else the current ones."""
        batches = self.task.test() if on == "test" else self.task.validation()
        with self.averaged(), self._autocast(), torch.compiler.set_stance("force_eager"):  # compiling does not pay here
            forward = self.parallel_model if self.experiment.engine.shard else self.model  # FSDP2's owns its shards
            names = self.task.names if self.experiment.data.several_labels else None
            return score(self.model, batches, gather=all_gather_rows, forward=forward, names=names)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the averaged weights into the model, and the current ones back at the end."""
        names = list(self.stepper.average)
        own = {name: self.stepper.named[name].detach().clone() for name in names}
        self._fill(self.stepper.average)
        try:
            yield
        finally:
            self._fill(own)

    def save(self, folder: Path, facts: dict[str, Any]) -> Path:
        return save(folder, self.step, self.state(), facts, self.experiment)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Loads a checkpoint of this experiment; returns the facts saved with it."""
        facts = load(checkpoint, self.state(), self.experiment)
        self.step = facts["step"]
        return facts

    def state(self) -> dict[str, Tensor]:
        """References to all tensors that are not functions of seed and step."""
        weights = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        return {**weights, **self.stepper.state(), "skipped.row": self.stepper.skipped}

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.stepper.named[name].copy_(value)

    def take_step(self, batch: Batch) -> Tensor:
        """Forward, loss, backward and update; returns `Stats` as one tensor, without synchronising."""
        parts = self.experiment.engine.accumulate
        rows = []
        pieces = zip(*(part.chunk(parts) for part in batch), strict=True)
        for n, piece in enumerate(itertools.starmap(Batch, pieces), 1):
            with self._synchronised(n == parts):
                with self._autocast():
                    output = self.forward(piece.x, output=True, key=piece.key)
                loss = self.model.loss(output, piece.target, self.experiment.ponder_weight, self.experiment.loss)
                (loss / parts).backward()
            rows.append(_row(loss.detach(), output, piece.target, self.experiment.data.several_labels))
        mean = all_reduce(torch.stack(rows).mean(0)) / self.shard.world
        norm = self.stepper.step(mean[0])
        self.stepper.zero_grad()
        return torch.stack([mean[0], norm, *mean[1:], self.stepper.skipped])

    def _synchronised(self, last: bool) -> Any:
        """Averages gradients over processes only at the last piece of a batch."""
        if isinstance(self.parallel_model, FSDPModule):
            self.parallel_model.set_requires_gradient_sync(last)
        if last or not isinstance(self.parallel_model, DistributedDataParallel):
            return nullcontext()
        return self.parallel_model.no_sync()

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.experiment.engine.precision == "bf16")


def _row(loss: Tensor, output: Output, target: Tensor, several: bool) -> Tensor:
    label = target if target.dim() == 1 or several else target.argmax(-1)
    right = is_right(output.logits, label).float().mean()
    length = torch.zeros_like(output.ponder) if output.tape is None else output.tape.length.float()
    return torch.stack([loss.float(), right, length.mean(), length.square().mean()])


def _check_parts(experiment: Experiment, shard: Shard) -> None:
    batch, pieces = experiment.optimizer.batch, shard.world * experiment.engine.accumulate
    if batch % pieces:
        raise ValueError(
            f"batch is {batch}; with {shard.world} processes and accumulate {experiment.engine.accumulate} "
            f"it must be a multiple of {pieces}"
        )
