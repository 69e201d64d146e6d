"""Reads over a set are counted correctly, and every kind of run gets its figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from point_names import name_points
from small_runs import tiny

from adatape.config import Budget, to_dict
from adatape.data.parity import Sequences, held_out_set
from adatape.data.sets import evenly_apart
from adatape.evaluate.reading import (
    Reads,
    collect,
    inputs_at,
    parity_example,
    spread_batches,
    taken_counts,
)
from adatape.recipes.haystack import haystack
from adatape.recipes.imagenet import imagenet
from adatape.report import figures
from adatape.report.figures import budget_rows, model_name, write_figures
from adatape.report.gallery import Grid, _outline, _outline_windows, easiest_first, varied
from adatape.report.pictures.budgets import _draw, _error, accuracy_error, draw_budgets, near
from adatape.report.pictures.parity import one_length
from adatape.report.pictures.speed import plain_name
from adatape.report.pictures.style import picture
from adatape.report.pictures.training import draw_training
from adatape.report.tables import figures_table
from adatape.train.folder import load_config, with_budget, write
from adatape.train.run import run
from adatape.train.task import build_for

CPU = torch.device("cpu")
GALLERIES = {"easy", "hard", "mistakes"}
EXPECTED = {
    "adatape": {"training", "heatmap", "long_tail", "lengths", "lengths_by_class", *GALLERIES},
    "adatape-learn": {"training", "long_tail", "lengths", "lengths_by_class", *GALLERIES},
    "plainvit": {"training", *GALLERIES},
    "parity adatape": {"training", "parity", "lengths"},
    "parity transformer": {"training"},
}


def reads_of(family: str = "adatape", samples: int = 40) -> Reads:
    experiment = tiny(family)
    return collect(build_for(experiment), spread_batches(experiment, samples, CPU))


def made_up(**columns: list) -> Reads:
    n = len(next(iter(columns.values())))
    zero = torch.zeros(n, dtype=torch.int64)
    empty = Reads(zero, zero, zero.float(), zero, zero, zero[:, None, None], zero[:, None, None].float())
    return empty._replace(**{name: torch.tensor(values) for name, values in columns.items()})


@pytest.mark.parametrize("family", EXPECTED)
def test_every_kind_of_run_gets_the_pictures_that_apply(family: str, tmp_path: Path) -> None:
    run(tiny(family, steps=4, evaluate_every=2), tmp_path / "run", "cpu", lambda _: None)
    made = write_figures(tmp_path / "run", "cpu", samples=60)
    assert set(made.figures) == EXPECTED[family]
    for path in made.figures.values():
        with Image.open(path) as picture:
            assert picture.width >= 900
    assert {path.name for path in (tmp_path / "run" / "figures").iterdir()} == {f"{n}.png" for n in EXPECTED[family]}


def test_pictures_show_the_trained_budget_and_say_which_they_leave_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(steps=4, evaluate_every=2), folder, "cpu", lambda _: None)
    before = write_figures(folder, "cpu", samples=60)
    assert not figures_table(before).notes
    write(folder / "config.json", to_dict(with_budget(load_config(folder / "config.json"), Budget(0))))
    after = write_figures(folder, "cpu", samples=60)
    assert set(after.figures) == set(before.figures) == EXPECTED["adatape"]
    assert "(steps 0) is left out" in figures_table(after).notes[-1]


def test_a_run_that_has_not_finished_has_no_pictures(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        write_figures(tmp_path, "cpu")
    assert not list(tmp_path.iterdir())


def test_counts_add_up_to_the_tape_lengths() -> None:
    reads = reads_of()
    merged = reads.taken.shape[2]
    assert taken_counts(reads, 16).sum() == merged * reads.length.sum()
    assert taken_counts(reads, 16).sum(0).max() <= len(reads.length)  # no token is read twice for a sample


def test_a_count_is_of_its_own_step_and_token() -> None:
    reads = made_up(
        taken=[[[2, 0], [1, -1]], [[2, 1], [-1, -1]]], weight=[[[0.75, 0.25], [1.0, 0.0]], [[0.5, 0.5], [0.0, 0.0]]]
    )
    assert taken_counts(reads, 4).tolist() == [[1, 1, 2, 0], [0, 1, 0, 0]]


def test_batches_read_as_one_set_whatever_their_size() -> None:
    experiment = tiny()
    model = build_for(experiment)
    [(x, label)] = spread_batches(experiment, 40, CPU)
    whole, parts = collect(model, [(x, label)]), collect(model, [(x[:7], label[:7]), (x[7:], label[7:])])
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)


def test_collecting_leaves_the_model_in_its_mode_and_hears_no_noise() -> None:
    experiment = tiny("adatape-learn")
    model = build_for(experiment).train()
    first, second = (collect(model, spread_batches(experiment, 20, CPU)) for _ in range(2))
    assert model.training
    assert torch.equal(first.taken, second.taken)


def test_a_model_without_a_tape_reads_none() -> None:
    reads = reads_of("plainvit")
    assert reads.taken.shape[1:] == (0, 0)
    assert not reads.length.any()
    assert (reads.macs == reads.macs[0]).all()


def test_samples_are_spread_over_a_sorted_set() -> None:
    assert evenly_apart(10, 4).tolist() == [0, 2, 5, 7]
    assert evenly_apart(3, 10).tolist() == [0, 1, 2]
    assert len(np.unique(evenly_apart(50_000, 2000))) == 2000
    with pytest.raises(ValueError, match="samples is 0; it must be at least 1"):
        spread_batches(tiny(), 0, CPU)


def test_inputs_come_from_their_places() -> None:
    rows = torch.arange(10.0)[:, None]
    found = inputs_at([(rows[:4], rows[:4]), (rows[4:], rows[4:])], [9, 0, 4])
    assert {place: float(x) for place, x in found.items()} == {0: 0.0, 4: 4.0, 9: 9.0}


def test_the_telling_sequence_is_odd_and_has_a_mixed_pair() -> None:
    model = build_for(tiny("parity adatape"))
    told = parity_example(model, held_out_set(8, 64))
    assert sum(symbol == 1 for symbol in told.symbols) % 2 == 1
    assert any(told.symbols[a] != told.symbols[b] for a, b in told.pairs)
    with pytest.raises(ValueError, match="merge = 2"):
        parity_example(build_for(tiny("parity transformer")), Sequences(*held_out_set(8, 4)))


def test_easy_is_cheap_and_among_equals_sure() -> None:
    reads = made_up(macs=[3, 1, 1, 2], certainty=[0.9, 0.2, 0.8, 1.0])
    assert easiest_first(reads) == [2, 1, 3, 0]


def test_a_gallery_shows_every_class_before_any_twice() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2])
    assert varied([0, 1, 2, 3, 4], labels, 3) == [0, 3, 4]
    assert varied([0, 1, 2, 3, 4], labels, 4) == [0, 1, 3, 4]
    assert varied([0, 1, 2, 3, 4], labels, 9) == [0, 1, 2, 3, 4]


def test_outlines_lie_on_the_patches_that_were_read() -> None:
    reads = made_up(length=[1], taken=[[[5, 14], [3, 3]]], weight=[[[0.7, 0.3], [0.0, 0.0]]])
    axes = Figure().subplots()
    _outline(axes, reads, 0, torch.zeros(1, 8, 8), Grid(4, 4))
    centres = [(p.get_x() + p.get_width() / 2, p.get_y() + p.get_height() / 2) for p in axes.patches]
    np.testing.assert_allclose(centres, [(2.5, 2.5), (4.5, 6.5)])  # pixel centres are whole numbers
    assert axes.patches[0].get_linewidth() > axes.patches[1].get_linewidth()
    assert [text.get_text() for text in axes.texts] == ["1", "1"]


def test_windows_are_outlined_where_they_lie_up_to_the_edge() -> None:
    reads = made_up(length=[2], taken=[[[5], [0], [3]]], weight=[[[0.7], [0.3], [0.0]]])
    axes = Figure().subplots()
    boxes = {5: [8, 4, 4, 4], 0: [-2, -2, 4, 4]}
    _outline_windows(
        axes, reads, 0, torch.zeros(1, 16, 16), lambda index, _: torch.tensor([boxes[int(i)] for i in index])
    )
    corners = [(p.get_y(), p.get_x(), p.get_width()) for p in axes.patches]  # type: ignore[attr-defined]
    assert corners == [(7.5, 3.5, 4), (-2.5, -2.5, 4)]
    assert axes.get_xlim() == (-0.5, 15.5)
    assert [text.get_text() for text in axes.texts] == ["1", "2"]


@pytest.mark.usefixtures("few_canvases")
def test_canvases_that_read_alike_are_sorted_by_certainty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr(figures, "draw_gallery", lambda path, title, *_: titles.append(title) or path)
    run(haystack(steps=2), tmp_path / "run", "cpu", lambda _: None)
    write_figures(tmp_path / "run", "cpu", samples=40)
    assert titles[0] == "Easy: surest answers; numbers: reading order"


def test_budgets_of_a_small_model_have_errors_and_millions() -> None:
    rows = [{"steps": n, "accuracy": 0.9, "gflops_mean": 0.001 * (1 + n), "samples": 100} for n in range(3)]
    axes = Figure().subplots()
    _draw(axes, rows, "gflops_mean")
    assert axes.get_xlabel() == "MFLOPs, mean"
    assert axes.lines[0].get_xdata().tolist() == pytest.approx([1, 2, 3])  # type: ignore[union-attr]
    assert [text.xy[1] for text in axes.texts] == pytest.approx([93] * 3)  # type: ignore[attr-defined]
    assert _error({**rows[0], "mean_ap": 0.5}) == _error({"accuracy": 0.9}) == 0


def test_a_picture_is_not_titled_by_the_size_of_another_model() -> None:
    assert model_name(tiny("adatape")) == "adatape"
    assert model_name(haystack()) == "vit with a tape"
    assert model_name(imagenet(path="x", size="small")) == "adatape_small_patch16_224"


ROWS = [{"steps": n, "accuracy": 0.5 + n / 10, "gflops_mean": 1.0 + n} for n in range(4)]


def test_budgets_are_drawn_as_a_list_or_as_rows_and_what_is_unknown_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    of_three = [{"samples": 3, **row} for row in ROWS]
    for written, rows in ((ROWS, ROWS), ({"run": "x", "lengths": [1, 2], "rows": ROWS}, of_three)):
        path.write_text(json.dumps(written))
        assert budget_rows(path) == rows
    assert draw_budgets(tmp_path / "quality.png", [*ROWS, {"steps": 9, "accuracy": None, "gflops_mean": 3}]) is not None
    assert draw_budgets(tmp_path / "none.png", ROWS[:1]) is None
    assert draw_budgets(tmp_path / "none.png", [{"steps": 1}, {"words": "x"}]) is None
    assert not (tmp_path / "none.png").exists()
    path.write_text("{")
    with pytest.raises(ValueError, match=r"budgets.json is not JSON"):
        budget_rows(path)


def test_budgets_of_the_same_cost_share_a_label() -> None:
    rows = [*ROWS, {"steps": 8, "accuracy": 0.9, "gflops_mean": 4.01}]
    axes = Figure().subplots()
    _draw(axes, rows, "gflops_mean")
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2", "3, 8"]


def test_labels_that_would_lie_on_each_other_are_grouped_and_accuracies_have_errors() -> None:
    assert near([1.0, 5.0, 1.05, 1.1, 9.0], 0.06) == [[0, 2, 3], [1], [4]]
    assert accuracy_error(0.9, 100) == pytest.approx(3.0)
    assert accuracy_error(0.9, 100, mean_ap=0.9) == 0


def test_names_of_points_do_not_cover_each_other(tmp_path: Path) -> None:
    with picture(tmp_path / "named.png", 4.0) as figure:
        axes = figure.subplots()
        points = {f"point {n}": (1 + n / 50, 1 + n % 2 / 50) for n in range(6)} | {"far away": (3.0, 3.0)}
        axes.plot(*zip(*points.values(), strict=True), "o")
        FigureCanvasAgg(figure).draw()
        name_points(axes, points)
        boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(points)
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])


def test_a_histogram_of_one_bar_is_a_sentence() -> None:
    assert one_length([0, 0, 0, 1000]) == "all 1,000 test sequences read 3 tape tokens"


def test_models_are_named_as_papers_name_them() -> None:
    assert plain_name("adatape_base_patch16_224", {"bank": "learn"}) == "AdaTape-B/16, learned bank"
    assert plain_name("adatape_large_patch32_224", {}) == "AdaTape-L/32, input bank"
    assert plain_name("u2t_base_patch16_224", {}) == "U2T-B/16"
    assert plain_name("resnet50", {"depth": 2}) == "resnet50 depth=2"


def test_a_curve_needs_two_points(tmp_path: Path) -> None:
    line = {"kind": "validation", "step": 1, "accuracy": 0.5, "loss": 1.0}
    assert draw_training(tmp_path / "one.png", [line], "one") is None
    assert draw_training(tmp_path / "two.png", [line, {**line, "step": 2, "loss": None}], "two") is not None
