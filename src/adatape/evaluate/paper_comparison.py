"""The paper's figures for systems like ours, where it has any."""

from __future__ import annotations

from typing import Any

from adatape.config import Experiment, ImageModel
from adatape.evaluate.paper import ROWS, Row
from adatape.recipes.systems import AVIT_PRIOR

# The paper's table of ImageNet-1K from scratch, top-1 in per cent.
IMAGENET = {
    "ViT-Ti/16": 58.7,
    "PlainViT-Ti/16": 73.0,
    "U2T-Ti/16": 70.2,
    "A-ViT-Ti/16": 73.2,
    "AdaTape-Ti/16": 73.6,
    "ViT-S/16": 75.2,
    "PlainViT-S/16": 79.2,
    "U2T-S/16": 74.5,
    "A-ViT-S/16": 77.0,
    "AdaTape-S/16": 79.5,
    "PlainViT-B/16": 79.5,
    "AdaTape-B/16": 80.8,
}
PARITY = {
    "adatape": "much better than the baselines",
    "transformer": "at the level of random guessing",
    "ut": "at the level of random guessing",
}
# What recipes state of the paper's models; another value, or another option, is another model.
STATED: dict[str, Any] = {"bank_patch": 8, "bank_size": 10_000, "prior_weight": AVIT_PRIOR}
SIZE = 224


def same_system(experiment: Experiment) -> Row | None:
    """The paper's row for a run whose model is that row's, at its size of image."""
    model, data = experiment.model, experiment.data
    if not isinstance(model, ImageModel) or data.image_size != (SIZE, SIZE) or model.wrap is not None:
        return None
    named = f"patch{model.options.get('patch_size')}_" in model.name
    given = {name: value for name, value in model.options.items() if not (name == "patch_size" and named)}
    for row in ROWS:
        theirs = {"bank": "input", "tape_ffn": "append", **STATED, **row.options}
        if row.model == model.name and all(theirs.get(name) == value for name, value in given.items()):
            return row
    return None


def paper_accuracy(experiment: Experiment) -> str:
    """The paper's figure for a run's accuracy, in words where it prints none; empty where it has nothing like it."""
    if experiment.data.source == "parity":
        return PARITY.get(system_of(experiment), "")
    from_scratch = isinstance(experiment.model, ImageModel) and experiment.model.pretrained is None
    row = same_system(experiment) if experiment.data.source == "imagenet" and from_scratch else None
    return f"{IMAGENET[row.label]:.1f} %" if row and row.label in IMAGENET else ""


def paper_systems(experiments: list[Experiment]) -> list[Row]:
    """Every system of the families among these runs; the paper wraps no ViT."""
    models = [each.model for each in experiments if isinstance(each.model, ImageModel)]
    families = {model.name.split("_")[0] for model in models if model.wrap is None}
    return [row for row in ROWS if row.model.split("_")[0] in families]


def system_of(experiment: Experiment) -> str:
    """A run's system by the name its recipe gave it, as far as its settings tell."""
    model = experiment.model
    if isinstance(model, ImageModel):
        family = model.name.split("_")[0]
        if (model.wrap or {}).get("bank") == "windows":
            return "adatape"
        learns = (model.wrap or model.options).get("bank") == "learn"
        return f"{'wrapped ' if model.wrap is not None else ''}{family}{'-learn' if learns else ''}"
    if model.reading is None:
        return "transformer" if model.universal is None else "ut"
    if model.reading.merged == 1:
        return "singles"
    return {"highest": "adatape"}.get(model.reading.choose, model.reading.choose)


def shape_of(experiment: Experiment) -> str:
    """The model's name and what its recipe changed of it."""
    model = experiment.model
    if isinstance(model, ImageModel):
        given = ", ".join(f"{name}={value}" for name, value in {**model.options, **(model.wrap or {})}.items())
        return f"{model.name}({given})"
    return f"width {model.width}, depth {model.depth}, N = {experiment.data.sequence_length or 0}"
