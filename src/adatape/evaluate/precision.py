"""Average precision of each class, for images with several labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
