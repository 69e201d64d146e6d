"""Experiments as typed functions, free of torch. Each gives an `Experiment`; `adatape train NAME` runs it."""

from __future__ import annotations

from collections.abc import Callable

from adatape.config import Experiment
from adatape.recipes.parity import parity, parity_small

RECIPES: dict[str, Callable[..., Experiment]] = {"parity": parity, "parity-small": parity_small}
