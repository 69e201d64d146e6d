"""Accuracy, loss and tape length over a fixed set."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adatape.data.parity import Batch
from adatape.models.adaptive import Adaptive


class Score(NamedTuple):
    accuracy: float
    loss: float
    length_mean: float
    length_var: float
    lengths: list[int]  # how many samples read 0, 1, 2, … tokens


@torch.no_grad()
def score(model: Adaptive, data: Batch, batch: int = 1600) -> Score:
    """One pass over `data` in eval mode; the model is left in the mode it was in."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    right, losses, lengths = [], [], []
    for symbols, label in zip(data.symbols.split(batch), data.label.to(device).split(batch), strict=True):
        output = model(symbols.to(device), output=True)
        logits = output.logits.float()
        right.append(logits.argmax(-1) == label)
        losses.append(F.cross_entropy(logits, label, reduction="none"))
        lengths.append(torch.zeros_like(label) if output.tape is None else output.tape.length)
    model.train(was_training)
    length = torch.cat(lengths)
    return Score(
        accuracy=_mean(torch.cat(right)),
        loss=_mean(torch.cat(losses)),
        length_mean=_mean(length),
        length_var=float(length.double().var(correction=0)),
        lengths=torch.bincount(length).tolist(),
    )


def _mean(x: Tensor) -> float:
    return float(x.double().mean())
