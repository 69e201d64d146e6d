"""Few-shot accuracy: ridge regression from frozen features to classes, solved exactly from a few samples of each.

The protocol is that of scenic, whose trainer the paper used, and of big_vision: features standardised over the support,
a constant feature of 100 as a bias that is hardly regularised, targets ±1. Where the two differ is a choice of the
caller: scenic takes the first samples of each class (`seeds=(None,)`) and a list of `l2s`, of which it reports the best
over all data sets; big_vision takes three random supports and one l2 of 2¹⁰, the defaults here. All of it is in float64
on the CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from adatape.counter_rng import key_of, keys_of

BIAS = 100.0
SMALLEST_SD = 1e-5
ROWS_AT_ONCE = 1024


class FewShot(NamedTuple):
    """One support and one l2."""

    shots: int
    l2: float
    seed: int | None  # None: the first samples of each class
    accuracy: float


class Spread(NamedTuple):
    """One number of shots and one l2, over the seeds."""

    shots: int
    l2: float
    seeds: int
    mean: float
    sd: float | None  # None where a single seed shows no spread


def few_shot(
    train_features: Float[Tensor, "n d"],
    train_labels: Int[Tensor, "n"],
    test_features: Float[Tensor, "m d"],
    test_labels: Int[Tensor, "m"],
    shots: Sequence[int],
    l2s: Sequence[float] = (2.0**10,),
    seeds: Sequence[int | None] = (0, 1, 2),
    *,
    classes: int,
) -> list[FewShot]:
    """Top-1 on the whole test set for each number of shots, seed and l2."""
    _check("train", train_features, train_labels, classes)
    _check("test", test_features, test_labels, classes)
    rows = []
    for count, seed in ((count, seed) for count in shots for seed in seeds):
        chosen = pick_support(train_labels, count, seed, classes)
        scale = scale_of(train_features[chosen])
        targets = signed_targets(train_labels[chosen], classes)
        x = with_bias(scale(train_features[chosen]))
        weights = [ridge(x, targets, l2s[0])] if len(l2s) == 1 else list(ridge_path(x, targets, l2s))
        accuracies = _accuracies(weights, scale, test_features, test_labels)
        rows += [FewShot(count, l2, seed, accuracy) for l2, accuracy in zip(l2s, accuracies, strict=True)]
    return rows


def pick_support(
    labels: Int[Tensor, "n"], shots: int, seed: int | None, classes: int | None = None
) -> Int[Tensor, "chosen"]:
    """Positions of `shots` samples of each class, class by class: the first ones, or with a seed random ones.

    Under one seed a smaller support is part of every larger one.
    """
    if shots < 1:
        raise ValueError(f"shots is {shots}; it must be at least 1")
    counts = torch.bincount(labels, minlength=classes or 0)
    if (counts < shots).any():
        poorest = int(counts.argmin())
        raise ValueError(f"class {poorest} has {int(counts[poorest])} training samples; shots is {shots}")
    order = torch.arange(len(labels))
    if seed is not None:
        order = keys_of(key_of(seed), order).argsort()
    grouped = order[labels[order].argsort(stable=True)]
    starts = counts.cumsum(0) - counts
    return grouped[(starts[:, None] + torch.arange(shots)).flatten()]


class Scale(NamedTuple):
    """What brings each feature of a support to mean 0 and standard deviation 1; anything else goes along."""

    mean: Tensor  # (d,) float64
    sd: Tensor  # (d,) float64

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return x.double().sub(self.mean).div_(self.sd)


def scale_of(support: Float[Tensor, "n d"]) -> Scale:
    """A little is added to each deviation, as the protocol has it, so that constant features stay finite."""
    sd, mean = torch.std_mean(support.double(), 0, correction=0)
    return Scale(mean, sd + SMALLEST_SD)


def with_bias(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d+1"]:
    """So large a constant that the penalty on its weight hardly counts."""
    return F.pad(x, (0, 1), value=BIAS)


def signed_targets(labels: Int[Tensor, "n"], classes: int) -> Float[Tensor, "n {classes}"]:
    """1 for the class, -1 for all others."""
    return 2.0 * F.one_hot(labels.long(), classes).double() - 1.0


def ridge(x: Float[Tensor, "n d"], y: Float[Tensor, "n k"], l2: float) -> Float[Tensor, "d k"]:
    """(X'X + l2 I)⁻¹ X'Y in float64, from the smaller of X'X and XX'."""
    x, y = x.double(), y.double()
    if x.shape[0] < x.shape[1]:
        return x.T @ _solve(x @ x.T, y, l2)
    return _solve(x.T @ x, x.T @ y, l2)


def ridge_path(x: Float[Tensor, "n d"], y: Float[Tensor, "n k"], l2s: Iterable[float]) -> Iterator[Tensor]:
    """`ridge` for each l2 in turn, from one eigendecomposition of the smaller of X'X and XX'; for one it costs more."""
    x, y = x.double(), y.double()
    dual = x.shape[0] < x.shape[1]
    values, vectors = torch.linalg.eigh(x @ x.T if dual else x.T @ x)
    rotated = vectors.T @ (y if dual else x.T @ y)
    back = x.T @ vectors if dual else vectors
    for l2 in map(_positive, l2s):
        yield back @ (rotated / (values.clamp(min=0) + l2)[:, None])


def summary(rows: Sequence[FewShot]) -> list[Spread]:
    """Mean and sample standard deviation over the seeds, for each number of shots and l2."""
    by_cell: dict[tuple[int, float], list[float]] = {}
    for row in rows:
        by_cell.setdefault((row.shots, row.l2), []).append(row.accuracy)
    return [
        Spread(shots, l2, len(found), statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None)
        for (shots, l2), found in by_cell.items()
    ]


@torch.no_grad()
def features_of(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device | str
) -> tuple[Float[Tensor, "n d"], Int[Tensor, "n"]]:
    """Features and labels of all batches, float32 on the CPU; every module is left in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    features, labels = [], []
    try:
        model.eval()
        for x, label in batches:
            features.append(model(x.to(device), output=True).features.float().cpu())
            labels.append(label.cpu())
    finally:
        for module, training in modes:
            module.training = training
    if not features:
        raise ValueError("features of 0 batches; at least 1 is needed")
    return torch.cat(features), torch.cat(labels)


def _accuracies(weights: list[Tensor], scale: Scale, features: Tensor, labels: Tensor) -> list[float]:
    """Of each solution on the whole test set, some rows at a time so that memory does not grow with it."""
    right = [0] * len(weights)
    for part, label in zip(features.split(ROWS_AT_ONCE), labels.split(ROWS_AT_ONCE), strict=True):
        x = with_bias(scale(part))
        right = [
            count + int(((x @ weight).argmax(1) == label).sum()) for count, weight in zip(right, weights, strict=True)
        ]
    return [count / len(labels) for count in right]


def _solve(gram: Tensor, y: Tensor, l2: float) -> Tensor:
    gram.diagonal().add_(_positive(l2))
    return torch.cholesky_solve(y, torch.linalg.cholesky(gram))


def _positive(l2: float) -> float:
    if not l2 > 0:
        raise ValueError(f"l2 is {l2}; it must be positive")
    return l2


def _check(name: str, features: Tensor, labels: Tensor, classes: int) -> None:
    if len(features) != len(labels) or not len(labels):
        raise ValueError(f"{name} has {len(features)} features and {len(labels)} labels; it needs as many, at least 1")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"{name} labels run from {int(labels.min())} to {int(labels.max())}; classes is {classes}")
    broken = int((~features.isfinite()).any(1).sum())
    if broken:
        raise ValueError(f"{name} features of {broken} samples are not finite; 0 may be")
