"""The list of recipes, made without importing torch."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from adatape.evaluate.result import Result
from adatape.recipes import RECIPES


@dataclass(frozen=True)
class RecipeList(Result):
    texts: dict[str, str]
    """what each recipe trains, the first line its summary"""
    options: dict[str, list[str]]

    def as_dict(self) -> dict[str, str]:
        return self.texts


def list_recipes() -> RecipeList:
    texts = {name: inspect.cleandoc(recipe.__doc__ or "") for name, recipe in RECIPES.items()}
    return RecipeList(texts, {name: list(inspect.signature(recipe).parameters) for name, recipe in RECIPES.items()})
