"""AdamW with a learning-rate schedule, skipping of non-finite steps, and a moving average of weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from adatape.config import Optimizer
from adatape.models.prefix import is_added


def rate_at(settings: Optimizer, step: int, peak: float | None = None) -> float:
    """Linear warm-up to `peak`, by default lr, then constant, or cosine or linear decay to the floor at the end."""
    peak = settings.lr if peak is None else peak
    if step < settings.warmup:
        return peak * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return peak
    done = min(1.0, (step - settings.warmup) / max(1, settings.steps - settings.warmup))
    share = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.floor + (peak - settings.floor) * share


class Stepper:
    """AdamW over a model's trainable parameters, with state by parameter name, independent of the number of processes.

    A step never synchronises, so that a CUDA graph can capture it; non-finite steps are skipped on the device.
    """

    def __init__(self, model: nn.Module, settings: Optimizer) -> None:
        self.settings = settings
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        device = next(iter(self.named.values())).device
        # A tensor, so that it can change between replays of a captured step.
        self.rate = torch.tensor(settings.lr, device=device)
        self.new_rate = self.rate if settings.new_lr is None else torch.tensor(settings.new_lr, device=device)
        self.skipped = torch.zeros((), device=device)
        self.adamw = torch.optim.AdamW(
            self._groups(model), lr=self.rate, betas=settings.betas, fused=True, capturable=device.type == "cuda"
        )
        for p in self.named.values():  # created here instead of at the first step, so that a checkpoint can be loaded
            self.adamw.state[p] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        self.average = {name: p.detach().clone() for name, p in self.named.items()} if settings.ema else {}

    def set_rate(self, step: int) -> None:
        self.rate.fill_(rate_at(self.settings, step))
        if self.settings.new_lr is not None:
            self.new_rate.fill_(rate_at(self.settings, step, self.settings.new_lr))

    def step(self, loss: Tensor) -> Tensor:
        """Clips, updates and averages; returns the gradient norm. If it or the loss is not finite, nothing changes."""
        limit = self.settings.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), limit)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        bad = (~(norm.isfinite() & loss.isfinite())).float()
        self.adamw.found_inf = bad  # type: ignore[attr-defined]  # GradScaler's way to skip a fused step
        self.adamw.step()
        self.skipped.add_(1).mul_(bad)
        self._average(1 - bad)
        return norm

    def _average(self, good: Tensor) -> None:
        if not self.average or self.settings.ema is None:
            return
        weight = (1 - self.settings.ema) * good
        mine, theirs = list(self.average.values()), [p.detach() for p in self.named.values()]
        torch._foreach_add_(mine, torch._foreach_mul(torch._foreach_sub(theirs, mine), weight))

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups by weight decay, and by rate where added parameters have their own."""
        groups = _decay_groups(model, self.settings)
        if self.settings.new_lr is None:
            return groups
        added = {id(p) for name, p in self.named.items() if is_added(name)}
        rates = ((False, self.rate), (True, self.new_rate))
        parts = [
            {**group, "lr": rate, "params": [p for p in group["params"] if (id(p) in added) == new]}
            for group in groups
            for new, rate in rates
        ]
        return [part for part in parts if part["params"]]

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and average by name, to save or load in place."""
        moments = {
            f"optimizer.{name}.{kind}": v for name, p in self.named.items() for kind, v in self.adamw.state[p].items()
        }
        return moments | {f"average.{name}": value for name, value in self.average.items()}


def _decay_groups(model: nn.Module, settings: Optimizer) -> list[dict[str, Any]]:
    if settings.decay == "all":
        trainable = [p for p in model.parameters() if p.requires_grad]
        return [{"params": trainable, "weight_decay": settings.weight_decay}]
    spared: Any = getattr(model, "no_weight_decay", set)
    return param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=spared())
