"""The tables of docs/results.md: who is compared with whom, and what counts as ahead."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import timm
import torch
from adatape.train.fleet import fleets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from adatape.config import ImageModel
from adatape.recipes import RECIPES
from adatape.train.run import run
from adatape.train.sweep import experiment_of
from adatape.train.task import build_for, build_image_model

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


runs_of, compared = module("evidence_cells"), module("evidence_margins")
pictured, tables = module("evidence_picture"), module("evidence_tables")
looking, evidence, scaled = module("evidence_look"), module("evidence"), module("length_by_scale")


def put(out: Path, name: str, accuracies: list[float], gflops: float, **result: Any) -> None:
    """A cell as evidence.py leaves it."""
    for seed, accuracy in enumerate(accuracies):
        folder = out / "cifar100" / name / f"seed-{seed}"
        folder.mkdir(parents=True)
        figures = {"gflops": 2 * gflops, "parameters": 1e6, "length_mean": 0.0, "length_var": 0.0, **result}
        (folder / "result.json").write_text(json.dumps({"accuracy": accuracy, "gflops_mean": gflops, **figures}))
        (folder / "config.json").write_text(json.dumps({"data": {}}))


def test_the_rival_is_the_best_plain_vit_that_costs_no_more(tmp_path: Path) -> None:
    put(tmp_path, "plain-cheap", [0.50, 0.50], 0.5)
    put(tmp_path, "plain-same", [0.60, 0.61], 1.0)
    put(tmp_path, "plain-dear", [0.90, 0.90], 1.1)
    put(tmp_path, "avit", [0.95, 0.95], 1.0)
    put(tmp_path, "adatape-x", [0.65, 0.66], 1.0)
    (margin,) = compared.margins(runs_of.cells(tmp_path))
    assert (margin.rival.name, margin.lead.ahead) == ("plain-same", True)
    assert margin.lead.points == pytest.approx(5)
    assert margin.lead.error == pytest.approx(100 * (2 * 0.005**2) ** 0.5)


def test_between_two_plain_vits_the_line_is_the_rival_too(tmp_path: Path) -> None:
    put(tmp_path, "plain-a", [0.50], 1.0)
    put(tmp_path, "plain-b", [0.60], 2.0)
    put(tmp_path, "adatape-x", [0.56], 1.5)
    put(tmp_path, "adatape-y", [0.99], 2.5)
    put(tmp_path, "plain-poor", [0.30], 1.4)  # beaten by a cheaper one: no point of the line
    put(tmp_path, "plain-twin", [0.20], 1.0)
    found = {margin.ours.name: margin.beyond for margin in compared.margins(runs_of.cells(tmp_path))}
    assert found["adatape-x"].points == pytest.approx(1)
    assert found["adatape-y"] is None


def test_the_line_has_an_error_and_is_flat_where_dearer_is_no_better(tmp_path: Path) -> None:
    put(tmp_path, "plain-a", [0.48, 0.52], 1.0)
    put(tmp_path, "plain-b", [0.57, 0.63], 2.0)
    put(tmp_path, "plain-dear", [0.55, 0.55], 4.0)
    put(tmp_path, "adatape-x", [0.56, 0.58], 1.25)
    put(tmp_path, "adatape-y", [0.65, 0.65], 3.0)
    found = {margin.ours.name: margin.beyond for margin in compared.margins(runs_of.cells(tmp_path))}
    assert found["adatape-x"].points == pytest.approx(4.5)
    assert found["adatape-x"].error == pytest.approx((1 + (0.75 * 2) ** 2 + (0.25 * 3) ** 2) ** 0.5)
    assert found["adatape-y"] == pytest.approx((5, 3))


def test_leads_are_shown_for_each_seed_that_both_have(tmp_path: Path) -> None:
    put(tmp_path, "plain-a", [0.50, 0.60, 0.70], 1.0)
    put(tmp_path, "adatape-x", [0.52, 0.61], 1.0)
    (margin,) = compared.margins(runs_of.cells(tmp_path))
    assert compared.by_seed(margin.ours, margin.rival) == pytest.approx([2, 1])
    assert "| +2.00, +1.00 |" in compared.margin_table(runs_of.cells(tmp_path))


def test_a_smaller_budget_of_one_model_has_rivals_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, "plain-cheap", [0.50, 0.51], 1.0)
    put(tmp_path, "plain-dear", [0.60, 0.61], 2.0)
    put(tmp_path, "adatape-x", [0.70, 0.71], 2.0, length_mean=64.0)
    for seed in (0, 1):
        rows = [
            {"steps": steps, "accuracy": accuracy + seed / 100, "gflops_mean": cost, "length_mean": float(steps)}
            for steps, cost, accuracy in (
                (0, 0.5, 0.69),  # no tape at all
                (8, 0.9, 0.60),  # too far below the best
                (32, 1.2, 0.65),
                (56, 1.9, 0.70),  # saves too little
                (64, 2.0, 0.70),
            )
        ]
        (tmp_path / "cifar100" / "adatape-x" / f"seed-{seed}" / "budgets.json").write_text(json.dumps(rows))
    found = {each.ours.name: each for each in compared.margins(runs_of.with_budgets(runs_of.cells(tmp_path)))}
    assert set(found) == {"adatape-x", "adatape-x at 32"}
    assert found["adatape-x at 32"].rival.name == "plain-cheap"
    assert found["adatape-x at 32"].lead.points == pytest.approx(15)
    assert found["adatape-x"].rival.name == "plain-dear"


def test_an_adaptive_system_meets_the_best_of_ours_that_costs_no_more(tmp_path: Path) -> None:
    put(tmp_path, "adatape-cheap", [0.50, 0.51], 1.0)
    put(tmp_path, "adatape-dear", [0.90, 0.91], 1.1)
    put(tmp_path, "plain-x", [0.99, 0.99], 1.0)
    put(tmp_path, "avit", [0.60, 0.61], 1.0)
    put(tmp_path, "uvit", [0.40, 0.41], 1.2)
    put(tmp_path, "ut", [0.40, 0.41], 0.5)
    put(tmp_path, "ponder", [0.70, 0.71], 0.8)
    for seed, more in ((0, [2]), (1, [])):  # the second was scored at fewer budgets
        rows = [
            {"steps": n, "accuracy": n / 100, "gflops_mean": 0.7, "length_mean": float(n)} for n in (0, 4, *more, 8)
        ]
        (tmp_path / "cifar100" / "adatape-cheap" / f"seed-{seed}" / "budgets.json").write_text(json.dumps(rows))
    found = {each.rival.name: each for each in compared.against_adaptive(runs_of.cells(tmp_path))}
    assert {name: each.ours.name for name, each in found.items()} == {
        "avit": "adatape-cheap",
        "uvit": "adatape-dear",
        "ponder": "adatape-cheap at 8",  # however far below its best
    }
    assert [cell.name for cell in runs_of.at_budgets(found["avit"].ours, least=0)] == [
        f"adatape-cheap at {n}" for n in (0, 4, 8)
    ]
    assert found["avit"].lead.points == pytest.approx(-10)
    assert found["uvit"].lead.points == pytest.approx(50)
    text = compared.adaptive_table(runs_of.cells(tmp_path))
    assert "-10.00 ± 0.71 ▼" in text
    assert "**+50.00 ± 0.71**" in text


def test_from_few_images_the_rival_is_the_best_of_that_column(tmp_path: Path) -> None:
    scores = {"plain-a": (0.2, 0.5), "plain-b": (0.3, 0.4), "plain-dear": (0.9, 0.9), "adatape": (0.35, 0.35)}
    for name, (one, five) in scores.items():
        put(tmp_path, name, [0.5, 0.5], 2.0 if name == "plain-dear" else 1.0)
        for seed in (0, 1):
            rows = [{"shots": 1, "mean": one + seed / 100}, {"shots": 5, "mean": five + seed / 100}]
            path = tmp_path / "cifar100" / name / f"seed-{seed}" / "fewshot.json"
            path.write_text(json.dumps({"pets": rows}))
    text = compared.few_shot_margins(runs_of.cells(tmp_path))
    assert "pets, 1 shot | pets, 5 shots" in text
    assert (
        "| cifar100 | adatape | **+5.00 ± 0.71** | -15.00 ± 0.71 ▼ |\n|  | above the line | **+5.00 ± 0.71** |" in text
    )
    assert tables.few_shots(runs_of.cells(tmp_path)).count("35.50 ± 0.71") == 2


@pytest.mark.parametrize(("ours", "ahead"), [([0.62, 0.62], True), ([0.61, 0.65], False), ([0.59, 0.59], False)])
def test_ahead_means_by_more_than_two_errors(tmp_path: Path, ours: list[float], ahead: bool) -> None:
    put(tmp_path, "plain-x", [0.60, 0.60], 1.0)
    put(tmp_path, "adatape", ours, 1.0)
    (margin,) = compared.margins(runs_of.cells(tmp_path))
    assert margin.lead.ahead == ahead


def test_one_seed_is_never_ahead(tmp_path: Path) -> None:
    put(tmp_path, "plain-x", [0.1], 1.0)
    put(tmp_path, "adatape", [0.9], 1.0)
    (margin,) = compared.margins(runs_of.cells(tmp_path))
    assert not margin.lead.ahead


def test_one_seed_is_compared_only_where_nobody_has_more(tmp_path: Path) -> None:
    put(tmp_path, "plain-tried-once", [0.90], 1.0)
    put(tmp_path, "adatape-tried-once", [0.95], 1.0)
    names = {cell.name for cell in runs_of.comparable(runs_of.cells(tmp_path))}
    assert names == {"plain-tried-once", "adatape-tried-once"}
    put(tmp_path, "plain-x", [0.50, 0.51], 1.0)
    put(tmp_path, "adatape-x", [0.60, 0.61], 1.0)
    assert {cell.name for cell in runs_of.comparable(runs_of.cells(tmp_path))} == {"plain-x", "adatape-x"}
    table = compared.margin_table(runs_of.cells(tmp_path))
    assert "plain-x" in table
    assert "once" not in table


def test_runs_that_held_images_out_are_scored_on_those(tmp_path: Path) -> None:
    put(tmp_path, "plain-x", [0.9], 1.0)
    folder = tmp_path / "cifar100" / "plain-x" / "seed-0"
    (folder / "config.json").write_text(json.dumps({"data": {"validate_on": 0.1}}))
    scores = [
        {"kind": "validation", "accuracy": accuracy, "length_mean": 1, "length_var": 0} for accuracy in (0.2, 0.3)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*scores, {"kind": "train"}])))
    assert runs_of.found_in(folder)["accuracy"] == 0.3


def test_tables_go_between_their_lines_and_nowhere_else(tmp_path: Path) -> None:
    put(tmp_path, "plainvit-8", [0.5, 0.6], 1.0)
    put(tmp_path, "adatape", [0.5, 0.6], 1.0, length_mean=4.0, length_var=1.0)
    draw = np.random.default_rng(0)
    for path in (tmp_path / "cifar100").glob("*/seed-*"):
        figures = {"certainty": draw.random(50).astype(np.float16), "length": draw.integers(1, 9, 50, dtype=np.uint8)}
        np.savez_compressed(path / "images.npz", **figures)
    page = tmp_path / "page.md"
    begin, end = "<!-- tried -->", "<!-- end of tried -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    text = "\n".join(tables.sections(runs_of.cells(tmp_path), "plainvit-8").values())
    for _ in range(2):
        tables.put_into(page, "tried", text)
        assert page.read_text() == f"before\n{begin}\n{text}\n{end}\nafter\n"
    assert "55.00 ± 7.07" in text
    assert text.count("+0.") + text.count("-0.") >= 2  # correlations, with their sign
    page.write_text("no place")
    with pytest.raises(ValueError, match="must have one line"):
        tables.put_into(page, "tried", text)


def test_the_picture_shows_every_set(tmp_path: Path) -> None:
    put(tmp_path, "plainvit-8", [0.5, 0.6], 1.0)
    put(tmp_path, "selective", [0.5], 1.0)
    every = runs_of.cells(tmp_path)
    pictured.draw(tmp_path / "one.png", every)
    pictured.draw(tmp_path / "two.png", [*every, *(cell._replace(recipe="cifar10") for cell in every)])
    one, two = (Image.open(tmp_path / name).size for name in ("one.png", "two.png"))
    assert two[0] == one[0]
    assert two[1] > 1.8 * one[1]


def test_names_in_the_picture_cover_no_other() -> None:
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    axes.set(xlim=(0, 2), ylim=(0, 2))
    FigureCanvasAgg(figure).draw()
    pictured._name(axes, [(f"model-{n}", 1.0, 1 + n / 100) for n in range(5)])
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("plan", list(evidence.PLANS))
def test_every_planned_run_is_a_command_and_builds(plan: str) -> None:
    for given in evidence.planned([plan], ["cifar100"], (0,)):
        assert given.command.startswith(f"adatape train {given.recipe} --system ")
        experiment = experiment_of(RECIPES[given.recipe], given.words, seed=0)
        if isinstance(experiment.model, ImageModel):
            build_image_model(experiment.model, 32, 3, 100)
        else:
            assert experiment.stop_at is None
            build_for(experiment)


def test_all_of_one_length_of_parity_train_together() -> None:
    runs = evidence.planned(["parity"], [], (0,))
    experiments = [experiment_of(RECIPES[given.recipe], given.words, seed=0) for given in runs]
    assert [len(fleet) for fleet in fleets(experiments, 8)] == [7] * 4


def test_every_process_that_looks_has_a_share_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, "adatape", [0.5] * 3, 1.0)
    put(tmp_path, "plain-x", [0.5] * 3, 1.0, images_per_second=1.0)
    every = {path.parent for path in tmp_path.glob("*/*/*/result.json")}
    for folder in every:
        (folder / looking.WEIGHTS).parent.mkdir()
        (folder / looking.WEIGHTS).write_bytes(b"")
    shares = [looking.left_in(tmp_path, "*/*/*", f"{n}/3", speed=False) for n in range(3)]
    assert sum(map(len, shares)) == len(every)
    assert set().union(*shares) == every
    assert {folder.parent.name for folder in looking.left_in(tmp_path, "*/*/seed-0", "0/1", speed=True)} == {"adatape"}


SMALL = "adatape patch=8 bank_patch=4 steps=4 merge=2 model.options.embed_dim=64 model.options.num_heads=2"
SMALL += " model.options.depth=3 epochs=1 batch=128 optimizer.warmup=1 engine.precision=fp32 engine.compile=false"
SMALL += " optimizer.steps=2"


def noise(folder: Path) -> str:
    """Images of nothing, as arrays."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", 260), ("test", 40)):
        np.save(folder / f"{split}_images.npy", draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(count) % 10)
    return str(folder)


def trained(tmp_path: Path, words: str) -> Path:
    """The folder of a run, as evidence.py leaves it with its weights."""
    experiment = experiment_of(RECIPES["cifar10"], f"{SMALL} {words}", path=noise(tmp_path / "data"), seed=0)
    folder = tmp_path / "out" / "cifar10" / "adatape" / "seed-0"
    run(experiment, folder, "cpu", lambda _: None)
    return folder


def test_a_closer_look_at_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its weights alone: every file that the tables read, and the weights are gone."""
    folder = trained(tmp_path, "model.options.reader=selective model.options.merge=1 model.options.doubts=true")
    few = noise(tmp_path / "few")
    command = ["evidence_look.py", str(tmp_path / "out"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*command, "--brief"])
    looking.main()
    assert (folder / looking.WEIGHTS).exists()
    assert not (folder / "budgets.json").exists()
    monkeypatch.setattr(sys, "argv", [*command, "--fewshot", few])
    looking.main()
    assert not (folder / looking.WEIGHTS).exists()
    assert all((folder / name).is_file() for name in looking.CLOSER)
    assert np.load(folder / "images.npz")["length"].shape == (40,)
    rows = {runs_of.setting_of(row): row for row in json.loads((folder / "budgets.json").read_text())}
    assert list(rows) == [*(f"{n} for all" for n in range(5)), *(f"haste {h:g}" for h in looking.HASTES)]
    assert (
        rows["haste 0"]["length_mean"] == rows["4 for all"]["length_mean"] == 4
    )  # the haste of an earlier row is gone
    assert [row["shots"] for row in json.loads((folder / "fewshot.json").read_text())["few"]] == [1, 5, 10, 25]


def test_a_larger_scale_of_the_norm_makes_tapes_shorter(tmp_path: Path) -> None:
    folder = trained(tmp_path, "threshold=1")
    found = [scaled.at_scale(folder, factor, "cpu")["length_mean"] for factor in (0.1, 1.0, 10.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[2]


def test_a_second_mean_is_told_for_each_kind_of_features(tmp_path: Path) -> None:
    put(tmp_path, "plain-a", [0.5, 0.5], 1.0)
    put(tmp_path, "adatape", [0.5, 0.5], 1.0)
    assert tables.second_means(runs_of.cells(tmp_path)) == ""
    for seed, score in ((0, 0.2), (1, 0.3)):
        for name, kind in (("plain-a", "and rows after 3 blocks"), ("adatape", "and the tape's mean")):
            found = {"pooled alone": [{"shots": 5, "mean": 0.1}], kind: [{"shots": 5, "mean": score}]}
            (tmp_path / "cifar100" / name / f"seed-{seed}" / "rows.json").write_text(json.dumps({"pets": found}))
    text = tables.second_means(runs_of.cells(tmp_path))
    assert "| cifar100 | plain-a | and rows after 3 blocks | 2 | 25.00 ± 7.07 |" in text
    assert "| cifar100 | adatape | pooled alone | 2 | 10.00 ± 0.00 |" in text


def test_a_plain_vit_has_rows_of_earlier_blocks_and_a_tape_its_echo() -> None:
    rows_of = module("fewshot_rows")
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 3, "depth": 3, "num_classes": 4}
    x = torch.randn(2, 3, 32, 32)
    plain = timm.create_model("plainvit_tiny_patch16_224", **small).eval()
    found = dict(rows_of.kinds_of_features(plain, x, [2, 3]))
    assert list(found) == ["pooled alone", "and rows after 2 blocks"]  # the last block's rows are what is pooled
    seen = []
    plain.vit.blocks[1].register_forward_hook(lambda *given: seen.append(given[-1].mean(1)))
    pooled = plain(x, output=True).features
    normed = torch.nn.functional.layer_norm(seen[0], (48,))
    torch.testing.assert_close(found["and rows after 2 blocks"], torch.cat([pooled, normed], 1))
    assert list(dict(rows_of.kinds_of_features(plain, x, [3]))) == ["pooled alone"]
    reading = {"bank_patch": 4, "merge": 2, "query_width": 16, "still": 2, "echo": True}
    tape = timm.create_model("adatape_tiny_patch16_224", **small, **reading).eval()
    found = dict(rows_of.kinds_of_features(tape, x, [2]))
    quiet = timm.create_model("adatape_tiny_patch16_224", **small, **reading | {"echo": False}).eval()
    quiet.load_state_dict(tape.state_dict())
    assert torch.equal(found["pooled alone"], quiet(x, output=True).features)
    assert torch.equal(found["and the tape's mean"], tape(x, output=True).features)
    assert found["and the tape's mean"].shape == (2, 96)


def test_sets_for_few_shots_are_the_first_of_each_class_and_square(tmp_path: Path) -> None:
    few = module("few_sets")
    rng = np.random.default_rng(0)
    labels = np.arange(40)[::-1] % 4
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", rng.integers(0, 255, (40, 32, 32, 3), np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", labels)
    assert few.first_of_each(labels, 2).tolist() == [3, 7, 2, 6, 1, 5, 0, 4]
    few.make(tmp_path / "few", "c10", str(tmp_path))
    kept = np.load(tmp_path / "few" / "c10" / "train_images.npy")
    order = few.first_of_each(labels, few.OF_EACH_CLASS)
    assert np.array_equal(kept, np.load(tmp_path / "train_images.npy")[order])
    wide = np.zeros((72, 100, 3), np.uint8)
    wide[:, 14:86] = 200
    assert (few.squared(Image.fromarray(wide)) == 200).all()
    assert few.squared(Image.fromarray(wide)).shape == (32, 32, 3)
