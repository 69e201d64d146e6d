"""The docs' tables agree with the files under results/, whose number and size are limited."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import spearmanr
from scripts import ROOT, script

tables, looking = script("research/tables.py"), script("research/look.py")
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
