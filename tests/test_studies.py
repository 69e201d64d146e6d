"""Studies: planned runs, the additions of look.py, and rows made from run folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fleet import fleets
from PIL import Image
from scripts import script
from words import experiment_of

from adatape.config import ImageModel
from adatape.recipes import RECIPES
from adatape.train.task import build_for, build_image_model

rows, cells = script("research/rows.py"), script("research/cells.py")
study, looking, few = (script(f"research/{name}.py") for name in ("study", "look", "few_sets"))
SMALL = (
    "tape_steps=4 merge=2 model.options.embed_dim=64 model.options.num_heads=2 model.options.depth=3 optimizer.steps=2"
)
SMALL += " batch=128 optimizer.warmup=1 engine.precision=fp32 engine.compile=false"


def noise(folder: Path) -> str:
    """Random images as arrays."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", 260), ("test", 40)):
        np.save(folder / f"{split}_images.npy", draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(count) % 10)
    return str(folder)


@pytest.mark.parametrize("plan", list(study.PLANS))
def test_every_planned_run_is_a_command_and_builds(plan: str) -> None:
    for given in study.planned([plan], ["cifar100"], (0,)):
        assert given.command.startswith(f"adatape train {given.recipe} --system ")
        experiment = experiment_of(RECIPES[given.recipe], given.words, seed=0)
        if isinstance(experiment.model, ImageModel):
            build_image_model(experiment.model, 32, 3, 100)
        else:
            assert experiment.stop_at is None
            build_for(experiment)


def test_all_lengths_and_seeds_of_parity_train_together() -> None:
    runs = study.planned(["parity"], [], (0, 1, 2))
    experiments = [experiment_of(RECIPES[given.recipe], given.words, seed=given.seed) for given in runs]
    assert [len(fleet) for fleet in fleets(experiments, 100)] == [len(runs)]


def test_cells_are_chosen_by_name_or_wildcard(capsys: pytest.CaptureFixture[str]) -> None:
    study.main(["unused.jsonl", "--only", "parity", "--names", "ut-*", "random-16", "--seeds", "0", "--list"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [f"parity/{name}/seed-0" for name in ("ut-16", "random-16", "ut-32", "ut-64", "ut-128")]


def test_a_run_is_trained_once_and_looked_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folders = tmp_path / "mine.jsonl", tmp_path / "runs"
    given = ["--only", "ablations", "--names", "adatape", "--recipes", "cifar10", "--seeds", "0", "--device", "cpu"]
    given += ["--cifar10", noise(tmp_path / "data"), "--runs", str(folders), "--set", *SMALL.split()]
    study.main([str(out), *given])
    assert "1 runs in" in capsys.readouterr().out
    (row,) = rows.read_rows(out)
    assert row["run"] == "cifar10/adatape/seed-0"
    assert row["config"]["optimizer"]["steps"] == row["curve"][-1]["step"] == 2
    assert {"accuracy", "gflops_mean"} <= set(row["result"])

    looking.main([str(out), "--runs", str(folders), "--device", "cpu", "--fewshot", noise(tmp_path / "few")])
    (row,) = rows.read_rows(out)
    assert [each["steps"] for each in row["budgets"]] == [0, 1, 2, 3, 4]
    assert row["budgets"][-1]["accuracy"] == pytest.approx(row["result"]["accuracy"])
    assert [each["shots"] for each in row["fewshot"]["few"]] == [1, 5, 10, 25]
    assert 0 < row["reading"]["top_weight"] <= 1
    images = folders / row["run"] / "images.npz"
    assert np.load(images)["length"].shape == (40,)

    seen = images.stat().st_mtime_ns
    (folders / row["run"] / "checkpoints" / "model.safetensors").unlink()  # nobody needs it any more
    study.main([str(out), *given])
    looking.main([str(out), "--runs", str(folders), "--device", "cpu"])
    assert "runs in" not in capsys.readouterr().out
    assert images.stat().st_mtime_ns == seen
    assert rows.read_rows(out) == [row]


def test_lengths_are_judged_by_the_mean_loss_of_a_plain_vit_and_by_their_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    hard = draw.random(500).astype(np.float16)
    folders = []
    for name in ("plain-4-depth-4/seed-0", "plain-4-depth-4/seed-1", "adatape/seed-0", "adatape-full/seed-0"):
        folders.append(tmp_path / "cifar10" / name)
        folders[-1].mkdir(parents=True)
        length = {"adatape": 9 * hard, "adatape-full": 9 + 0 * hard}.get(name.split("/")[0], 0 * hard)
        certainty = 1 - hard if "plain" in name else draw.random(500)
        np.savez(folders[-1] / "images.npz", certainty=certainty, length=length.astype(np.uint8))
    looking.judge_lengths(folders)
    assert [folder.parent.name for folder in folders if (folder / "difficulty.json").is_file()] == ["adatape"]
    found = json.loads((folders[2] / "difficulty.json").read_text())
    assert found["plain-4-depth-4"]["low"] < found["plain-4-depth-4"]["rho"] < found["plain-4-depth-4"]["high"]
    assert found["plain-4-depth-4"]["rho"] > 0.98
    assert abs(found["itself"]["rho"]) < 0.15


def run_folder(folder: Path, lines: list[dict[str, object]], **data: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"data": data}))
    (folder / "env.json").write_text("{}")
    (folder / "result.json").write_text(json.dumps({"accuracy": 0.9, "length_mean": 2, "length_var": 1}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_that_held_images_out_are_scored_on_those(tmp_path: Path) -> None:
    scores = [{"kind": "validation", "step": n, "accuracy": n / 10, "length_mean": 1, "length_var": 0} for n in (2, 3)]
    lines = [*scores, {"kind": "train", "step": 4}]
    held_out = rows.row_of(run_folder(tmp_path / "a", lines, validate_on=0.1), "a")
    assert cells.score_of(held_out) == {"accuracy": 0.3, "length_mean": 1, "length_var": 0}
    tested = rows.row_of(run_folder(tmp_path / "b", lines, validate_on=None), "b")
    assert cells.score_of(tested)["accuracy"] == 0.9


def test_a_curve_has_few_points_and_ends_where_the_run_did(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": n, "loss": 1 / n, "lr": 0.1} for n in range(1, 1001)]
    curve = rows.row_of(run_folder(tmp_path / "a", lines), "a")["curve"]
    assert len(curve) <= rows.POINTS
    assert curve[-1] == {"kind": "train", "step": 1000, "loss": 0.001}
    assert [point["step"] for point in curve] == sorted(point["step"] for point in curve)


def test_a_row_is_renewed_in_its_place(tmp_path: Path) -> None:
    out = tmp_path / "study.jsonl"
    for runs in (["a", "b"], ["a", "c"]):
        for name in runs:
            folder = tmp_path / "runs" / name
            (folder if folder.exists() else run_folder(folder, []))
        rows.main([str(out), str(tmp_path / "runs")])
    assert [row["run"] for row in rows.read_rows(out)] == ["a", "b", "c"]
    rows.add_rows(out, [{"run": "b", "again": True}])
    assert [row["run"] for row in rows.read_rows(out)] == ["a", "b", "c"]
    assert rows.read_rows(out)[1] == {"run": "b", "again": True}


def test_sets_for_few_shots_are_the_first_of_each_class_and_square(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40)[::-1] % 4
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", rng.integers(0, 255, (40, 32, 32, 3), np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", labels)
    assert few.first_of_each(labels, 2).tolist() == [3, 7, 2, 6, 1, 5, 0, 4]
    few.main([str(tmp_path / "few"), "--cifar10", str(tmp_path)])
    kept = np.load(tmp_path / "few" / "c10" / "train_images.npy")
    order = few.first_of_each(labels, few.OF_EACH_CLASS)
    assert np.array_equal(kept, np.load(tmp_path / "train_images.npy")[order])
    wide = np.zeros((72, 100, 3), np.uint8)
    wide[:, 14:86] = 200
    assert (few.squared(Image.fromarray(wide)) == 200).all()
    assert few.squared(Image.fromarray(wide)).shape == (32, 32, 3)
