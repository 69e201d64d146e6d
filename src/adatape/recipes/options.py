"""What `--help` says of the options of recipes: their group, and their text, mostly the docstring of a setting."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Literal, NamedTuple

Group = Literal["data", "model", "tape", "optimizer", "run"]
GROUPS: tuple[Group, ...] = ("data", "model", "tape", "optimizer", "run")
PACKAGE = Path(__file__).parents[1]


class Option(NamedTuple):
    """An option by its name, which means the same in every recipe unless `OF_RECIPES` has another."""

    group: Group
    text: str = ""
    """what `--help` says; empty for the docstring of `field`"""
    field: str = ""
    """file:Class.field of a setting, as in config:Optimizer.batch"""
    none: str = ""
    """what None, where it is the default, stands for"""

    def help(self) -> str:
        return self.text or field_docstring(self.field)


OPTIONS: dict[str, Option] = {
    "path": Option("data", field="data_config:Images.path"),
    "source": Option("data", field="data_config:Images.source"),
    "csv": Option("data", field="data_config:Scenes.csv"),
    "height": Option("data", "height of the model's input in pixels; other images are resized to fit and padded"),
    "width": Option("data", "width of the model's input in pixels"),
    "pixels": Option("data", field="data_config:Images.size"),
    "length": Option("data", field="data_config:Parity.length"),
    "task": Option("data", field="data_config:Megapixel.task"),
    "order": Option("data", field="data_config:Megapixel.order"),
    "side": Option("data", field="data_config:Megapixel.side"),
    "classes": Option("data", field="data_config:Images.classes"),
    "samples": Option("data", field="data_config:Images.samples"),
    "validate_on": Option("data", field="data_config:Images.validate_on"),
    "system": Option("model", "AdaTape, or another model trained with the same data and schedule"),
    "size": Option("model", "width, depth and heads of the ViT, as in its name: Ti, S or B"),
    "patch": Option("model", "side of a patch of the input in pixels"),
    "backbone": Option("model", "a ViT by its name in timm, with the tag of its weights"),
    "pretrained": Option("model", field="config:ImageModel.pretrained"),
    "trains": Option("model", field="config:ImageModel.trains"),
    "bank": Option(
        "tape", "what can be read: finer patches of the image (input), trained vectors (learn), or nothing (none)"
    ),
    "bank_patch": Option(
        "tape",
        "side of a patch of the bank in pixels",
        none="8, or half the backbone's patch where 8 does not divide the image",
    ),
    "tape_steps": Option("tape", field="config:ReaderConfig.steps", none="the model's own"),
    "threshold": Option("tape", field="config:ReaderConfig.threshold", none="the model's own"),
    "merge": Option("tape", field="config:ReaderConfig.merge"),
    "sample_budgets": Option("tape", field="config:ReaderConfig.sample_budgets"),
    "reader": Option("tape", field="config:SequenceModel.reader"),
    "layer": Option("tape", field="config:SequenceModel.layer"),
    "tape_ffn": Option("tape", field="config:SequenceModel.tape_ffn"),
    "norm_scale": Option("tape", field="config:ReaderConfig.norm_scale"),
    "ponder_weight": Option("tape", field="config:Experiment.ponder_weight", none="the system's own"),
    "reads": Option("tape", field="windows/options:WindowOptions.steps"),
    "window": Option("tape", field="windows/options:WindowOptions.window"),
    "search": Option("tape", field="windows/options:WindowOptions.search"),
    "scan_width": Option("tape", field="windows/options:WindowOptions.scan_width"),
    "steps": Option("optimizer", field="config:Optimizer.steps"),
    "epochs": Option("optimizer", "passes over the training set"),
    "batch": Option("optimizer", field="config:Optimizer.batch"),
    "lr": Option("optimizer", field="config:Optimizer.lr"),
    "new_lr": Option("optimizer", field="config:Optimizer.new_lr"),
    "weight_decay": Option("optimizer", field="config:Optimizer.weight_decay"),
    "loss": Option("optimizer", field="config:Experiment.loss"),
    "seed": Option("run", field="config:Experiment.seed"),
}
OF_RECIPES: dict[tuple[str, str], Option] = {
    ("scenes", "path"): Option("data", field="data_config:Scenes.path"),
    ("megapixel", "path"): Option("data", field="data_config:Megapixel.path"),
    **{
        (recipe, "system"): Option(
            "model",
            "AdaTape, a Transformer, a Universal Transformer, or a control that reads symbols singly, at random or in "
            "order",
        )
        for recipe in ("parity", "parity-small")
    },
}


def option_of(recipe: str, name: str) -> Option:
    """An option of a recipe; names that have no text are an error of ours."""
    return OF_RECIPES.get((recipe, name)) or OPTIONS[name]


def field_docstring(field: str) -> str:
    """The docstring below a field, from its file: reading the file is quicker than importing it, and needs no torch."""
    file, _, name = field.partition(":")
    return _docstrings(file)[name]


@functools.cache
def _docstrings(file: str) -> dict[str, str]:
    """The docstrings of all fields of a file's classes, as one line each, by Class.field."""
    classes = ast.parse((PACKAGE / f"{file}.py").read_text(encoding="utf-8")).body
    return {
        f"{kind.name}.{field.target.id}": " ".join(text.value.value.split())
        for kind in classes
        if isinstance(kind, ast.ClassDef)
        for field, text in zip(kind.body, kind.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
