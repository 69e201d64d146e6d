"""ACT against a literal loop, and properties of its weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adatape.act import Act, advance, begin, ponder_cost


def oracle(scores: list[float], epsilon: float) -> tuple[list[float], int, float]:
    """tensor2tensor's form for one sample: strict `>`, and the last step has the remainder as its weight."""
    halting, weights, updates, remainder, running = 0.0, [], 0, 0.0, True
    for t, p in enumerate(scores):
        if not running:
            weights.append(0.0)
            continue
        updates += 1
        if halting + p > 1 - epsilon or t == len(scores) - 1:
            remainder, running = 1 - halting, False
            weights.append(remainder)
        else:
            halting += p
            weights.append(p)
    return weights, updates, remainder


def run(p: torch.Tensor, epsilon: float = 0.01) -> tuple[torch.Tensor, Act]:
    """p is (t, …): one halting score per step and sample, or per step, sample and token."""
    act, weights = begin(p[0]), []
    for t, score in enumerate(p):
        weight, act = advance(act, score, last=t == len(p) - 1, epsilon=epsilon)
        weights.append(weight)
    return torch.stack(weights), act


@st.composite
def halting_scores(draw) -> np.ndarray:
    steps, shape = draw(st.integers(1, 8)), draw(st.sampled_from([(3,), (2, 4)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["even", "small", "large", "exact", "zero"]))
    if kind == "exact":  # sums that meet 1 - ε to the bit
        return rng.choice([0.25, 0.5, 0.75, 0.0], (steps, *shape))
    top = {"even": 1.0, "small": 0.15, "large": 1.0, "zero": 0.0}[kind]
    return rng.uniform(0.9 if kind == "large" else 0.0, 1.0, (steps, *shape)) * top


@settings(max_examples=1200)
@given(halting_scores(), st.sampled_from([0.01, 0.25, 1e-6]))
def test_weights_updates_and_remainder_are_the_oracles(scores: np.ndarray, epsilon: float) -> None:
    weights, act = run(torch.tensor(scores), epsilon)
    for place in np.ndindex(scores.shape[1:]):
        expected, updates, remainder = oracle(scores[(slice(None), *place)].tolist(), epsilon)
        assert weights[(slice(None), *place)].tolist() == pytest.approx(expected, abs=1e-12)
        assert float(act.updates[place]) == updates
        assert float(act.remainder[place]) == pytest.approx(remainder, abs=1e-12)


@settings(max_examples=200)
@given(halting_scores())
def test_weights_always_sum_to_one(scores: np.ndarray) -> None:
    weights, act = run(torch.tensor(scores, dtype=torch.float32))
    torch.testing.assert_close(weights.sum(0), torch.ones_like(act.halting))
    assert not act.running.any()


def test_a_sum_exactly_at_the_limit_runs_on() -> None:
    weights, act = run(torch.tensor([[0.75], [0.5], [0.5]], dtype=torch.float64), epsilon=0.25)
    assert weights.flatten().tolist() == [0.75, 0.25, 0.0]
    assert act.updates.item() == 2


def test_only_the_remainder_carries_the_ponder_gradient() -> None:
    p = torch.tensor([[0.3, 0.6], [0.3, 0.6], [0.3, 0.6], [0.5, 0.6]], dtype=torch.float64, requires_grad=True)
    _, act = run(p)
    (gradient,) = torch.autograd.grad(ponder_cost(act).sum(), p)
    assert gradient.tolist() == [[-1.0, -1.0], [-1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]


def test_weights_are_differentiable() -> None:
    p = (torch.rand(4, 5, dtype=torch.float64) * 0.4).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: run(p)[0], p)
    assert torch.autograd.gradcheck(lambda p: ponder_cost(run(p)[1]), p)
