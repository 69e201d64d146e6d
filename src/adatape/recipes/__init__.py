"""Experiments as typed functions, free of torch. Each gives an `Experiment`; `adatape train NAME` runs it."""

from adatape.recipes.parity import parity, parity_small

RECIPES = {"parity": parity, "parity-small": parity_small}
