"""Algorithm 1 of the paper, Adaptive Computation Time, as tensor2tensor implements it.

As printed, the algorithm starts from zero states, does not count or transform the halting step, and does not define the
remainder when the step limit is reached. Here a step halts when the halting sum would exceed 1 - ε or when it is the
last one; its weight is the remainder, so the weights of a sample always sum to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

NEVER_HALT_LOGIT = -30.0  # halting logit whose sigmoid is about 1e-13, so that no sum over steps reaches 1 - ε


class Act(NamedTuple):
    """The state of a halting process, one value per sample or per token."""

    halting: Tensor  # h_p, the sum of halting scores so far
    remainder: Tensor  # r, the weight of the halting step; 0 before it
    updates: Tensor  # n, steps taken
    running: Tensor  # bool; stored, because h_p + (1 - h_p) need not round to 1


def begin(like: Float[Tensor, "*b"]) -> Act:
    """The state before the first step."""
    zero = torch.zeros_like(like)
    return Act(zero, zero, zero, torch.ones_like(like, dtype=torch.bool))


def advance(
    act: Act, p: Float[Tensor, "*b"], last: bool = False, epsilon: float = 0.01
) -> tuple[Float[Tensor, "*b"], Act]:
    """The weight of a step whose halting score is p, and the state after it."""
    left = 1 - act.halting
    halts = act.running & ((act.halting + p > 1 - epsilon) | last)
    runs_on = act.running & ~halts
    weight = torch.where(runs_on, p, left * halts)
    after = Act(act.halting + p * runs_on, act.remainder + left * halts, act.updates + act.running, runs_on)
    return weight, after


def ponder_cost(act: Act) -> Float[Tensor, "*b"]:
    """l = n + r; only r carries a gradient."""
    return act.updates + act.remainder
