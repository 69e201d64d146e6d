"""Random numbers as functions of a key."""

from __future__ import annotations

import math

import pytest
import torch

from adatape.counter_rng import key_of, keys_of, normal, uniform


def splitmix64(state: int) -> int:
    """The published generator in Python integers."""
    z = state % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("key", [0, 1, -1, 2**62, -(2**63)])
def test_it_is_splitmix64(key: int) -> None:
    expected = [splitmix64(key + n * 0x9E3779B97F4A7C15) >> 40 for n in (1, 2, 3)]
    assert (uniform(torch.tensor([key]), 3)[0] * 2**24).tolist() == expected


def test_a_keys_numbers_do_not_depend_on_its_batch() -> None:
    keys = keys_of(3, torch.arange(100))
    assert torch.equal(uniform(keys, 8)[42], uniform(keys[42:43], 8)[0])
    assert torch.equal(uniform(keys, 8)[:, :3], uniform(keys, 3))


def test_uniform_and_normal_have_their_moments() -> None:
    keys = keys_of(key_of(0, 1), torch.arange(20_000))
    u, z = uniform(keys, 10).double(), normal(keys, 9).double()
    assert u.mean() == pytest.approx(0.5, abs=2e-3)
    assert u.var() == pytest.approx(1 / 12, abs=1e-3)
    assert u.T.corrcoef().fill_diagonal_(0).abs().max() < 0.04
    assert z.mean() == pytest.approx(0, abs=6e-3)
    assert z.var() == pytest.approx(1, abs=1e-2)
    assert (z**4).mean() == pytest.approx(3, abs=0.1)
    assert z.isfinite().all()
    assert z.abs().max() < math.sqrt(2 * 24 * math.log(2)) + 0.1


def test_seed_epoch_and_purpose_give_different_keys() -> None:
    keys = {key_of(seed, epoch, purpose) for seed in range(10) for epoch in range(10) for purpose in range(10)}
    assert len(keys) == 1000
    assert key_of(1, 2) != key_of(2, 1)


def test_it_compiles_in_full_to_the_same_numbers() -> None:
    keys = keys_of(3, torch.arange(20))
    compiled = torch.compile(lambda k: (uniform(k, 7), normal(k, 7)), fullgraph=True)
    ours = compiled(keys)
    assert torch.equal(ours[0], uniform(keys, 7))
    torch.testing.assert_close(ours[1], normal(keys, 7), rtol=1e-5, atol=1e-6)
    torch.library.opcheck(torch.ops.adatape.uniform, (keys, 7))
