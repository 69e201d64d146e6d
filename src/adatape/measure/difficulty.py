"""Does length follow difficulty? Rank correlation of what a model spends on an image with what another finds it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

DRAWS, CHUNK = 1000, 50


class Correlation(NamedTuple):
    """Spearman's ρ and its 95 % interval by the bootstrap; NaN where one side does not vary."""

    rho: float
    low: float
    high: float


def ranks(x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """From 0, equals sharing the mean of their places."""
    ordered, x = x.sort(-1).values.contiguous(), x.contiguous()
    below, upto = torch.searchsorted(ordered, x), torch.searchsorted(ordered, x, right=True)
    return (below + upto - 1).double() / 2


def correlated(x: Float[Tensor, "*b n"], y: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    x, y = (side - side.mean(-1, keepdim=True) for side in (x, y))
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


def spearman(spent: Tensor, difficulty: Tensor, seed: int = 0) -> Correlation:
    """Of one number for each image from either side."""
    if spent.shape != difficulty.shape or spent.dim() != 1 or len(spent) < 3:
        shapes = f"spent has shape {tuple(spent.shape)} and difficulty {tuple(difficulty.shape)}"
        raise ValueError(f"{shapes}; they must be one number each for the same three images or more")
    spent, difficulty = spent.double(), difficulty.double()
    draw, drawn = torch.Generator().manual_seed(seed), []
    for _ in range(DRAWS // CHUNK):
        again = torch.randint(len(spent), (CHUNK, len(spent)), generator=draw)
        drawn.append(correlated(ranks(spent[again]), ranks(difficulty[again])))
    low, high = torch.cat(drawn).nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Correlation(float(correlated(ranks(spent), ranks(difficulty))), low, high)
