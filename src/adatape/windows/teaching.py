"""What a model of windows learns from beside its answer: its windows' answer alone, and where the scan should look."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from adatape.losses import LossName, class_loss
from adatape.records import Places
from adatape.windows.answers import Answer


def places_losses(answer: Answer, places: Places, mask: Tensor, target: Tensor, kind: LossName) -> Iterator[Tensor]:
    classes = places.evidence.shape[-1]
    shares = F.one_hot(target, classes).float() if target.dim() == 1 else target
    yield class_loss(answer.combined(None, places.gate, places.evidence, mask), target, kind)
    yield scan_loss(answer, places.scores, places.gate, places.evidence, shares, mask)
    if places.searched is not None:
        yield scan_loss(answer, *places.searched[1:], shares)
    if places.found is not None and places.guesses is not None:
        yield answer.found(places.found.flatten(1), places.guesses.flatten(1, 2), shares)


def scan_loss(
    answer: Answer, scores: Tensor, gate: Tensor, evidence: Tensor, shares: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Cross-entropy of the scan's scores: their targets are how surely those windows show what the label names."""
    shown = answer.shown(gate, evidence, shares).detach()
    each = F.binary_cross_entropy_with_logits(scores, shown, reduction="none")
    return each.mean() if mask is None else (each * mask).sum() / mask.sum().clamp(min=1)
