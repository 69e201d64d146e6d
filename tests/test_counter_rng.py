"""Random numbers as functions of a key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import adatape
import adatape.models
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


@pytest.mark.parametrize(
    "key", [torch.arange(2), torch.arange(3).int(), torch.zeros(3, 1).long(), torch.rand(3), [0, 1]]
)
@pytest.mark.parametrize("name", ["adatape", "ponder", "windows"])
def test_a_key_that_is_not_one_number_for_each_sample_is_refused(name: str, key: Any) -> None:
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    size: tuple[int, ...] = (32, 32)
    if name == "ponder":
        model = timm.create_model("ponder_tiny_patch16_224", **shape, steps=2)
    elif name == "windows":
        size = (48, 64)
        model = adatape.wrap(VisionTransformer(**shape, depth=2), "windows", image=size, window=16, steps=2)
    else:
        model = adatape.wrap(VisionTransformer(**shape, depth=2), patch=4, steps=2, query_width=16)
    with pytest.raises(ValueError, match=r"key is .*; it must be a tensor of shape \(3,\) and torch.int64"):
        model(torch.zeros(3, 3, *size), key=key)
