"""Accuracy or average precision, loss, sequence length and cost over a fixed set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adatape.models.base import Adaptive
from adatape.records import Output


class Score(NamedTuple):
    accuracy: float  # with several labels, the share of samples with all of them right
    loss: float
    length_mean: float  # of the tape
    length_var: float
    lengths: list[int]  # how many samples read 0, 1, 2, … tokens
    sequence_mean: float  # input and tape together
    sequence_max: int
    gflops_mean: float | None = None  # what samples really cost; None when not asked for
    gflops_p50: float | None = None
    gflops_p95: float | None = None
    logits_sha256: str | None = None  # of all samples' float32 logits, in their order; None when not asked for
    mean_ap: float | None = None  # mean of the average precisions that are known; None with one label
    average_precision: dict[str, float | None] | None = None  # by class; None for one without positives


RIGHT, LOSS, LENGTH, MACS = range(4)
DIGEST = hashlib.sha256().digest_size


def score(
    model: Adaptive,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    costs: bool = False,
    digest: bool = False,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
    forward: Callable[..., Any] | None = None,
    names: Sequence[str] | None = None,
) -> Score:
    """One pass in eval mode; the model is left in the mode it was in. `gather` brings other processes' rows.

    `names` are the classes of samples with several labels, whose targets are (b, classes).
    """
    was_training = model.training
    model.eval()
    every, hashes = [torch.empty(0, MACS + 1, dtype=torch.float64)], [torch.empty(0, DIGEST, dtype=torch.uint8)]
    answers = [torch.empty(0, 2, len(names or []))]
    try:
        for x, label in batches:
            rows, logits = _rows(model, forward or model, x, label, costs)
            every.append(rows)
            hashes.extend([_hashes(logits)] if digest else [])
            answers.extend([torch.stack([logits.cpu(), label.cpu()], 1)] if names else [])
    finally:
        model.train(was_training)
    rows = gather(torch.cat(every))
    length = rows[:, LENGTH].long()
    inputs = model.input_tokens()
    gflops = rows[:, MACS] / 1e9
    by_class = None
    if names:
        every_logit, every_label = gather(torch.cat(answers)).unbind(1)
        by_class = precision_by_class(every_logit, every_label, names)
    return Score(
        accuracy=float(rows[:, RIGHT].mean()),
        loss=float(rows[:, LOSS].mean()),
        length_mean=float(rows[:, LENGTH].mean()),
        length_var=float(rows[:, LENGTH].var(correction=0)),
        lengths=torch.bincount(length).tolist(),
        sequence_mean=float(inputs + rows[:, LENGTH].mean()),
        sequence_max=int(inputs + length.max()),
        gflops_mean=float(gflops.mean()) if costs else None,
        gflops_p50=float(gflops.quantile(0.5)) if costs else None,
        gflops_p95=float(gflops.quantile(0.95)) if costs else None,
        logits_sha256=hashlib.sha256(gather(torch.cat(hashes)).numpy().tobytes()).hexdigest() if digest else None,
        mean_ap=mean_precision(by_class) if by_class else None,
        average_precision=by_class,
    )


@torch.no_grad()
def _rows(model: Adaptive, forward: Callable[..., Any], x: Tensor, label: Tensor, costs: bool) -> tuple[Tensor, Tensor]:
    """(b, 4) float64 on the CPU: right, loss, tape length, multiply-adds; and the logits."""
    output: Output = forward(x, output=True)
    logits = output.logits.float()
    right = is_right(logits, label).double()
    loss = _losses(logits, label).double()
    length = torch.zeros_like(right) if output.tape is None else output.tape.length.double()
    macs = model.actual_macs(output).double() if costs else torch.zeros_like(right)
    return torch.stack([column.cpu() for column in (right, loss, length, macs)], 1), logits


def is_right(logits: Tensor, label: Tensor) -> Tensor:
    """(b,) bool: whether the class is right, or every label where there may be several."""
    return logits.argmax(-1) == label if label.dim() == 1 else ((logits > 0) == (label > 0)).all(-1)


def average_precision(scores: Tensor, labels: Tensor) -> float | None:
    """The mean over positives of the precision at their rank, from scores and labels (n,); None without positives.

    Equal scores share the last of their ranks, so that the order of samples does not matter.
    """
    positives = labels > 0
    if not positives.any():
        return None
    _, group, sizes = (-scores.double()).unique(return_inverse=True, return_counts=True)
    right = torch.zeros_like(sizes).index_add(0, group, positives.to(sizes.dtype))
    precision = right.cumsum(0) / sizes.cumsum(0).double()
    return float((precision * right).sum() / positives.sum())


def precision_by_class(scores: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, float | None]:
    """`average_precision` of each column, from (n, classes)."""
    return {name: average_precision(scores[:, n], labels[:, n]) for n, name in enumerate(names)}


def mean_precision(by_class: dict[str, float | None]) -> float | None:
    """The mean over the classes that have positives."""
    known = [each for each in by_class.values() if each is not None]
    return sum(known) / len(known) if known else None


def certainty(logits: Tensor, label: Tensor) -> Tensor:
    """(b,): the probability of the true class, or of all labels being as they are."""
    return logits.softmax(-1).gather(1, label[:, None])[:, 0] if label.dim() == 1 else (-_losses(logits, label)).exp()


def _losses(logits: Tensor, label: Tensor) -> Tensor:
    if label.dim() == 1:
        return F.cross_entropy(logits, label, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, label, reduction="none").sum(-1)


def _hashes(logits: Tensor) -> Tensor:
    """(b, 32): each sample's own, so that processes need not send each other the logits of all classes."""
    rows = [hashlib.sha256(row).digest() for row in logits.cpu().contiguous().numpy()]
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, DIGEST)
