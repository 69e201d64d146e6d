"""Verbs about models and recipes as such."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge, Le

from adatape.cli.options import Json, show, with_bars
from adatape.config import Bench, TapeFFN
from adatape.limits import QuantityOrZero


def cost(
    model: tyro.conf.Positional[str],
    bank: str | None = None,
    tape_ffn: TapeFFN | None = None,
    classes: Annotated[int, Ge(1), Le(10_000_000)] = 1000,
    tape: QuantityOrZero | None = None,
    json: Json = False,
) -> None:
    """Parameters and GFLOPs of a model, by part; one multiply-add counts as 1.

    Args:
        model: a name from `adatape models`, or any ViT of timm
        bank: input or learn
        tape_ffn: where tape tokens take a feed-forward of their own
        classes: outputs of the head
        tape: tape tokens read; default all that the budget allows
    """
    from adatape.evaluate.catalogue import model_cost
    from adatape.report.tables import cost_table

    show(model_cost(model, classes, tape, bank, tape_ffn), cost_table, json)


def bench(
    how: Annotated[Bench, tyro.conf.arg(name="")],
    models: tyro.conf.Positional[tuple[str, ...]] = (),
    out: Path | None = None,
    plot: Path | None = None,
    json: Json = False,
) -> None:
    """Time models against their reference, in turns and in one process; FLOPs and memory beside.

    Args:
        how: what is timed, and how long
        models: names, with options as in adatape_base_patch16_224:bank=learn; default AdaTape with both banks
        out: JSON file of results, to which rows are added
        plot: PNG file, speed against FLOPs of all rows of the results
    """
    from adatape.report.bench import write_bench
    from adatape.report.tables import bench_table

    show(with_bars(write_bench, models, how, out, plot), bench_table, json)


def models(paper: bool = False, typical: bool = False, json: Json = False) -> None:
    """List the models registered with timm: what adapts, parameters, GFLOPs.

    Args:
        paper: list the paper's systems instead, its figures beside ours
        typical: also measure what fresh models spend on noise images (takes minutes)
    """
    from adatape.evaluate.catalogue import list_models, list_paper_models
    from adatape.report.tables import models_table, paper_models_table

    if paper:
        show(list_paper_models(), paper_models_table, json)
    else:
        show(list_models(typical), models_table, json)


def recipes(json: Json = False) -> None:
    """List the recipes that `adatape train` runs."""
    from adatape.evaluate.recipes import list_recipes
    from adatape.report.tables import recipes_table

    show(list_recipes(), recipes_table, json)
