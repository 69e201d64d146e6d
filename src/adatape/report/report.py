"""`adatape report`: all runs on one page, seeds gathered, the paper's figures beside ours."""

from __future__ import annotations

import json
import statistics
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from adatape.config import Experiment, to_dict
from adatape.report.beside import counted_beside, paper_accuracy, same_system, shape_of, system_of
from adatape.report.page import GENERATOR, as_json, details, figures, table, whole_page
from adatape.report.terminal import TABLE
from adatape.train.files import whole
from adatape.train.folder import RESULT, load_config, load_result, missing_weights
from adatape.train.trust import check_links
from adatape.validation import read_object

SAME = ("seed", "engine")  # what may differ between runs of one cell


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
    "loss": Figure("loss", 1, ".2g"),
    "parameters": Figure("M param.", 1e-6, ".3f"),
    "gflops": Figure("GFLOPs", 1, ".3g"),
    "gflops_mean": Figure("… mean", 1, ".3g"),
    "gflops_p95": Figure("… p95", 1, ".3g"),
    "steps": Figure("steps", 1, ",.0f"),
    "samples_per_second": Figure("samples/s", 1, ",.0f"),
}
ROUNDING = 1e-9  # of the mean: seeds whose figures differ by less have the same
PRINTED = ("accuracy", "parameters", "gflops_mean")  # what a terminal has room for
NOTE = (
    "Accuracy and loss are on the test set. One multiply-add counts as 1 in GFLOPs: first what the budget allows, then "
    "mean and 95th percentile over test samples. steps: of training; samples/s: meanwhile, evaluation included. tape: "
    "tokens read, mean ± standard deviation over test samples. Where runs differ only by seed, the other figures are "
    "mean ± standard deviation over seeds."
)


def print_report(folders: list[Path], out: Path) -> dict[str, Any]:
    """Writes the page, prints its first table, and says which folders were passed over and why."""
    _check_out(out)
    runs, skipped = read_runs(folders)
    if not runs:
        why = "; ".join(f"{folder}: {reason}" for folder, reason in skipped.items()) or "no folder was given"
        raise ValueError(f"no finished run to report: {why}")
    groups = grouped(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as partial:
        partial.write_text(whole_page("AdaTape: report", _parts(groups, skipped)))
    _print(groups, skipped, out)
    rows = [row_of(group) for group in groups]
    return {"out": str(out), "runs": len(runs), "rows": rows, "skipped": {str(k): v for k, v in skipped.items()}}


def read_runs(folders: list[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Finished runs, those of sweeps and demos too, and why the other folders are none."""
    runs, skipped = [], {}
    for folder in dict.fromkeys(each for given in folders for each in _runs_in(given)):
        try:
            runs.append(_read(folder))
        except (ValueError, OSError) as error:
            skipped[folder] = str(error)
    return runs, skipped


def grouped(runs: list[Run]) -> list[list[Run]]:
    """Runs that differ only by seed together; recipes in order, the most accurate first."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in to_dict(run.experiment).items() if name not in SAME}
        settings["model"].pop("budget", None)  # chosen after training; a result is of the trained one
        found.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    groups = [sorted(group, key=lambda run: run.experiment.seed) for group in found.values()]
    return sorted(groups, key=lambda group: (group[0].experiment.recipe, -_mean(group, "accuracy")))


def row_of(group: list[Run]) -> dict[str, Any]:
    """A group's figures as plain keys; spreads over seeds where there are several."""
    first = group[0].experiment
    row: dict[str, Any] = {"recipe": first.recipe, "system": system_of(first), "model": shape_of(first)}
    for name in COLUMNS:
        values = _values(group, name)
        row[name] = statistics.fmean(values) if values else None
        if len(values) > 1:
            row[f"{name}_sd"] = statistics.stdev(values)
    row |= {name: _mean(group, name) for name in ("length_mean", "length_var")}
    return row | {"seeds": [run.experiment.seed for run in group], "runs": [str(run.folder) for run in group]}


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
        raise FileNotFoundError(f"has no {RESULT}: the run is not finished; `adatape train {folder}` goes on with it")
    env = folder / "env.json"
    return Run(folder, experiment, load_result(folder), read_object(env) if env.is_file() else {})


def _check_out(out: Path) -> None:
    """An earlier report is written anew; anything else is not ours to replace."""
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; --out must be a file, as in {out / 'report.html'}")
    if out.is_file() and GENERATOR not in out.read_text(errors="replace")[:2000]:
        raise FileExistsError(f"{out} exists and is no earlier report; choose another --out or remove it")


def _parts(groups: list[list[Run]], skipped: dict[Path, str]) -> list[str]:
    runs = [run for group in groups for run in group]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    many = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    return [
        f'<h1>AdaTape: report</h1>\n<p class="faint">{many}, written {now} by <code>adatape report</code></p>',
        "<h2>Results</h2>",
        _results(groups),
        *_beside(groups),
        "<h2>Runs</h2>",
        *(_article(run) for run in runs),
        *_skipped(skipped),
    ]


def _results(groups: list[list[Run]]) -> str:
    head = ["recipe", "system", *(column.head for column in COLUMNS.values()), "tape", "seeds"]
    return table(head, _rows(groups, tuple(COLUMNS)), NOTE, words=(0, 1))


def _rows(groups: list[list[Run]], columns: tuple[str, ...]) -> list[list[str]]:
    return [
        [
            group[0].experiment.recipe,
            name,
            *(_written(group, column) for column in columns),
            _tape(group),
            ", ".join(str(run.experiment.seed) for run in group),
        ]
        for group, name in zip(groups, names([group[0].experiment for group in groups]), strict=True)
    ]


def names(experiments: list[Experiment]) -> list[str]:
    """Each one's system, and of those that share recipe and system what tells their models apart."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in experiments:
        alike.setdefault((each.recipe, system_of(each)), []).append(_settings(each))
    return [
        " ".join([system_of(each), *_apart(_settings(each), alike[each.recipe, system_of(each)])])
        for each in experiments
    ]


def _settings(experiment: Experiment) -> dict[str, Any]:
    model = to_dict(experiment.model)
    return {name: value for name, value in {**model, **model.get("options", {})}.items() if name != "options"}


def _apart(mine: dict[str, Any], all_of_them: list[dict[str, Any]]) -> list[str]:
    return [
        f"{name} {value}"
        for name, value in mine.items()
        if not isinstance(value, dict) and any(other.get(name) != value for other in all_of_them)
    ]


def _written(group: list[Run], name: str) -> str:
    values, column = _values(group, name), COLUMNS[name]
    if not values:
        return "–"
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    text = format(column.scale * mean, column.text)
    return f"{text} ± {column.scale * spread:{column.text}}" if spread > ROUNDING * abs(mean) else text


def _tape(group: list[Run]) -> str:
    mean, variance = _mean(group, "length_mean"), _mean(group, "length_var")
    return f"{mean:.2f} ± {variance**0.5:.2f}" if mean else "–"


def _beside(groups: list[list[Run]]) -> list[str]:
    """The paper's words and figures for these runs, then its counts for the systems among them."""
    parts = [part for part in (_accuracy_beside(groups), _counts_beside(groups)) if part]
    return ["<h2>Beside the paper</h2>", *parts] if parts else []


def _accuracy_beside(groups: list[list[Run]]) -> str:
    rows = [
        [each.recipe, system_of(each), shape_of(each), _written(group, "accuracy"), paper_accuracy(each)]
        for group in groups
        if paper_accuracy(each := group[0].experiment)
    ]
    above = (
        "Where the paper trains the same system on the same task. Its parity result is a picture, told here in its "
        "words, of 12 layers of width 192."
    )
    head = ["recipe", "system", "model", "ours %", "paper"]
    return table(head, rows, above, words=(0, 1, 2, 4)) if rows else ""


def _counts_beside(groups: list[list[Run]]) -> str:
    experiments = [group[0].experiment for group in groups]
    rows = [
        [
            row.label,
            f"{row.parameters:.3f}",
            "–" if row.paper_parameters is None else f"{row.paper_parameters:.1f}",
            f"{row.gflops:.3f}",
            "–" if row.paper_gflops is None else f"{row.paper_gflops:.3f}",
            row.note,
        ]
        for row in counted_beside(experiments)
    ]
    same = sorted({row.label for each in experiments if (row := same_system(each))})
    which = f"these have the paper's size: {', '.join(same)}" if same else "none has the paper's size"
    above = f"The paper's models of these families as built here, at its sizes; of the runs above, {which}."
    head = ["system of the paper", "M, ours", "M, paper", "GFLOPs bound, ours", "GFLOPs, paper", "note"]
    return table(head, rows, above, words=(0, 5)) if rows else ""


def _article(run: Run) -> str:
    pictures = figures(run.folder / "figures")
    lacking = f'<p class="faint">No figures yet: <code>adatape figures {escape(str(run.folder))}</code> draws them.</p>'
    env = {name: value for name, value in run.env.items() if name != "command"}
    place = " · ".join(str(env[name]) for name in ("hardware", "device", "date") if env.get(name))
    versions = ", ".join(f"{name} {env[name]}" for name in ("python", "torch", "timm", "adatape") if env.get(name))
    return "\n".join(
        [
            f"<article>\n<h3>{escape(str(run.folder))}</h3>",
            f"<p>{escape(run.experiment.recipe)}, {escape(shape_of(run.experiment))}, seed {run.experiment.seed}: "
            f"{_written([run], 'accuracy')} %</p>",
            f'<p class="faint">{escape(place)}<br>{escape(versions)}</p>',
            f"<pre>{escape(str(run.env.get('command', 'the command is not known')))}</pre>",
            pictures or lacking,
            f'<p class="faint">{escape(missing_weights(run.folder) or "")}</p>',
            details("environment", as_json(env)),
            details("config.json", as_json(to_dict(run.experiment))),
            details("result.json", as_json(run.result)),
            "</article>",
        ]
    )


def _skipped(skipped: dict[Path, str]) -> list[str]:
    if not skipped:
        return []
    return ["<h2>Passed over</h2>", table(["folder", "why"], [[str(k), v] for k, v in skipped.items()], words=(0, 1))]


def _print(groups: list[list[Run]], skipped: dict[Path, str], out: Path) -> None:
    printed = Table("recipe", "system", "accuracy %", "M parameters", "GFLOPs mean", "tape", "seeds", **TABLE)
    for row in _rows(groups, PRINTED):
        printed.add_row(*row)
    console = Console()
    console.print(printed)
    for lacking in filter(None, (missing_weights(run.folder) for group in groups for run in group)):
        console.print(lacking, highlight=False, markup=False, soft_wrap=True)
    for folder, reason in skipped.items():
        console.print(f"passed over {folder}: {reason}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {out}", highlight=False, soft_wrap=True)


def _values(group: list[Run], name: str) -> list[float]:
    return [value for run in group if isinstance(value := run.result.get(name), int | float)]


def _mean(group: list[Run], name: str) -> float:
    return statistics.fmean(run.result.get(name) or 0.0 for run in group)
