"""Counter-based random numbers: functions of a key, so the same on CPU and GPU, in any batch and on any rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

# SplitMix64 (Steele, Lea & Flood 2014) in wrapping int64 arithmetic.
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = 1 << 64


def key_of(*words: int) -> int:
    """Combines several integers, such as seed, epoch and purpose, into one key."""
    key = 0
    for word in words:
        key = int(_mixed(torch.tensor(_signed(key + word * GOLDEN + GOLDEN))))
    return key


def keys_of(key: int, ids: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """A key for each id under a common key."""
    return _mixed(ids * _signed(GOLDEN) + key)


def check_keys(key: Tensor | None, samples: Sequence[Any] | Tensor) -> None:
    """Refuses a model's `key` that is not one int64 for each sample: others would give samples each other's numbers."""
    count = samples.shape[0] if isinstance(samples, Tensor) else len(samples)  # len(tensor) would fix it at export
    if key is None or (isinstance(key, Tensor) and key.shape == (count,) and key.dtype == torch.int64):
        return
    given = f"of shape {tuple(key.shape)} and {key.dtype}" if isinstance(key, Tensor) else f"a {type(key).__name__}"
    raise ValueError(f"key is {given}; it must be a tensor of shape {(count,)} and torch.int64")


def uniform(keys: Int[Tensor, "n"], count: int) -> Float[Tensor, "n count"]:
    """`count` numbers in [0, 1) for each key, multiples of 2⁻²⁴."""
    return _uniform(keys, count)


# A custom op, because inductor (torch 2.11) computes a range times a 64-bit constant in 32 bits.
@torch.library.custom_op("adatape::uniform", mutates_args=(), schema="(Tensor keys, int count) -> Tensor")
def _uniform(keys: Tensor, count: int) -> Tensor:
    steps = torch.arange(1, count + 1, device=keys.device) * _signed(GOLDEN)
    return _shifted(_mixed(keys[:, None] + steps), 40).to(torch.float32) * 2.0**-24


@_uniform.register_fake
def _(keys: Tensor, count: int) -> Tensor:
    return keys.new_empty(keys.shape[0], count, dtype=torch.float32)


def normal(keys: Int[Tensor, "n"], count: int) -> Float[Tensor, "n count"]:
    """`count` standard normal numbers for each key, by the Box-Muller transform."""
    pairs = (count + 1) // 2
    radius, angle = uniform(keys, 2 * pairs).chunk(2, 1)
    radius, angle = (-2 * (1 - radius).log()).sqrt(), angle * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's `>>` is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    word %= WORD
    return word - WORD if word >= WORD // 2 else word
