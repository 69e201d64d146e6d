"""Rank correlation: invariance to monotone maps, ties, and coverage of the interval."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr

from adatape.evaluate.difficulty import spearman


def test_only_order_counts() -> None:
    x = torch.randn(200)
    assert spearman(x.exp(), x).rho == pytest.approx(1)
    assert spearman(-x.exp(), x).rho == pytest.approx(-1)


def test_it_is_scipy_s_also_with_ties() -> None:
    length, loss = torch.randint(3, 9, (500,)), torch.rand(500)
    assert spearman(length, loss).rho == pytest.approx(spearmanr(length.numpy(), loss.numpy()).statistic, abs=1e-9)


def test_the_interval_holds_a_known_correlation_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        x, noise = torch.randn(100, generator=draw), torch.randn(100, generator=draw)
        found = spearman(x, noise, seed)
        held += found.low <= 0 <= found.high
    assert held >= 33


def test_a_length_that_never_varies_has_no_correlation() -> None:
    assert math.isnan(spearman(torch.full((50,), 3), torch.rand(50)).rho)


def test_sides_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="spent has shape"):
        spearman(torch.rand(5), torch.rand(6))


def test_an_interval_is_drawn_alike_from_one_seed() -> None:
    x, y = torch.rand(50), torch.rand(50)
    assert spearman(x, y, 3) == spearman(x, y, 3) != spearman(x, y, 4)
