"""Training and scoring on the command line: progress as it goes, a table at the end."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from adatape.config import Experiment, Parity
from adatape.evaluate.accuracy import Score
from adatape.evaluate.cost import cost, total
from adatape.report.terminal import TABLE, free_folder, pick_device, progress_bar
from adatape.train.evaluate import score_run
from adatape.train.folder import load_config, load_run
from adatape.train.run import Moment, Watch, plain, run
from adatape.train.sweep import combinations, with_settings
from adatape.train.trust import check_links, untrusted
from adatape.validation import call_checked


def train_with_progress(
    what: Any, out: Path | None, device: str, fields: tuple[str, ...] = (), resume: bool = False, trust: bool = False
) -> dict[str, Any]:
    """A recipe or a config.json into a new folder; a folder goes on where it stopped."""
    going_on = isinstance(getattr(what, "folder", None), Path)
    experiment = _experiment(what, fields, trust)
    folder = what.folder if going_on else out or _own_folder(experiment.recipe)
    if (folder / "config.json").is_file() and not trust:
        check_links(folder)
    console = Console(quiet=_rank() > 0)
    with _progress(experiment, console) as watch:
        result = run(
            experiment,
            folder,
            pick_device(device),
            watch,
            resume=going_on or resume,
            say=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
        )
    _print_result(result, console)
    console.print(f"run folder: {folder}", highlight=False)
    return {**result, "out": str(folder)}


def _own_folder(recipe: str) -> Path:
    """Several processes, or a restart of one, would each find another folder free."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("out is not given; processes that train together need one folder, so say --out DIR")
    return free_folder(recipe)


def _experiment(what: Any, fields: tuple[str, ...], trust: bool) -> Experiment:
    """A recipe's is the user's own; of a file's, what the user has not set may fetch nothing."""
    if callable(what):
        experiment: Experiment = call_checked(what.func, *what.args, **what.keywords)
    else:
        experiment = load_config(what.folder / "config.json" if hasattr(what, "folder") else what.config, trust=True)
    experiment = with_settings(experiment, fields) if fields else experiment
    said = [field.partition("=")[0].strip() for field in fields]
    return experiment if callable(what) or trust else untrusted(experiment, said)


@contextmanager
def _progress(experiment: Experiment, console: Console) -> Iterator[Watch]:
    with progress_bar(disable=_rank() > 0) as bar:
        task = bar.add_task(experiment.recipe, total=experiment.optimizer.steps, note="")

        def watch(moment: Moment) -> None:
            bar.update(task, completed=moment.step, note=_now(moment))
            if moment.score is not None:
                epoch = "" if moment.epoch is None else f"epoch {moment.epoch:6.1f}  "
                where = f"step {moment.step:6d}  {epoch}"
                line = f"{where}train loss {moment.loss:.4f}  validation {describe(moment.score)}"
                (console if bar.disable else bar.console).print(line, highlight=False, soft_wrap=True)

        yield watch


def _now(moment: Moment) -> str:
    tape = f"  tape {moment.length_mean:.1f} ± {moment.length_sd:.1f}" if moment.length_mean else ""
    speed = f"{moment.samples_per_second:,.0f}/s"
    return f"{speed}  loss {moment.loss:.3f}  accuracy {moment.accuracy:.1%}{tape}"


def describe(result: Score) -> str:
    tape = f", tape {result.length_mean:.1f} ± {result.length_var**0.5:.1f}" if result.length_mean else ""
    return f"accuracy {result.accuracy:.2%}{tape}"


def _print_result(result: dict[str, Any], console: Console) -> None:
    table = Table("test accuracy", "tape length", "parameters", "GFLOPs", "steps", "seconds", **TABLE)
    table.add_row(
        f"{result['accuracy']:.2%}",
        f"{result['length_mean']:.1f} ± {result['length_var'] ** 0.5:.1f}",
        f"{result['parameters'] / 1e6:.3f} M",
        f"{result['gflops_mean']:.4f}",
        str(result["steps"]),
        f"{result['seconds']:.0f}",
    )
    console.print(table)


def print_evaluation(folder: Path, length: int | None, device: str, trust: bool = False) -> dict[str, Any]:
    """Accuracy, sequence length and cost on the test set, as in the paper's ablation table."""
    with warnings.catch_warnings():  # reading further than trained is what `--length` asks for
        warnings.simplefilter("ignore", UserWarning)
        experiment, model = load_run(folder, length, trust=trust)
    result = score_run(experiment, model, torch.device(pick_device(device)), length=length)
    whole = total(cost(model))
    table = Table("accuracy", "loss", "sequence", "longest", "variance", "GFLOPs mean", "p50", "p95", "bound", **TABLE)
    table.add_row(
        f"{result.accuracy:.2%}",
        f"{result.loss:.4f}",
        f"{result.sequence_mean:.1f}",
        str(result.sequence_max),
        f"{result.length_var:.2f}",
        *(f"{value:.4f}" for value in (result.gflops_mean, result.gflops_p50, result.gflops_p95, whole.macs / 1e9)),
    )
    Console().print(table)
    trained = {"length": length or experiment.data.length} if isinstance(experiment.data, Parity) else {}
    return {**trained, **plain(result), "parameters": whole.parameters, "gflops": whole.macs / 1e9}


def sweep_with_progress(
    what: Any, over: list[str], out: Path | None, device: str, trust: bool = False
) -> dict[str, Any]:
    """Runs every combination, one after the other, and tabulates them."""
    experiment = _experiment(what, (), trust=True)
    grid = combinations(experiment, over)
    if not callable(what) and not trust:
        grid = [(chosen, untrusted(each, chosen)) for chosen, each in grid]
    out, device = out or free_folder(f"{experiment.recipe}-sweep"), pick_device(device)
    table = Table(*grid[0][0], "test accuracy", "tape length", "GFLOPs", "steps", **TABLE)
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("sweep", total=len(grid), note="")
        for place, (chosen, each) in enumerate(grid):
            bar.update(task, note=" ".join(f"{key}={value}" for key, value in chosen.items()))
            result = run(each, out / str(place), device, lambda _: None)
            bar.advance(task)
            rows.append({**chosen, **{key: result[key] for key in ("accuracy", "length_mean", "gflops", "steps")}})
            figures = (f"{result['accuracy']:.2%}", f"{result['length_mean']:.1f}", f"{result['gflops_mean']:.4f}")
            table.add_row(*map(str, chosen.values()), *figures, str(result["steps"]))
    (out / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    console = Console()
    console.print(table)
    console.print(f"sweep folder: {out}", highlight=False)
    return {"rows": rows, "out": str(out)}


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
