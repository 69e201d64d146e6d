"""Trainer: one experiment, advanced step by step, so that two can be trained side by side."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from timm.optim import param_groups_weight_decay
from torch import Tensor

from adatape.config import Experiment
from adatape.data.parity import Batch, training_batch, validation_set
from adatape.measure.accuracy import Score, score
from adatape.models.ponder import ponder_loss
from adatape.models.sequence import build_sequence_model
from adatape.records import Output
from adatape.train.graph import captured


class Trainer:
    """Model, optimizer and step count of one experiment; batches depend on seed and step alone."""

    def __init__(self, experiment: Experiment, device: str | torch.device = "cpu") -> None:
        self.experiment, self.device, self.step = experiment, torch.device(device), 0
        optimizer = experiment.optimizer
        torch.manual_seed(experiment.seed)
        self.model = build_sequence_model(experiment.model, experiment.data.length).to(self.device)
        groups = param_groups_weight_decay(self.model, optimizer.weight_decay, self.model.no_weight_decay())
        # A tensor rate can change between replays of a captured step; the capturable optimizer is CUDA's alone.
        on_gpu = self.device.type == "cuda"
        torch.set_float32_matmul_precision("high" if on_gpu else "highest")  # the reader sums in float64 either way
        self.rate = torch.tensor(optimizer.lr, device=self.device)
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, capturable=on_gpu, fused=on_gpu)
        self.update = captured(self._update, self._batch()) if on_gpu else self._update
        self.validation = validation_set(experiment.data.length, experiment.data.held_out)

    def train(self, steps: int) -> Iterator[Tensor]:
        """Advances by at most `steps`, giving each step's loss."""
        self.model.train()
        for _ in range(min(steps, self.experiment.optimizer.steps - self.step)):
            self.rate.fill_(warmed_up(self.experiment.optimizer.lr, self.step, self.experiment.optimizer.warmup))
            batch = self._batch()
            self.step += 1
            yield self.update(batch)

    def evaluate(self) -> Score:
        return score(self.model, self.validation)

    def _batch(self) -> Batch:
        data, optimizer = self.experiment.data, self.experiment.optimizer
        return training_batch(data.length, optimizer.batch, self.experiment.seed, self.step)

    def _update(self, batch: Batch) -> Tensor:
        output = self.model(batch.symbols.to(self.device), output=True)
        loss = total_loss(output, batch.label.to(self.device), self.experiment.ponder_weight)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.experiment.optimizer.clip)
        self.optimizer.step()
        return loss.detach()


def total_loss(output: Output, label: Tensor, ponder_weight: float) -> Tensor:
    """l = l_main + λ l_ponder; where every step answers, each answer's loss counts by its share."""
    each_step = output.steps is not None and output.steps.logits is not None
    loss = ponder_loss(output, label) if each_step else F.cross_entropy(output.logits.float(), label)
    return loss + ponder_weight * output.ponder.mean() if ponder_weight else loss


def warmed_up(peak: float, step: int, warmup: int) -> float:
    return peak * min(1.0, (step + 1) / max(1, warmup))
