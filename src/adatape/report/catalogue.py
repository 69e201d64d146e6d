"""What models there are and what they cost."""

from __future__ import annotations

import difflib
from functools import partial
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Column, Table

from adatape.evaluate.cost import NoCostFormula, cost, total
from adatape.evaluate.paper import ROWS
from adatape.evaluate.spent import typical_gflops
from adatape.models.adaptive import Adaptive
from adatape.models.construct import construct
from adatape.models.options import check_options
from adatape.models.registry import default_cfgs
from adatape.report.terminal import TABLE


def print_cost(name: str, classes: int, tape: int | None, **options: str | None) -> dict[str, Any]:
    given = {key: value for key, value in options.items() if value is not None}
    model = create(name, num_classes=classes, **given)
    try:
        parts = cost(model, tape)
    except NoCostFormula as error:
        raise ValueError(f"model is {name}; {error}") from error
    table = Table("part", "parameters (M)", "GFLOPs", "share", title=_cost_title(name, given, model, tape), **TABLE)
    whole = total(parts)
    for part in [*parts, whole]:
        share = f"{part.macs / whole.macs:.1%}"
        table.add_row(part.name, f"{part.parameters / 1e6:.3f}", f"{part.macs / 1e9:.3f}", share)
    Console().print(table)
    return {
        "model": name,
        **given,
        "tape": tape,
        "parameters": whole.parameters,
        "gflops": whole.macs / 1e9,
        "parts": {part.name: {"parameters": part.parameters, "gflops": part.macs / 1e9} for part in parts},
    }


def print_models(paper: bool, typical: bool) -> dict[str, Any]:
    return _print_paper() if paper else _print_registered(typical)


def _print_registered(typical: bool) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    spent = ["typical"] if typical else []
    table = Table(Column("model", no_wrap=True), "options", "adapts", "M", "GFLOPs (bound)", *spent, **TABLE)
    for name in sorted(default_cfgs):
        for options in ({"bank": "input"}, {"bank": "learn"}) if name.startswith("adatape") else ({},):
            model = create(name, **options)
            whole, label = total(cost(model)), " ".join([name, *options.values()])
            rows[label] = {"parameters": whole.parameters, "gflops": whole.macs / 1e9, "adapts": adapts(model)}
            shown = " ".join(f"{key}={value}" for key, value in options.items())
            figures = [f"{whole.parameters / 1e6:.3f}", f"{whole.macs / 1e9:.3f}"]
            if typical:
                rows[label]["gflops_typical"] = typical_gflops(timm.create_model(name, **options))
                figures.append(f"{rows[label]['gflops_typical']:.3f}")
            table.add_row(name, shown, adapts(model), *figures)
    console = Console()
    console.print(table)
    if typical:
        console.print("typical: mean over 8 noise images, before training")
    return rows


def _print_paper() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    table = Table(Column("system", no_wrap=True), "adapts", "M", "paper", "GFLOPs", "paper", "÷ ours", **TABLE)
    for row in ROWS:
        model = create(row.model, **row.options)
        whole = total(cost(model))
        millions, gflops = whole.parameters / 1e6, whole.macs / 1e9
        rows[row.label] = {"parameters": whole.parameters, "gflops": gflops, "paper": row._asdict()}
        gap = f"{row.gflops / gflops - 1:+.2%}" if row.gflops else ""
        theirs = [f"{figure}" if figure else "" for figure in (row.parameters, row.gflops)]
        label = f"{row.label} *" if row.note else row.label
        table.add_row(label, adapts(model), f"{millions:.3f}", theirs[0], f"{gflops:.3f}", theirs[1], gap)
    console = Console()
    console.print(table)
    for row in ROWS:
        if row.note:
            console.print(f"* {row.label}: {row.note}", highlight=False)
    return rows


def adapts(model: torch.nn.Module) -> str:
    """What a model fits to each sample."""
    return (model.adapts if isinstance(model, Adaptive) else None) or "–"


def create(name: str, **options: Any) -> torch.nn.Module:
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.0)
        raise ValueError(f"{name or repr(name)} is not a model; near matches: {', '.join(near)}")
    check_options(name, options)
    with torch.device("meta"):
        return construct(partial(timm.create_model, name), name, options)


def _cost_title(name: str, given: dict[str, str], model: torch.nn.Module, tape: int | None) -> str:
    settings = " ".join(f"{key}={value}" for key, value in given.items())
    reader = getattr(model, "reader", None)
    read = "" if reader is None else f"{reader.steps if tape is None else tape} tape tokens"
    return " · ".join(piece for piece in (name, settings, read) if piece)
