"""Tables and progress bars of the command line."""

from __future__ import annotations

import difflib
import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from adatape.config import Experiment
from adatape.data.parity import held_out_set
from adatape.measure.accuracy import Score, score
from adatape.measure.cost import cost, total
from adatape.measure.paper import ROWS
from adatape.measure.spent import typical_gflops
from adatape.models import AdaTape, AViT, PonderNet, Universal, UViT
from adatape.models.registry import default_cfgs
from adatape.train.run import load_config, load_run, run
from adatape.train.sweep import combinations

TABLE: dict[str, Any] = {"box": None, "header_style": "bold"}


def pick_device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(asked).type
    except RuntimeError as error:
        raise ValueError(f"device is {asked!r}; it must be auto, cpu, or cuda with or without a number") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {asked!r}; torch finds no CUDA GPU here, so use cpu")
    return asked


def progress_bar() -> Progress:
    """Live on a terminal, silent in a file or a pipe."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    note = TextColumn("{task.fields[note]}")
    return Progress(*columns, note, disable=not sys.stdout.isatty())


def train_with_progress(what: Any, out: Path | None, device: str) -> dict[str, Any]:
    experiment: Experiment = what() if callable(what) else load_config(what.config)
    out, device = out or _free_folder(experiment.recipe), pick_device(device)
    console = Console()
    with progress_bar() as bar:
        task = bar.add_task(experiment.recipe, total=experiment.optimizer.steps, note="")

        def watch(step: int, loss: float, result: Score | None) -> None:
            note = f"loss {loss:.3f}" if result is None else describe(result)
            bar.update(task, completed=step, note=note)
            if result is not None:
                bar.console.print(
                    f"step {step:6d}  train loss {loss:.4f}  validation {describe(result)}", highlight=False
                )

        result = run(experiment, out, device, watch)
    table = Table("test accuracy", "tape length", "parameters", "GFLOPs", "steps", "seconds", **TABLE)
    table.add_row(
        f"{result['accuracy']:.2%}",
        f"{result['length_mean']:.1f} ± {result['length_var'] ** 0.5:.1f}",
        f"{result['parameters'] / 1e6:.3f} M",
        f"{result['gflops']:.4f}",
        str(result["steps"]),
        f"{result['seconds']:.0f}",
    )
    console.print(table)
    console.print(f"run folder: {out}", highlight=False)
    return {**result, "out": str(out)}


def describe(result: Score) -> str:
    tape = f", tape {result.length_mean:.1f} ± {result.length_var**0.5:.1f}" if result.length_mean else ""
    return f"accuracy {result.accuracy:.2%}{tape}"


def print_evaluation(folder: Path, length: int | None, device: str) -> dict[str, Any]:
    with warnings.catch_warnings():  # reading further than trained is what `--length` asks for
        warnings.simplefilter("ignore", UserWarning)
        experiment, model = load_run(folder, length)
    length = length or experiment.data.length
    result = score(model.to(pick_device(device)), held_out_set(length, experiment.data.held_out), batch=400)
    whole = total(cost(model))
    table = Table("length", "accuracy", "loss", "tape length", "GFLOPs (bound)", **TABLE)
    tape = f"{result.length_mean:.1f} ± {result.length_var**0.5:.1f}"
    table.add_row(str(length), f"{result.accuracy:.2%}", f"{result.loss:.4f}", tape, f"{whole.macs / 1e9:.4f}")
    Console().print(table)
    return {"length": length, **result._asdict(), "parameters": whole.parameters, "gflops": whole.macs / 1e9}


def print_cost(name: str, classes: int, tape: int | None, **options: str | None) -> dict[str, Any]:
    given = {key: value for key, value in options.items() if value is not None}
    model = _create(name, num_classes=classes, **given)
    parts = cost(model, tape)
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
            model = _create(name, **options)
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
        model = _create(row.model, **row.options)
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
    kinds: dict[type, str] = {
        AdaTape: "sequence",
        AViT: "tokens",
        PonderNet: "depth",
        Universal: "depth",
        UViT: "depth",
    }
    return kinds.get(type(model), "–")


def sweep_with_progress(what: Any, over: list[str], out: Path | None, device: str) -> dict[str, Any]:
    """Runs every combination, one after the other, and tabulates them."""
    experiment: Experiment = what() if callable(what) else load_config(what.config)
    grid = combinations(experiment, over)
    out, device = out or _free_folder(f"{experiment.recipe}-sweep"), pick_device(device)
    table = Table(*grid[0][0], "test accuracy", "tape length", "GFLOPs", "steps", **TABLE)
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("sweep", total=len(grid), note="")
        for n, (chosen, each) in enumerate(grid):
            bar.update(task, note=" ".join(f"{key}={value}" for key, value in chosen.items()))
            result = run(each, out / str(n), device, lambda *_: None)
            rows.append({**chosen, **{key: result[key] for key in ("accuracy", "length_mean", "gflops", "steps")}})
            figures = (f"{result['accuracy']:.2%}", f"{result['length_mean']:.1f}", f"{result['gflops']:.4f}")
            table.add_row(*map(str, chosen.values()), *figures, str(result["steps"]))
            bar.advance(task)
    (out / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    console = Console()
    console.print(table)
    console.print(f"sweep folder: {out}", highlight=False)
    return {"rows": rows, "out": str(out)}


def _create(name: str, **options: Any) -> torch.nn.Module:
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.0)
        raise ValueError(f"{name} is not a model; near matches: {', '.join(near)}")
    with torch.device("meta"):
        try:
            return timm.create_model(name, **options)
        except TypeError as error:
            raise ValueError(f"{name} does not take these options: {error}") from error


def _cost_title(name: str, given: dict[str, str], model: torch.nn.Module, tape: int | None) -> str:
    settings = " ".join(f"{key}={value}" for key, value in given.items())
    reader = getattr(model, "reader", None)
    read = "" if reader is None else f"{reader.steps if tape is None else tape} tape tokens"
    return " · ".join(piece for piece in (name, settings, read) if piece)


def _free_folder(recipe: str) -> Path:
    return next(path for n in itertools.count(1) if not (path := Path("runs") / f"{recipe}-{n}").exists())
