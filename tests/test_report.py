"""The report has all finished runs, groups seeds, and is one self-contained file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_runs import tiny

from adatape.config import Budget, Experiment, to_dict
from adatape.evaluate.catalogue import list_paper_models
from adatape.evaluate.paper_comparison import paper_accuracy, paper_systems, same_system, system_of
from adatape.recipes.haystack import haystack
from adatape.recipes.imagenet import imagenet
from adatape.recipes.parity import parity
from adatape.recipes.transfer import finetune
from adatape.report.page import write_report
from adatape.report.runs import names
from adatape.train.folder import prepare, with_budget, write

RESULT = {
    "accuracy": 0.9,
    "loss": 0.3,
    "parameters": 257_000,
    "gflops": 0.002,
    "gflops_mean": 0.001,
    "gflops_p95": 0.0015,
    "length_mean": 2.0,
    "length_var": 0.25,
    "samples_per_second": 1000.0,
}


def finished(folder: Path, experiment: Experiment, **figures: Any) -> Path:
    """A run's folder as training leaves it, without the training."""
    prepare(folder, experiment, "cpu")
    (folder / "result.json").write_text(json.dumps({**RESULT, **figures}))
    return folder


def with_picture(folder: Path) -> Path:
    (folder / "figures").mkdir()
    Image.new("RGB", (30, 20), "green").save(folder / "figures" / "training.png")
    return folder


def test_runs_that_differ_only_by_seed_are_one_row_with_its_spread(tmp_path: Path) -> None:
    folders = [
        finished(tmp_path / "a", tiny(seed=1), accuracy=0.8, gflops_p95=0.1 + 0.2),
        finished(tmp_path / "b", tiny(seed=0, engine__workers=3), accuracy=0.9, gflops_p95=0.3),
        finished(tmp_path / "c", tiny(optimizer__lr=0.5), accuracy=0.95),
    ]
    made = write_report(folders, tmp_path / "report.html")
    assert [row["seeds"] for row in made.rows] == [[0], [0, 1]]
    assert made.rows[1]["accuracy"] == pytest.approx(0.85)
    assert made.rows[1]["accuracy_sd"] == pytest.approx(0.0707, abs=1e-4)
    page = (tmp_path / "report.html").read_text()
    assert "85.00 ± 7.07" in page
    assert "0.3 ±" not in page  # 0.1 + 0.2 is 0.3 but for rounding


def test_models_of_one_system_are_told_apart_by_what_differs() -> None:
    shallow, deep = (tiny("plainvit", model__options__depth=depth) for depth in (1, 2))
    assert names([shallow, deep, tiny("adatape")]) == ["plainvit depth 1", "plainvit depth 2", "adatape"]
    assert names([shallow, shallow]) == ["plainvit", "plainvit"]


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    folder = with_picture(finished(tmp_path / "a", tiny()))
    write_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)[^"]*"', page) == []
    assert not re.search(r"<script|<link|@import|url\(|https?://", page)
    assert page.count("data:image/png;base64,") == 1
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_the_page_has_the_command_the_environment_and_the_figures(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a", tiny())
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**env, "command": "adatape train <digits> & more"}))
    write_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "adatape train &lt;digits&gt; &amp; more" in page
    assert "<digits>" not in page
    assert env["torch"] in page
    assert f"adatape figures {folder}" in page  # none were drawn
    for figure in ("90.00", "0.3", "0.257", "2", "1", "1.5", "MFLOPs", "1,000", "2.00 ± 0.50"):
        assert f">{figure}<" in page


def test_a_budget_stored_after_training_is_named_beside_the_trained_ones_figure(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a", tiny())
    write(folder / "config.json", to_dict(with_budget(tiny(), Budget(2, 0.5))))
    write_report([folder], tmp_path / "report.html")
    said = "accuracy 90.00 % (figures of the trained budget; stored: steps 2, threshold 0.5)"
    assert said in (tmp_path / "report.html").read_text()


def test_an_earlier_report_among_the_folders_is_not_a_run_that_failed(tmp_path: Path) -> None:
    finished(tmp_path / "a", tiny())
    for _ in range(2):
        made = write_report(sorted(tmp_path.iterdir()), tmp_path / "report.html")
    assert made.runs == 1
    assert made.skipped == {}


def test_a_reader_of_windows_is_named_as_its_recipe_does() -> None:
    assert names([haystack()]) == ["adatape"]


def test_folders_that_are_no_finished_runs_are_named_with_the_reason(tmp_path: Path) -> None:
    good = finished(tmp_path / "good", tiny())
    prepare(tmp_path / "running", tiny(), "cpu")
    (tmp_path / "empty").mkdir()
    broken = finished(tmp_path / "broken", tiny())
    (broken / "result.json").write_text("{")
    strange = finished(tmp_path / "strange", tiny())
    (strange / "config.json").write_text('{"recipe": "x", "colour": 1}')
    folders = [good, *(tmp_path / name for name in ("running", "empty", "broken", "strange", "missing"))]
    made = write_report(folders, tmp_path / "report.html")
    reasons = {Path(folder).name: reason for folder, reason in made.skipped.items()}
    assert made.runs == 1
    assert "not finished" in reasons["running"]
    assert "no config.json" in reasons["empty"]
    assert "result.json is not JSON" in reasons["broken"]
    assert "colour" in reasons["strange"]
    assert "no folder" in reasons["missing"]
    page = (tmp_path / "report.html").read_text()
    assert all(f">{tmp_path / name}<" in page for name in reasons)


def test_without_a_finished_run_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no finished run to report: .*missing: is no folder"):
        write_report([tmp_path / "missing"], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_only_an_earlier_report_is_written_anew(tmp_path: Path) -> None:
    folder, out = finished(tmp_path / "a", tiny()), tmp_path / "report.html"
    out.write_text("<html>my thesis</html>")
    with pytest.raises(FileExistsError, match=r"report.html exists and is no earlier report"):
        write_report([folder], out)
    assert out.read_text() == "<html>my thesis</html>"
    out.unlink()
    write_report([folder], out)
    write_report([folder], out)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_report([folder], tmp_path)


def test_the_runs_of_a_sweep_are_found_in_its_folder(tmp_path: Path) -> None:
    for seed in range(2):
        finished(tmp_path / "sweep" / str(seed), tiny(seed=seed))
    made = write_report([tmp_path / "sweep", tmp_path / "sweep" / "0"], tmp_path / "report.html")
    assert made.runs == 2


def test_a_result_that_lacks_a_figure_leaves_its_cell_empty(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a", tiny("plainvit"), gflops_p95=None, length_mean=0.0)
    made = write_report([folder], tmp_path / "report.html")
    assert made.rows[0]["gflops_p95"] is None
    assert "<td>–</td>" in (tmp_path / "report.html").read_text()


def test_the_papers_figures_stand_only_beside_the_same_system() -> None:
    whole = imagenet()
    row = same_system(whole)
    assert row is not None
    assert row.label.startswith("AdaTape-")
    assert paper_accuracy(whole).endswith("%")
    assert same_system(tiny()) is None
    assert paper_accuracy(tiny()) == ""
    assert "random" in paper_accuracy(parity(system="transformer"))
    assert paper_accuracy(parity(system="singles")) == ""


@pytest.mark.parametrize("system", ["adatape", "transformer", "ut", "singles", "random", "order"])
def test_a_run_of_parity_knows_its_system(system: Any) -> None:
    assert system_of(parity(system=system)) == system


def test_a_wrapped_vit_stands_beside_none_of_the_papers_systems() -> None:
    wrapped = finetune("somewhere", backbone="vit_tiny_patch16_224", pixels=224)
    assert paper_systems([wrapped]) == []
    assert same_system(wrapped) is None
    plain = finetune("somewhere", source="imagenet", backbone="vit_tiny_patch16_224", bank="none")
    assert same_system(plain).label == "ViT-Ti/16"  # type: ignore[union-attr]
    assert paper_accuracy(plain) == "", "the paper trains it from scratch"
    assert {row.label.split("-")[0] for row in paper_systems([wrapped, plain])} == {"ViT"}


@pytest.mark.parametrize(
    "options", [{"steps": 4}, {"reader": "parallel"}, {"bank_patch": 16}, {"layer": 2}, {"embed_dim": 96}]
)
def test_a_model_with_another_option_is_another_system(options: dict[str, Any]) -> None:
    made = imagenet()
    assert same_system(made).label == "AdaTape-Ti/16"  # type: ignore[union-attr]
    other = dataclasses.replace(made.model, options={**made.model.options, **options})
    assert same_system(dataclasses.replace(made, model=other)) is None


def test_the_papers_counts_are_of_the_families_among_the_runs() -> None:
    found = list_paper_models(paper_systems([tiny("avit")])).models
    assert {*found} == {"A-ViT-Ti/16", "A-ViT-S/16"}
    ours = found["A-ViT-Ti/16"]
    assert ours.parameters / 1e6 == pytest.approx(ours.paper.parameters, abs=0.1)  # type: ignore[union-attr]
