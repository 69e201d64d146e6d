"""Every verb is a function that is silent and returns what `--json` prints; a table says the same in three forms."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import tiny

from adatape import cli
from adatape.config import Bench
from adatape.evaluate.budget import Target
from adatape.evaluate.progress import Progress
from adatape.evaluate.result import Result
from adatape.export import Difference
from adatape.recipes import RECIPES
from adatape.recipes.haystack import haystack
from adatape.recipes.parity import parity_small
from adatape.report.figures import DRAWN
from adatape.report.legend import LEGEND, legend
from adatape.report.table import Table
from adatape.report.tables import trained_table
from adatape.report.terminal import TerminalProgress, print_table
from adatape.serve.server import Server, run_server
from adatape.train.launch import Trained, _report_to, train_to_folder
from adatape.train.run import TrainStatus

SOURCE = Path(cli.__file__).parents[1]
TAPE = "adatape_tiny_patch16_224:img_size=32,bank_patch=2,depth=2"
# Where each verb's function is, what it is called with beside a run, and what its command needs beside a verb.
CALLS: dict[str, tuple[str, Callable[[Path], dict[str, Any]], str]] = {
    "recipes": ("adatape.evaluate.recipes.list_recipes", lambda _: {}, ""),
    "cost": ("adatape.evaluate.catalogue.model_cost", lambda _: {"name": "vit_tiny_patch16_224"}, "vit"),
    "models": ("adatape.evaluate.catalogue.list_models", lambda _: {}, ""),
    "bench": (
        "adatape.report.bench.write_bench",
        lambda _: {"models": (TAPE,), "asked": Bench(None, (1,), ("inference",), "cpu", rounds=1, seconds=0.001)},
        "",
    ),
    "demo": ("adatape.report.demo.write_demo", lambda run: {"out": run.parent / "demo"}, ""),
    "train": (
        "adatape.train.launch.train_to_folder",
        lambda run: {"what": tiny(steps=1), "out": run.parent / "new", "device": "cpu"},
        "digits",
    ),
    "sweep": (
        "adatape.train.launch.sweep_to_folder",
        lambda run: {"what": tiny(steps=1), "over": ["seed=0,1"], "out": run.parent / "s", "device": "cpu"},
        "digits",
    ),
    "eval": ("adatape.train.launch.evaluate_run", lambda run: {"folder": run, "device": "cpu"}, "run"),
    "eval --budgets": (
        "adatape.report.budgets.write_budgets",
        lambda run: {"folder": run, "budgets": (0, 1, 500), "device": "cpu"},
        "run --budgets 0",
    ),
    "budget": (
        "adatape.train.budgets.find_budget",
        lambda run: {"folder": run, "target": Target("gflops", 1000.0), "device": "cpu"},
        "run --gflops 1000",
    ),
    "budget --store": (
        "adatape.train.budgets.store_budget",
        lambda run: {"folder": run, "target": Target("gflops", 1000.0), "device": "cpu"},
        "run --gflops 1000 --store",
    ),
    "budget --reset": ("adatape.train.budgets.reset_budget", lambda run: {"folder": run}, "run --reset"),
    "fewshot": (
        "adatape.train.fewshot.fewshot_run",
        lambda run: {"folder": run, "on": "digits", "shots": (1,), "seeds": (0, 1), "device": "cpu"},
        "run --on digits",
    ),
    "figures": (
        "adatape.report.figures.write_figures",
        lambda run: {"folder": run, "device": "cpu", "samples": 20},
        "run",
    ),
    "report": (
        "adatape.report.page.write_report",
        lambda run: {"folders": [run, run / "none"], "out": run.parent / "r.html"},
        "run",
    ),
    "export": ("adatape.export.write_export", lambda run: {"folder": run, "to": "torch"}, "run"),
    "release": (
        "adatape.train.release.release_to_folder",
        lambda run: {"folder": run, "to": run.parent / "released"},
        "run --to there",
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_to_folder(tiny(steps=2), tmp_path_factory.mktemp("runs") / "run", "cpu").out


@pytest.mark.usefixtures("few_canvases")
@pytest.mark.parametrize("verb", CALLS)
def test_a_verbs_function_prints_nothing_and_returns_what_json_prints(
    verb: str, finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    where, options, words = CALLS[verb]
    monkeypatch.setattr("adatape.evaluate.catalogue.default_cfgs", {"adatape_tiny_patch16_224": None})
    monkeypatch.setattr("adatape.report.demo.parity_small", functools.partial(parity_small, length=8, steps=1))
    monkeypatch.setattr("adatape.report.demo.haystack", functools.partial(haystack, steps=1))
    monkeypatch.setattr("adatape.evaluate.budget.MOST", 1)
    # Tracing, most pictures and the paper's large models take seconds; their own tests have them.
    monkeypatch.setattr("adatape.export.export_run", lambda folder, *_: folder / "config.json")
    monkeypatch.setattr("adatape.export.compare", lambda *_: [Difference(1, 0, 0.0)])
    monkeypatch.setattr("adatape.report.figures.DRAWN", DRAWN[:1])
    monkeypatch.setattr("adatape.report.runs.paper_systems", lambda _: [])
    module, _, name = where.rpartition(".")
    found = getattr(importlib.import_module(module), name)(**options(finished))
    assert isinstance(found, Result)
    assert capfd.readouterr() == ("", "")
    json.loads(found.to_json())
    monkeypatch.setattr(where, lambda *_, **__: found)
    cli.main([verb.split()[0], *words.split(), "--json"])
    table, _, printed = capfd.readouterr().out.rstrip("\n").rpartition("\n")
    assert printed == found.to_json()
    assert table
    for column in re.findall(r"(?<= )(?:M|p50|p95|bound|÷ ours|halts at)(?=  |\n| \n)", table.partition("\n")[0]):
        assert f"{column}: {LEGEND[column]}" in table


def test_every_verb_but_serve_has_such_a_function() -> None:
    assert {verb.split()[0] for verb in CALLS} == set(cli.VERBS) - {"serve"}


def test_a_server_prints_nothing_and_says_where_it_listens(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Server, "run", lambda *_, **__: None)
    started: list[Any] = []
    found = run_server(finished, port=0, device="cpu", on_start=started.append)
    assert started[0].address == found.address
    assert set(json.loads(found.to_json())) == {"name", "address", "latency_ms", "samples", "batches"}
    assert capfd.readouterr() == ("", "")


def test_only_the_terminal_needs_rich() -> None:
    for path in SOURCE.rglob("*.py"):
        found = {
            node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        }
        if any(module.partition(".")[0] == "rich" for module in found):
            assert path.relative_to(SOURCE).as_posix() in ("report/terminal.py", "report/table.py")


def test_progress_is_told_step_by_step(tmp_path: Path) -> None:
    class Heard(Progress):
        def __init__(self) -> None:
            self.steps: list[tuple[str, int, int]] = []
            self.lines: list[str] = []

        def update(self, task: str, done: int, total: int, note: str = "") -> None:
            self.steps.append((task, done, total))
            assert "loss" in note

        def message(self, text: str) -> None:
            self.lines.append(text)

    heard = Heard()
    train_to_folder(tiny(steps=2, evaluate_every=2), tmp_path / "run", "cpu", progress=heard)
    assert heard.steps[0][1:] == (1, 2)
    assert heard.steps[-1][1:] == (2, 2)
    assert "validation accuracy" in heard.lines[-1]


@pytest.mark.usefixtures("capsys")
def test_the_documented_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", (SOURCE.parents[1] / "docs" / "training.md").read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(block, "training.md", "exec"), scope)
    assert f"{scope['found'].score.accuracy:.2%}" in scope["evaluated_table"](scope["found"])._repr_html_()


def test_every_function_that_the_documents_name_is_there() -> None:
    text = (SOURCE.parents[1] / "docs" / "training.md").read_text()
    for where, _, _ in CALLS.values():
        assert where.rpartition(".")[2] in text


@pytest.mark.parametrize("name", RECIPES)
def test_a_bar_with_its_figures_fits_80_columns(name: str) -> None:
    given = {"path": "x"} if name in ("images", "finetune", "scenes", "megapixel") else {}
    experiment = RECIPES[name](**given)
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    with TerminalProgress(console) as progress:
        steps = experiment.optimizer.steps
        note = TrainStatus(steps - 1, steps, 12.5, 0.0123, 0.987, 3.21, 0.5, 1234.5)
        _report_to(experiment, progress)(note)
        shown = progress.bars.get_renderable()
    plain = Console(file=io.StringIO(), width=80, color_system=None)
    plain.print(shown)
    [line] = plain.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert line.startswith(name)
    assert line.rstrip().endswith("tape 3.2 1,234/s")
    assert f"{steps - 1}/{steps}" in line
    assert "━" in line
    assert len(line) <= 80


def test_columns_whose_names_do_not_say_what_they_hold_are_explained_below(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["cost", "vit_tiny_patch16_224"])
    assert "GFLOPs: billions of multiply-adds for one sample; share: of all GFLOPs" in capsys.readouterr().out
    for name in ("M", "÷ ours", "p50", "p95", "bound", "paper", "halts at", "sequence"):
        [line] = legend(["accuracy", name])
        assert line == f"{name}: {LEGEND[name]}"
    assert legend(["ms alone", "ms of 64"]) == [
        "ms alone: for one image by itself; ms of 64: for one image of a batch of 64"
    ]
    assert legend(["model", "accuracy"]) == []


def test_a_model_without_a_tape_has_no_length_of_one() -> None:
    result = {"accuracy": 0.5, "gflops_mean": 0.1, "parameters": 1000, "steps": 1, "seconds": 1.0}
    plain = Trained({**result, "length_mean": 0.0, "length_var": 0.0}, Path("run"))
    reader = Trained({**result, "length_mean": 2.0, "length_var": 0.25}, Path("run"))
    assert [trained_table(each).rows[0][1] for each in (plain, reader)] == ["–", "2.0 ± 0.5"]


def test_of_several_processes_only_the_first_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with TerminalProgress() as progress:
            progress.message(f"from {rank}")
    assert capsys.readouterr().out == "from 0\n"


STRANGE = ["<script>alert(1)</script>", "a|b", "[red]x[/red]", "`rm` *now* _x_", ":smile:", "&lt; \\ ~~y~~", "[a](b:c)"]
TABLE = Table(["class <i>", "n|m"], [[name, f"{n}"] for n, name in enumerate(STRANGE)], "[b]t</b>", ["<b>|[i]note"])


class Cells(HTMLParser):
    """The text of each cell, and every tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        self.tags.add(tag)
        self.inside = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        elif self.inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def in_the_terminal(table: Table) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(table.to_terminal())
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_no_figure_is_cut_however_narrow_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    figures = [("parity", *(f"{n}.00{n}8" for n in range(1, 9)), "8.0 ± 0.5")]
    columns = ("run", "accuracy", "loss", "sequence", "longest", "variance", "GFLOPs mean", "p50", "p95", "tape length")
    print_table(Table(columns, figures))
    shown = capsys.readouterr().out.splitlines()
    assert any(all(cell in line for cell in figures[0][1:]) for line in shown), shown


def test_a_table_has_the_same_cells_in_three_forms_whatever_they_hold() -> None:
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").enable("strikethrough")
    expected = [list(TABLE.columns), *map(list, TABLE.rows)]
    html, md = Cells(TABLE.to_html()), Cells(markdown.render(TABLE.to_markdown()))
    lines = [re.split(r"\s{2,}", line.strip()) for line in in_the_terminal(TABLE).splitlines()]
    assert html.rows == md.rows == lines[1:] == expected
    assert html.tags == {"p", "div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert md.tags == {"p", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert lines[0] == ["[b]t</b>"]


def test_a_cell_is_one_line_and_commands_no_terminal() -> None:
    table = Table(["name"], [["a\nb\x1b[31mc\x07"]])
    assert in_the_terminal(table).splitlines()[1].strip() == "a b�[31mc�"
    assert "| a b�\\[31mc� |" in table.to_markdown()


def test_a_row_that_lacks_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells; the table has 2 columns"):
        Table(["a", "b"], [["1"]])


def test_a_strangers_words_are_escaped_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adatape.report.page import write_report

    monkeypatch.setattr("adatape.report.runs.paper_systems", lambda _: [])
    folder = train_to_folder(tiny(steps=1), tmp_path / "<b>run", "cpu").out
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**env, "hardware": STRANGE[0], "command": STRANGE[0]}))
    (folder / "figures").mkdir()
    (folder / "figures" / "<script>.png").write_bytes(b"")
    write_report([folder, tmp_path / "<i>none"], tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert page.count("&lt;script&gt;") >= 4
    assert not re.search(r"<script|<b>|<i>", page)
