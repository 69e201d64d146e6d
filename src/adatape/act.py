"""Algorithm 1 of the paper, Adaptive Computation Time, in the form that tensor2tensor computes.

As printed, the algorithm starts from zero states, does not count or transform the halting step, and leaves the
remainder open when the step limit is met. Here a step halts when the halting sum would pass 1 - ε, or when it is the
last one permitted; it then takes what is left, so the weights of a sample always sum to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

NEVER = -30.0  # the logit of a halting score that no number of steps sums up to anything


class Act(NamedTuple):
    """The state of a halting process, one value per sample or per token."""

    halting: Tensor  # h_p, the sum of halting scores so far
    remainder: Tensor  # r, what the halting step took; 0 before
    updates: Tensor  # n, steps taken
    running: Tensor  # bool; a flag of its own, since h_p + (1 - h_p) need not round to 1


def begin(like: Float[Tensor, "*b"]) -> Act:
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
