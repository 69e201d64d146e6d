"""Evaluates a finished run's saved weights on the test set, in float32 and in batches that do not depend on training.

Both `result.json` and `adatape eval` use it, so on the same device they give the same logits to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from adatape.config import Experiment
from adatape.data.batch import Shard
from adatape.data.loaders import Labelled, fixed_chunks
from adatape.data.sets import LabelledSet, open_set
from adatape.evaluate.accuracy import Score, score
from adatape.models.base import Adaptive
from adatape.train.parallel import all_gather_rows


def score_run(
    experiment: Experiment, model: Adaptive, device: torch.device, shard: Shard | None = None, length: int | None = None
) -> Score:
    """Evaluates a loaded model on the test set; each process evaluates its part of the batches."""
    test = _test_set(experiment, length)
    names = test.names if experiment.data.several_labels else None
    batches = _shard_of(test, experiment, device, shard or Shard())
    with _plain_float32():
        return score(model.to(device), batches, costs=True, digest=True, gather=all_gather_rows, names=names)


def test_batches(experiment: Experiment, length: int | None, device: torch.device) -> Iterator[Labelled]:
    return _shard_of(_test_set(experiment, length), experiment, device, Shard())


def _shard_of(test: LabelledSet, experiment: Experiment, device: torch.device, shard: Shard) -> Iterator[Labelled]:
    """A process's share of the batches of a single process, so that they do not depend on the number of processes."""
    return test.evaluation_batches(test.eval_batch, shard, device, experiment.engine.workers, fixed_chunks)


def _test_set(experiment: Experiment, length: int | None) -> LabelledSet:
    data = experiment.data
    if length is not None:
        data = dataclasses.replace(data, length=length)  # type: ignore[arg-type]  # `load_run` refuses length for images
    return open_set(data, "test")


@contextmanager
def _plain_float32() -> Iterator[None]:
    """Resets matmul precision and determinism, which Trainer sets for the whole process."""
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
