"""Finished runs read from their folders, seeds gathered, the paper's figures beside ours."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adatape.config import Experiment, to_dict
from adatape.evaluate.catalogue import list_paper_models
from adatape.evaluate.paper_comparison import paper_accuracy, paper_systems, same_system, shape_of, system_of
from adatape.evaluate.result import main_figure, work_unit
from adatape.report.table import Table
from adatape.train.folder import RESULT, load_config, load_result
from adatape.train.trust import check_links
from adatape.validation import read_object

SAME = ("seed", "engine")  # what may differ between runs of one row
Row = dict[str, Any]


class Run(NamedTuple):
    """A finished run as its folder tells it."""

    folder: Path
    experiment: Experiment
    result: dict[str, Any]
    env: dict[str, Any]


class Figure(NamedTuple):
    """A column of figures: how it is headed, scaled and written."""

    head: str
    scale: float
    text: str


COLUMNS = {
    "accuracy": Figure("accuracy %", 100, ".2f"),
    "mean_ap": Figure("mean AP %", 100, ".2f"),
    "loss": Figure("loss", 1, ".2g"),
    "parameters": Figure("M param.", 1e-6, ".3f"),
    "gflops": Figure("{unit}", 1, ".3g"),
    "gflops_mean": Figure("… mean", 1, ".3g"),
    "gflops_p95": Figure("… p95", 1, ".3g"),
    "steps": Figure("steps", 1, ",.0f"),
    "samples_per_second": Figure("samples/s", 1, ",.0f"),
}
HEADS = {name: column.head for name, column in COLUMNS.items()}
ROUNDING = 1e-9  # of the mean: seeds whose figures differ by less have the same
NOTE = (
    "Accuracy and loss are on the test set. Where images have several labels, mean AP is the mean over classes of "
    "average precision, and accuracy the share of images with all labels right. One multiply-add counts as 1 in "
    "FLOPs: first what the budget allows, then mean and 95th percentile over test samples. steps: of training; "
    "samples/s: meanwhile, evaluation included. tape: tokens read, mean ± standard deviation over test samples. "
    "Where runs differ only by seed, the other figures are mean ± standard deviation over seeds."
)


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Finished runs, those of sweeps and demos too, and why the other folders are none."""
    runs, skipped = [], {}
    for folder in dict.fromkeys(each for given in folders for each in _runs_in(given)):
        try:
            runs.append(_read(folder))
        except (ValueError, OSError) as error:
            skipped[folder] = str(error)
    return runs, skipped


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ only by seed together; recipes in order, the best first."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in to_dict(run.experiment).items() if name not in SAME}
        settings["model"].pop("budget", None)  # chosen after training; a result is of the trained one
        found.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    groups = [sorted(group, key=lambda run: run.experiment.seed) for group in found.values()]
    return sorted(groups, key=lambda group: (group[0].experiment.recipe, -_mean(group, main_figure(group[0].result))))


def rows_of(groups: Sequence[Sequence[Run]]) -> list[Row]:
    """Each group's figures as plain keys; spreads over seeds where there are several."""
    firsts = [group[0].experiment for group in groups]
    return [_row(group, name) for group, name in zip(groups, names(firsts), strict=True)]


def _row(group: Sequence[Run], name: str) -> Row:
    first = group[0].experiment
    row: Row = {"recipe": first.recipe, "system": system_of(first), "name": name, "model": shape_of(first)}
    for column in COLUMNS:
        values = [value for run in group if isinstance(value := run.result.get(column), int | float)]
        row[column] = statistics.fmean(values) if values else None
        if len(values) > 1:
            row[f"{column}_sd"] = statistics.stdev(values)
    row |= {column: _mean(group, column) for column in ("length_mean", "length_var")}
    return row | {"seeds": [run.experiment.seed for run in group], "runs": [str(run.folder) for run in group]}


def names(experiments: Sequence[Experiment]) -> list[str]:
    """Each one's system, and of those that share recipe and system what tells their models apart."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in experiments:
        alike.setdefault((each.recipe, system_of(each)), []).append(_settings(each))
    return [
        " ".join([system_of(each), *_apart(_settings(each), alike[each.recipe, system_of(each)])])
        for each in experiments
    ]


def results_table(rows: Sequence[Row], heads: Mapping[str, str] = HEADS, notes: Sequence[str] = (NOTE,)) -> Table:
    heads = {name: head for name, head in heads.items() if name != "mean_ap" or any(row.get(name) for row in rows)}
    unit, scale = work_unit(max((row["gflops"] or row["gflops_mean"] or 0.0 for row in rows), default=0.0))
    cells = [
        [
            row["recipe"],
            row["name"],
            *(written(row, name, scale if name.startswith("gflops") else 1) for name in heads),
            f"{row['length_mean']:.2f} ± {row['length_var'] ** 0.5:.2f}" if row["length_mean"] else "–",
            ", ".join(map(str, row["seeds"])),
        ]
        for row in rows
    ]
    named = [head.format(unit=unit) for head in heads.values()]
    return Table(["recipe", "system", *named, "tape", "seeds"], cells, notes=notes, words=(0, 1))


def paper_accuracy_table(groups: Sequence[Sequence[Run]], rows: Sequence[Row]) -> Table:
    """The paper's words and figures for these runs."""
    cells = [
        [row["recipe"], row["system"], row["model"], written(row, "accuracy"), theirs]
        for group, row in zip(groups, rows, strict=True)
        if (theirs := paper_accuracy(group[0].experiment))
    ]
    note = (
        "Where the paper trains the same system on the same task. Its parity result is a picture, told here in its "
        "words, of 12 layers of width 192."
    )
    return Table(["recipe", "system", "model", "ours %", "paper"], cells, notes=[note], words=(0, 1, 2, 4))


def paper_cost_table(groups: Sequence[Sequence[Run]]) -> Table:
    """The paper's counts for the systems among these runs."""
    experiments = [group[0].experiment for group in groups]
    cells = [
        [
            label,
            f"{ours.parameters / 1e6:.3f}",
            "–" if theirs.parameters is None else f"{theirs.parameters:.1f}",
            f"{ours.gflops:.3f}",
            "–" if theirs.gflops is None else f"{theirs.gflops:.3f}",
            theirs.note,
        ]
        for label, ours in list_paper_models(paper_systems(experiments)).models.items()
        if (theirs := ours.paper)
    ]
    same = sorted({row.label for each in experiments if (row := same_system(each))})
    which = f"these have the paper's size: {', '.join(same)}" if same else "none has the paper's size"
    note = f"The paper's models of these families as built here, at its sizes; of the runs above, {which}."
    head = ["system of the paper", "M, ours", "M, paper", "GFLOPs bound, ours", "GFLOPs, paper", "note"]
    return Table(head, cells, notes=[note], words=(0, 5))


def written(row: Row, name: str, scale: float = 1) -> str:
    mean, spread, column = row[name], row.get(f"{name}_sd", 0.0), COLUMNS[name]
    scale *= column.scale
    if mean is None:
        return "–"
    text = format(scale * mean, column.text)
    return f"{text} ± {scale * spread:{column.text}}" if spread > ROUNDING * abs(mean) else text


def _runs_in(folder: Path) -> list[Path]:
    """The folder, or the runs that a sweep, the demo or a benchmark has put anywhere into it."""
    if (folder / "config.json").is_file() or not folder.is_dir():
        return [folder]
    return sorted(path.parent for path in folder.rglob("config.json")) or [folder]


def _read(folder: Path) -> Run:
    if not folder.is_dir():
        raise FileNotFoundError("is no folder")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("has no config.json, so it is no run")
    check_links(folder)  # the page would hold pictures from elsewhere
    experiment = load_config(folder / "config.json")
    if not (folder / RESULT).is_file():
        raise FileNotFoundError(f"has no {RESULT}: the run is not finished; `adatape train {folder}` resumes it")
    env = folder / "env.json"
    return Run(folder, experiment, load_result(folder), read_object(env) if env.is_file() else {})


def _settings(experiment: Experiment) -> dict[str, Any]:
    model = to_dict(experiment.model)
    return {name: value for name, value in {**model, **model.get("options", {})}.items() if name != "options"}


def _apart(mine: dict[str, Any], all_of_them: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{name} {value}"
        for name, value in mine.items()
        if not isinstance(value, dict) and any(other.get(name) != value for other in all_of_them)
    ]


def _mean(group: Sequence[Run], name: str) -> float:
    return statistics.fmean(run.result.get(name) or 0.0 for run in group)
