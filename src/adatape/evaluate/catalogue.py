"""Which models there are and what they cost."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch

from adatape.config import TapeFFN
from adatape.evaluate.cost import NoCostFormula, cost, total
from adatape.evaluate.paper import ROWS, Row
from adatape.evaluate.result import Result
from adatape.models.base import Adaptive
from adatape.models.checked_build import build_checked
from adatape.models.options import check_options
from adatape.models.registry import default_cfgs


@dataclass(frozen=True)
class ModelCost(Result):
    """One multiply-add counts as 1 in GFLOPs."""

    model: str
    options: dict[str, str]
    tape: int | None
    """tape length that the cost is for; None is the longest that the budget allows"""
    tape_tokens: int | None
    """counted here; None for a model without a tape"""
    parameters: int
    gflops: float
    parts: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        values = super().as_dict()
        return {"model": values.pop("model"), **values.pop("options"), **values}


@dataclass(frozen=True)
class ListedModel(Result):
    name: str
    options: dict[str, Any]
    adapts: str
    parameters: int
    gflops: float
    """at the full budget"""
    gflops_typical: float | None = None
    """mean over 8 noise images, before training"""
    paper: Row | None = None

    def as_dict(self) -> dict[str, Any]:
        known = {key: value for key, value in super().as_dict().items() if value is not None}
        return {key: value for key, value in known.items() if key not in ("name", "options")}


@dataclass(frozen=True)
class ModelList(Result):
    models: dict[str, ListedModel]

    def as_dict(self) -> dict[str, Any]:
        return {name: each.as_dict() for name, each in self.models.items()}


def model_cost(
    name: str, classes: int = 1000, tape: int | None = None, bank: str | None = None, tape_ffn: TapeFFN | None = None
) -> ModelCost:
    """Parameters and GFLOPs of a model by part."""
    given = {key: value for key, value in {"bank": bank, "tape_ffn": tape_ffn}.items() if value is not None}
    model = create(name, num_classes=classes, **given)
    try:
        parts = cost(model, tape)
    except NoCostFormula as error:
        raise ValueError(f"model is {name}; {error}") from error
    reader, whole = getattr(model, "reader", None), total(parts)
    read = None if reader is None else reader.steps if tape is None else tape
    by_part = {part.name: {"parameters": part.parameters, "gflops": part.macs / 1e9} for part in parts}
    return ModelCost(name, given, tape, read, whole.parameters, whole.macs / 1e9, by_part)


def list_models(typical: bool = False) -> ModelList:
    """The models registered with timm; `typical` also runs each of them on noise, which takes minutes."""
    models = {}
    for name in sorted(default_cfgs):
        for options in ({"bank": "input"}, {"bank": "learn"}) if name.startswith("adatape") else ({},):
            measured = typical_gflops(timm.create_model(name, **options)) if typical else None
            models[" ".join([name, *options.values()])] = _listed(name, options, gflops_typical=measured)
    return ModelList(models)


@torch.no_grad()
def typical_gflops(model: Adaptive) -> float:
    """The mean over 8 noise images: before training, what halting alone would save."""
    channels, (height, width) = model.vit.in_chans, model.vit.patch_embed.img_size
    noise = torch.randn(8, channels, height, width, generator=torch.Generator().manual_seed(0))
    return model.actual_macs(model.eval()(noise, output=True)).double().mean().item() / 1e9


def list_paper_models(rows: Sequence[Row] = ROWS) -> ModelList:
    """The paper's systems, its figures beside ours."""
    return ModelList({row.label: _listed(row.model, row.options, paper=row) for row in rows})


def _listed(name: str, options: dict[str, Any], **more: Any) -> ListedModel:
    model = create(name, **options)
    whole = total(cost(model))
    adapts = (model.adapts if isinstance(model, Adaptive) else None) or "–"
    return ListedModel(name, options, adapts, whole.parameters, whole.macs / 1e9, **more)


def create(name: str, **options: Any) -> torch.nn.Module:
    """A model without memory for its weights."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.0)
        raise ValueError(f"{name or repr(name)} is not a model; near matches: {', '.join(near)}")
    check_options(name, options)
    with torch.device("meta"):
        return build_checked(partial(timm.create_model, name), name, options)
