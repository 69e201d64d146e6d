"""Sets of labels as classes: where a sample has several labels, those that have the same ones are alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NONE = "no label"


def numbered_sets(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of (n, classes), and for each row (n,) the number of its set."""
    sets, number = np.unique(np.asarray(labels), axis=0, return_inverse=True)
    return sets, number.reshape(-1)


def set_name(row: np.ndarray, names: Sequence[str]) -> str:
    return ", ".join(names[n] for n in np.flatnonzero(row).tolist()) or NONE
