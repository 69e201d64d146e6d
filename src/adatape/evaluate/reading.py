"""What a model reads over a set: each sample's tape, answer and cost, and how often each bank token is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from adatape.config import Experiment
from adatape.data.batch import Shard
from adatape.data.loaders import Labelled
from adatape.data.parity import Sequences
from adatape.data.sets import open_set
from adatape.evaluate.accuracy import certainty
from adatape.models.base import Adaptive
from adatape.records import Output

AT_ONCE = 250
NO_LABEL = "no label"


class Reads(NamedTuple):
    """n samples in the order of their set, all on the CPU; t and k are 0 for a model that reads no tape."""

    label: Tensor  # (n,) int64: the class, or the number of the set of labels
    answer: Tensor  # (n,) int64
    certainty: Tensor  # (n,) probability of the true class or labels
    macs: Tensor  # (n,) int64, multiply-adds that the sample cost
    length: Tensor  # (n,) int64, tape tokens read or steps taken
    taken: Tensor  # (n, t, k) int64, bank tokens of each step, -1 where hidden
    weight: Tensor  # (n, t, k), zero where hidden
    sets: Tensor | None = None  # (sets, classes) 1 or 0: sets of labels that occur; None where there is one label
    logits: Tensor | None = None  # (n, classes) where there are several labels

    def names(self, classes: Sequence[str]) -> list[str]:
        """What labels and answers are called: the classes, or the sets of them."""
        return list(classes) if self.sets is None else [set_name(row, classes) for row in self.sets.numpy()]

    @property
    def right(self) -> Tensor:
        return self.answer == self.label


class ParityExample(NamedTuple):
    """One sequence, and how it was read."""

    symbols: list[int]
    pairs: list[list[int]]
    weights: list[list[float]]
    answer: int


def spread_batches(experiment: Experiment, samples: int, device: torch.device) -> Iterator[Labelled]:
    """At most `samples` of the test set, spread evenly over it, since sets are often sorted by class."""
    if samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1")
    test = open_set(experiment.data, "test").evenly_spaced(samples)
    return test.evaluation_batches(min(AT_ONCE, test.eval_batch), Shard(), device, min(experiment.engine.workers, 2))


@torch.no_grad()
def collect(model: Adaptive, batches: Iterable[tuple[Tensor, Tensor]]) -> Reads:
    """One pass in eval mode; the model is left in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        parts = [_reads(model, x, label) for x, label in batches]
    finally:
        model.train(was_training)
    if not parts:
        raise ValueError("reads of 0 batches; at least 1 is needed")
    steps, merged = (max(part.taken.shape[axis] for part in parts) for axis in (1, 2))
    rows = []
    for part in parts:  # batches whose reading ended early have fewer steps; the rest is hidden
        room = (0, merged - part.taken.shape[2], 0, steps - part.taken.shape[1])
        rows.append((*part[:5], F.pad(part.taken, room, value=-1), F.pad(part.weight, room)))
    found = Reads(*(torch.cat(column) for column in zip(*rows, strict=True)))
    logits = [part.logits for part in parts if part.logits is not None]
    return _by_sets(found._replace(logits=torch.cat(logits))) if logits else found


def numbered_sets(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of (n, classes), and for each row (n,) the number of its set."""
    sets, number = np.unique(np.asarray(labels), axis=0, return_inverse=True)
    return sets, number.reshape(-1)


def set_name(row: np.ndarray, names: Sequence[str]) -> str:
    return ", ".join(names[n] for n in np.flatnonzero(row).tolist()) or NO_LABEL


def _by_sets(reads: Reads) -> Reads:
    sets, number = numbered_sets(torch.cat([reads.label, reads.answer]).numpy())
    label, answer = torch.from_numpy(number).chunk(2)
    return reads._replace(label=label, answer=answer, sets=torch.from_numpy(sets))


def taken_counts(reads: Reads, bank_size: int) -> Int[Tensor, "t c"]:
    """How many samples took each bank token, by step."""
    n, steps, merged = reads.taken.shape
    place = reads.taken.where(reads.taken >= 0, bank_size).transpose(0, 1).reshape(steps, n * merged)
    counts = torch.zeros(steps, bank_size + 1, dtype=torch.int64)  # a place more, for what is hidden
    return counts.scatter_add(1, place, torch.ones_like(place))[:, :bank_size]


def inputs_at(batches: Iterable[tuple[Tensor, Tensor]], places: Iterable[int]) -> dict[int, Tensor]:
    """The samples at these places of a set, on the CPU."""
    wanted, found, start = set(places), {}, 0
    for x, _ in batches:
        for place in sorted(p for p in wanted if start <= p < start + len(x)):
            found[place] = x[place - start].cpu()
        start += len(x)
    return found


@torch.no_grad()
def parity_example(model: Adaptive, data: Sequences) -> ParityExample:
    """The sequence with an odd number of ones whose pairs are most mixed; `model` reads pairs."""
    output = model.eval()(data.symbols, output=True)
    if output.tape is None or output.tape.index.shape[2] != 2:
        raise ValueError("the model reads no pairs; a picture of pairs needs merge = 2")
    both = data.symbols[:, :, None].expand(-1, -1, 2).gather(1, output.tape.index.clamp(min=0))
    mixed = ((both[..., 0] != both[..., 1]) & output.tape.mask).sum(-1)
    chosen = int((mixed * data.label).argmax())
    read = int(output.tape.length[chosen])
    return ParityExample(
        data.symbols[chosen].tolist(),
        output.tape.index[chosen, :read].tolist(),
        output.tape.weight[chosen, :read].tolist(),
        int(output.logits[chosen].argmax()),
    )


def _reads(model: Adaptive, x: Tensor, label: Tensor) -> Reads:
    output: Output = model(x, output=True)
    logits = output.logits.float()
    several, none = label.dim() > 1, torch.zeros(len(label), 0, 0, dtype=torch.int64)
    taken, weight = (none, none.float()) if output.tape is None else (output.tape.index, output.tape.weight.float())
    answer = (logits > 0).long() if several else logits.argmax(-1)
    spent = model.actual_macs(output), model.length_taken(output)
    row = (label.long(), answer, certainty(logits, label), *spent, taken, weight)
    found = Reads(*(column.cpu() for column in row))
    return found._replace(logits=logits.cpu()) if several else found
