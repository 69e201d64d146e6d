"""Does length follow difficulty? Rank correlation of what a model spends on an image with what another finds it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import bootstrap, pearsonr, rankdata, spearmanr
from torch import Tensor

DRAWS, CHUNK = 1000, 50


class Correlation(NamedTuple):
    """Spearman's ρ and its 95 % interval by the bootstrap; NaN where one side does not vary."""

    rho: float
    low: float
    high: float


def spearman(spent: Tensor, difficulty: Tensor, seed: int = 0) -> Correlation:
    """Of one number for each image from either side."""
    if spent.shape != difficulty.shape or spent.dim() != 1 or len(spent) < 3:
        shapes = f"spent has shape {tuple(spent.shape)} and difficulty {tuple(difficulty.shape)}"
        raise ValueError(f"{shapes}; they must be one number each for the same three images or more")
    sides = spent.double().numpy(), difficulty.double().numpy()
    if any(np.ptp(side) == 0 for side in sides):
        return Correlation(np.nan, np.nan, np.nan)
    drawn = bootstrap(sides, _rho, paired=True, n_resamples=DRAWS, batch=CHUNK, method="percentile", rng=seed)
    low, high = np.nanquantile(drawn.bootstrap_distribution, (0.025, 0.975)).tolist()
    return Correlation(float(spearmanr(*sides).statistic), low, high)


def _rho(spent: Any, difficulty: Any, axis: int) -> Any:
    """As `spearmanr`, which takes no axis, of many draws at once."""
    return pearsonr(rankdata(spent, axis=axis), rankdata(difficulty, axis=axis), axis=axis).statistic
