"""The docs' tables agree with the files under results/, whose number and size are limited."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from scipy.stats import spearmanr
from scripts import ROOT, script

tables, looking = script("research/tables.py"), script("research/look.py")
speed_tables = script("research/speed_tables.py")
parity_tables, pictures = script("research/parity_tables.py"), script("research/pictures.py")
LENGTHS = parity_tables.LENGTHS
RESULTS = ROOT / "results"
STUDIES = sorted(RESULTS.rglob("*.jsonl"))
OF_RUNS = [path for path in STUDIES if path.stem in tables.STUDIES or path.parent.name == "tried"]


@pytest.mark.parametrize("page", sorted({place.page for place in tables.PLACES.values()}))
def test_pages_and_files_agree(page: str) -> None:
    """`make tables` updates the pages."""
    assert tables.renewed(page) == (ROOT / "docs" / page).read_text()


def test_every_table_between_two_lines_has_a_maker() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        marked = {line[5:-4] for line in page.read_text().splitlines() if line.startswith("<!-- ")}
        made = {name for name, place in tables.PLACES.items() if place.page == page.name}
        assert marked == made | {f"end of {name}" for name in made}


def test_a_table_goes_between_its_lines_and_nowhere_else() -> None:
    begin, end = "<!-- tried -->", "<!-- end of tried -->"
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    for _ in range(2):
        page = tables.replaced(page, "tried", "| new |")
        assert page == f"before\n{begin}\n\n| new |\n\n{end}\nafter\n"
    with pytest.raises(ValueError, match="must have one line"):
        tables.replaced("no place", "tried", "| new |")


def test_pages_are_written_and_studies_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    monkeypatch.setattr(tables, "PLACES", {"server": tables.PLACES["server"]})
    page = tmp_path / "budgets.md"
    page.write_text("<!-- server -->\nold\n<!-- end of server -->\n")
    tables.main(["--write"])
    assert "| plain ViT of the same size | 164 (5.9, 8.6) |" in page.read_text()
    tables.main([str(RESULTS / "tried" / "strong.jsonl")])
    assert "plainvit-4-depth-4" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tables.main([])


def test_the_docs_pictures_are_drawn_from_the_files(tmp_path: Path) -> None:
    script("research/pictures.py").main(["--into", str(tmp_path)])
    for path in tmp_path.iterdir():
        assert Image.open(path).size == Image.open(ROOT / "docs" / "images" / path.name).size
    assert {path.name for path in tmp_path.iterdir()} == {"evidence.png", "parity.png", "speed.png"}


def row_of_parity(options: str, *points: tuple[int, float], done: bool = True) -> str:
    row = {"run": options, "options": options, "curve": points}
    row |= {"result": {"accuracy": points[-1][1], "steps": points[-1][0]}} if done else {"unfinished": "stopped"}
    return json.dumps(row) + "\n"


def test_three_seeds_of_every_system_join_the_figure_and_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_tables, "RESULTS", tmp_path)
    shutil.copy(RESULTS / "parity.jsonl", tmp_path)
    before, beyond = parity_tables.by_length(), parity_tables.beyond().splitlines()
    assert parity_tables.figure_runs() == parity_tables.runs_in("parity")

    systems = [f"--system {name} --seed {seed}" for name in parity_tables.TO_THE_END for seed in range(3)]
    rows = [row_of_parity(f"--length {n} {each}", (1000, 0.5), (10000, 0.51)) for n in LENGTHS for each in systems]
    rows += [row_of_parity(f"--length 512 --seed {seed}", (250, 0.5), (500, 1.0)) for seed in range(2)]
    rows += [row_of_parity("--length 512 --seed 2", (250, 0.49), done=False)]
    rows += [row_of_parity("--length 1024 --seed 0", done=False)]
    (tmp_path / "parity_figure.jsonl").write_text("".join(rows))

    after = parity_tables.by_length()
    assert after.startswith(before)
    assert [line.count("51.00 (10,000)") for line in after.removeprefix(before).splitlines()[1:]] == [12] * 3
    longer = parity_tables.beyond().splitlines()
    assert "seeds 0, 1, 2 (steps) | **100.00** (500), **100.00** (500), 49.00 ᵃ (250)" in longer[3]
    assert [line for line in longer if "512, seed" not in line] == [line for line in beyond if "512, seed" not in line]

    @contextmanager
    def kept(*_: object) -> Iterator[Figure]:
        yield figure

    figure = Figure(figsize=(7.5, 8), layout="constrained")
    monkeypatch.setattr(pictures, "picture", kept)
    pictures.draw_parity(tmp_path / "parity.png", parity_tables.figure_runs(), [*LENGTHS, 512])
    *panels, empty = figure.axes
    assert [axes.get_title("center") for axes in panels] == [f"N = {n}" for n in (*LENGTHS, 512)]
    assert not empty.axison
    for axes in panels[:4]:
        colours = [line.get_color() for line in axes.lines if list(line.get_xdata()) == [1000, 10000]]
        assert len(colours) == 9
        assert len(set(colours)) == 3
    FigureCanvasAgg(figure).draw()
    named = figure.legends[0].get_texts()
    assert {text.get_text() for text in named} == {name for name, _ in pictures.PARITY.values()}
    boxes = [text.get_window_extent() for text in named]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_row_of_the_loop_with_jpegs_changes_no_row_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = speed_tables.loop_and_loader()
    for name in ("loop.jsonl", "loader.jsonl"):
        shutil.copy(RESULTS / name, tmp_path)
    first = json.loads((tmp_path / "loop.jsonl").read_text().splitlines()[0])
    with (tmp_path / "loop.jsonl").open("a") as file:
        file.write(json.dumps(first | {"case": f"{first['case']}, JPEGs", "whole_over_bare": 2.0}) + "\n")
    monkeypatch.setattr(speed_tables, "RESULTS", tmp_path)
    assert speed_tables.loop_and_loader() == before


def test_results_are_few_files_and_small() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(files) < 100
    assert sum(path.stat().st_size for path in files) < 5_000_000
    assert {path.suffix for path in files} <= {".jsonl", ".npz", ".json", ".txt"}


@pytest.mark.parametrize("path", OF_RUNS, ids=lambda path: path.stem)
def test_every_run_has_config_environment_and_curve(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["run"] for row in rows}) == len(rows)
    for row in rows:
        assert row["config"]["seed"] == int(row["run"].rpartition("-")[2])
        assert row["environment"]["torch"]
        assert row["curve"]
        assert "result" in row or path.stem == "cpu"


def test_lengths_that_were_kept_follow_difficulty_as_the_rows_say() -> None:
    rows = {row["run"]: row for row in map(json.loads, (RESULTS / "evidence.jsonl").read_text().splitlines())}
    kept = np.load(RESULTS / "evidence.npz")
    judged = {
        run: row["difficulty"][looking.JUDGE] for run, row in rows.items() if looking.JUDGE in row.get("difficulty", {})
    }
    assert len(judged) == 20
    for recipe in ("cifar10", "cifar100"):
        seeds = [kept[name] for name in kept.files if name.startswith(f"{recipe}/{looking.JUDGE}/")]
        loss = np.mean([looking.loss_of(certainty).numpy() for certainty in seeds], 0)
        for run, found in judged.items():
            if run.startswith(f"{recipe}/"):
                rho = spearmanr(kept[f"{run}/length"], loss).statistic
                assert rho == pytest.approx(found["rho"], abs=1e-9)
