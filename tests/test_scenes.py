"""Large images with several labels each: their table, their batches, their scores, and a run through every verb."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from scripts import ROOT, script
from test_serve import inside

import adatape
from adatape.cli import main
from adatape.config import Experiment, ImageModel, Optimizer, from_dict, to_dict
from adatape.counter_rng import keys_of
from adatape.data.batch import Batch, Shard
from adatape.data.letterbox import FILL, fitted_shape, letterboxed
from adatape.data.loaders import fixed_chunks
from adatape.data.scenes import augmented
from adatape.data.sets import open_set
from adatape.data_config import Scenes
from adatape.evaluate.accuracy import average_precision, mean_precision, precision_by_class, score
from adatape.evaluate.reading import collect
from adatape.models.prefix import is_added
from adatape.recipes.scenes import scenes
from adatape.serve.app import create_app
from adatape.serve.pictures import seen
from adatape.serve.served import load_served
from adatape.train.evaluate import test_batches as batches_of_test
from adatape.train.folder import load_config, load_run
from adatape.train.optim import Stepper, rate_at
from adatape.train.task import build_for, build_image_model
from adatape.train.trainer import Trainer

CPU = torch.device("cpu")
SIZE = (96, 160)
COLOURS = {"red": (250, 0, 0), "green": (0, 250, 0), "=blue": (0, 0, 250)}  # `=` is what a spreadsheet calculates by
SMALL_VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8, "img_size": 32}


def write_table(folder: Path, rows: list[list[str]], header: tuple[str, ...] = ("file", "labels", "split")) -> None:
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(header), *rows])


def write_scenes(folder: Path, count: int = 12) -> list[list[str]]:
    """Grey noise with a square of 12 pixels for each label; every third scene is for testing."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for n in range(count):
        draw = np.random.default_rng(n)
        image, labels = draw.integers(90, 120, (*SIZE, 3)).astype(np.uint8), []
        for k, (name, colour) in enumerate(COLOURS.items()):
            if n >> k & 1:
                top, left = draw.integers(0, SIZE[0] - 12), draw.integers(0, SIZE[1] - 12)
                image[top : top + 12, left : left + 12] = colour
                labels.append(name)
        Image.fromarray(image).save(folder / "images" / f"{n}.png")
        rows.append([f"images/{n}.png", ";".join(labels), "test" if n % 3 == 2 else "train"])
    write_table(folder, rows)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder)
    return folder


def data_in(folder: Path, **options: Any) -> Scenes:
    return Scenes(str(folder), **{"size": SIZE, "flip": True, "jitter": 0.3, **options})


def first(config: Scenes, steps: int = 3, step: int = 0, shard: Shard = Shard(), workers: int = 0) -> list[Batch]:  # noqa: B008
    loader = open_set(config, "train").training_loader(4, 0, shard, CPU, workers)
    return list(itertools.islice(loader.batches(step), steps))


def files_of(config: Scenes, split: Any) -> list[str]:
    images: Any = open_set(config, split).images
    return [Path(images.path(n)).name for n in range(len(images))]


def test_a_table_gives_classes_by_name_and_several_labels_or_none(folder: Path) -> None:
    test = open_set(data_in(folder), "test")
    assert test.names == ["=blue", "green", "red"]
    assert (test.shape, test.samples, test.split) == ((3, *SIZE), 4, "test")
    [(x, label)] = test.evaluation_batches(500, Shard(), CPU)
    assert x.shape == (4, 3, *SIZE)
    assert label.tolist() == [[0, 1, 0], [1, 0, 1], [0, 0, 0], [0, 1, 1]]  # scenes 2, 5, 8 and 11
    ordered = open_set(data_in(folder, classes=("red", "green", "=blue", "other")), "test")
    assert ordered.names == ["red", "green", "=blue", "other"]
    assert ordered.images is not None
    assert ordered.images.labels[0].tolist() == [0, 1, 0, 0]


def test_validation_is_part_of_train_and_no_split_column_holds_out_a_fifth(tmp_path: Path) -> None:
    rows = write_scenes(tmp_path, 20)
    parts = [set(files_of(data_in(tmp_path, validate_on=0.25), split)) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [10, 4, 6]
    assert len(set.union(*parts)) == 20
    write_table(tmp_path, [row[:2] for row in rows], ("file", "labels"))
    before = {split: files_of(data_in(tmp_path), split) for split in ("train", "test")}
    assert [len(each) for each in before.values()] == [16, 4]
    write_table(tmp_path, [row[:2] for row in reversed(rows)], ("file", "labels"))
    assert {split: files_of(data_in(tmp_path), split)[::-1] for split in before} == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; its first line must name"),
        (b"file,names\nimages/0.png,red\n", r"has 0 columns labels in its first line, \['file', 'names'\]"),
        (b"file,labels,file\nimages/0.png,red,x\n", "has 2 columns file in its first line"),
        (b"file,labels\n", "has no rows below its first line"),
        (b"file,labels\nimages/0.png,caf\xe9\n", "line 2 is not UTF-8: byte 0xe9"),
        (b"file,labels\nimages/0.png,red,train\n", "line 2 has 3 cells; the first line names 2 columns"),
        (b'file,labels\nimages/0.png,"red\n', "line 2 is not CSV"),
        (b"file,labels\n,red\n", "line 2: file is ''; it must be a file below the folder"),
        (b"file,labels\n../secret.png,red\n", r"line 2: file is '../secret.png'; it must be a file below the folder"),
        (b"file,labels\n/etc/passwd,red\n", "line 2: file is '/etc/passwd'; it must be a file below the folder"),
        (b"file,labels\nimages/0.png,red\nimages/./0.png,red\n", "line 3: file is 'images/./0.png'; line 2 has the"),
        (b"file,labels,split\nimages/0.png,red,train\nimages/1.png,,val\n", "line 3: split is 'val'; it must be train"),
        (b"file,labels,split\nimages/0.png,red,train\nimages/1.png,,\n", "line 3: split is ''; it must be train or"),
        (b"file,labels,split\nimages/0.png,red,train\n", "has 1 rows to train on and 0 to test"),
        (b"file,labels,split\nimages/1.png,,train\nimages/0.png,,test\n", "none of the 1 rows of split test has a"),
        (b"file,labels,split\nimages/1.png,a,train\nno.png,a,test\n", "line 3: file is 'no.png'; .* has no such file"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_file_line_column_and_value(
    tmp_path: Path, content: bytes, said: str
) -> None:
    write_scenes(tmp_path, 2)
    (tmp_path / "labels.csv").write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=said) as found:
        open_set(data_in(tmp_path), "test")
    assert str(tmp_path) in str(found.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"classes": ("red", "green")}, "labels is '=blue'; classes are red, green"),
        ({"classes": ("red", "red")}, "classes has 'red' twice"),
        ({"csv": "passwd"}, "csv is 'passwd'; it must end in .csv"),
        ({"csv": "other.csv"}, "other.csv is not a file"),
        ({"path": "nowhere"}, "path nowhere is not a folder"),
        ({"validate_on": 0.01}, "validate_on is 0.01 of 8 images"),
    ],
)
def test_settings_of_scenes_that_cannot_be_are_refused(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        open_set(dataclasses.replace(data_in(folder), **options), "validation")


def test_a_config_of_scenes_is_read_and_names_no_file_elsewhere() -> None:
    experiment = scenes("data")
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(experiment)))) == experiment
    for field, value, said in (("csv", "../x.csv", "data.csv is '../x.csv'"), ("size", [0, 9], "data.size.0 is 0")):
        values = to_dict(experiment)
        values["data"][field] = value
        with pytest.raises(ValueError, match=said):
            from_dict(Experiment, values)
    with pytest.raises(ValueError, match="loss is softmax; images with several labels need sigmoid"):
        from_dict(Experiment, {**to_dict(experiment), "loss": "softmax"})


def test_windows_must_be_told_that_there_may_be_several_labels(folder: Path) -> None:
    experiment = scenes(str(folder), height=96, width=160, window=16)
    assert isinstance(experiment.model, ImageModel)
    wrapped = dataclasses.replace(experiment.model, wrap={**(experiment.model.wrap or {}), "labels": "one"})
    with pytest.raises(ValueError, match=r"model\.wrap\.labels is 'one'; for Scenes it must be 'several'"):
        build_for(dataclasses.replace(experiment, model=wrapped))


def test_a_batch_depends_on_neither_workers_nor_processes_nor_where_images_are_kept(folder: Path) -> None:
    kept = first(data_in(folder, resident=True))
    for other in (first(data_in(folder, resident=False)), first(data_in(folder, resident=False), workers=2)):
        assert all(torch.equal(a, b) for pair in zip(kept, other, strict=True) for a, b in zip(*pair, strict=True))
    halves = [first(data_in(folder), shard=Shard(rank, 2)) for rank in range(2)]
    for whole, *parts in zip(kept, *halves, strict=True):
        assert all(torch.equal(a, torch.cat(b)) for a, b in zip(whole, zip(*parts, strict=True), strict=True))
    later = first(data_in(folder), steps=1, step=2)[0]
    assert all(torch.equal(a, b) for a, b in zip(later, kept[2], strict=True))


@pytest.mark.parametrize("resident", [True, False])
def test_a_broken_scene_is_replaced_by_the_next_with_its_labels_and_counted(tmp_path: Path, resident: bool) -> None:
    write_scenes(tmp_path)
    (tmp_path / "images" / "3.png").write_bytes(b"no image")
    config = data_in(tmp_path, resident=resident, broken=0.5, flip=False, jitter=0.0)
    loader = open_set(config, "train").training_loader(8, 0, Shard(), CPU)
    batch = next(iter(loader.batches(0)))
    assert loader.tally is not None
    assert len(loader.tally.broken) == 1
    assert "3.png" in loader.tally.first[0]
    there = letterboxed(Image.open(tmp_path / "images" / "4.png"), SIZE).float() / 127.5 - 1
    same = [torch.equal(x, there) for x in batch.x]
    assert sum(same) == 2
    assert [target.tolist() for target, alike in zip(batch.target, same, strict=True) if alike] == [[1, 0, 0]] * 2
    with pytest.raises(ValueError, match="could not be read"):
        next(iter(open_set(dataclasses.replace(config, broken=0.0), "train").training_loader(
            8, 0, Shard(), CPU).batches(0)))  # fmt: skip


@pytest.mark.parametrize("shape", [(96, 160), (192, 320), (50, 90), (300, 90), (31, 333)])
def test_the_whole_image_is_seen_as_timm_would_show_it(shape: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8))
    shown = letterboxed(image, SIZE)
    border = timm.data.create_transform((3, *SIZE), crop_pct=1.0, crop_mode="border", interpolation="bilinear",
                                        mean=(0.5,) * 3, std=(0.5,) * 3)  # fmt: skip
    assert torch.equal(shown.float() / 127.5 - 1, border(image))
    height, width = fitted_shape(*shape, SIZE)
    assert height == SIZE[0] or width == SIZE[1]
    if (height, width) != SIZE:
        assert (shown[:, 0, 0] == FILL).all()


def test_colours_and_flips_belong_to_a_samples_key() -> None:
    pixels = torch.randint(0, 256, (6, 3, 8, 12), dtype=torch.uint8)
    keys = keys_of(5, torch.arange(6))
    both = augmented(pixels, keys, True, 0.3)
    assert torch.equal(both[2:4], augmented(pixels[2:4], keys[2:4], True, 0.3))
    assert not torch.equal(both, augmented(pixels, keys + 1, True, 0.3))
    plain = pixels.float() / 127.5 - 1
    assert torch.equal(augmented(pixels, keys, False, 0.0), plain)
    flipped = augmented(pixels, keys, True, 0.0)
    turned = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, plain, strict=True)]
    assert 0 < sum(turned) < 6
    assert all(torch.equal(a, b) for a, b, t in zip(flipped, plain, turned, strict=True) if not t)
    assert both.abs().max() <= 1


def test_average_precision_is_that_of_scikit_learn_with_ties_too() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(0)
    for n in range(30):
        scores = torch.randint(0, 4 if n % 2 else 10_000, (40,), generator=draw).float()
        labels = (torch.rand(40, generator=draw) < 0.3).float()
        expected = metrics.average_precision_score(labels.numpy(), scores.numpy())
        assert average_precision(scores, labels) == pytest.approx(expected, abs=1e-12)
        order = torch.randperm(40, generator=draw)
        assert average_precision(scores[order], labels[order]) == average_precision(scores, labels)


def test_a_class_without_positives_is_left_out_of_the_mean_and_named() -> None:
    scores, labels = (
        torch.tensor([[3.0, 1, 0], [2, 2, 1], [1, 3, 2]]),
        torch.tensor([[1.0, 0, 0], [0, 0, 1], [1, 0, 0]]),
    )
    found = precision_by_class(scores, labels, ["a", "b", "c"])
    assert found == {"a": pytest.approx((1 + 2 / 3) / 2), "b": None, "c": 0.5}
    assert mean_precision(found) == pytest.approx(((1 + 2 / 3) / 2 + 0.5) / 2)
    assert mean_precision({"b": None}) is None


def small(folder: Path, **fields: Any) -> Experiment:
    experiment = scenes(str(folder), height=96, width=160, window=16, reads=2, search=8, scan_width=4, steps=4, batch=4)
    model = dataclasses.replace(experiment.model, name="vit_tiny_patch16_224", options=SMALL_VIT, pretrained=None)  # type: ignore[call-arg]
    engine = dataclasses.replace(experiment.engine, precision="fp32", workers=0)
    data = dataclasses.replace(experiment.data, validate_on=None)
    return dataclasses.replace(experiment, **{"model": model, "engine": engine, "data": data, **fields})


def test_processes_score_together_what_one_scores_alone(folder: Path) -> None:
    experiment = small(folder)
    torch.manual_seed(0)
    model, test = build_for(experiment), open_set(experiment.data, "test")

    def batches(shard: Shard) -> Any:
        return test.evaluation_batches(2, shard, CPU, 0, fixed_chunks)

    alone = score(model, batches(Shard()), digest=True, names=test.names)
    # Three processes share two batches, so that one of them has none.
    sent: list[list[torch.Tensor]] = [[], [], []]
    for rank in range(3):

        def gather(rows: torch.Tensor, rank: int = rank) -> torch.Tensor:
            sent[rank].append(rows)
            return torch.cat([rows, torch.ones(1, *rows.shape[1:], dtype=rows.dtype)])  # there must be one to score

        score(model, batches(Shard(rank, 3)), digest=True, names=test.names, gather=gather)
    assert sorted(len(rows[0]) for rows in sent) == [0, 2, 2]
    gathered = iter([torch.cat(rows) for rows in zip(*sent, strict=True)])
    together = score(model, batches(Shard(0, 3)), digest=True, names=test.names, gather=lambda _: next(gathered))
    assert together == alone
    assert alone.mean_ap is not None
    assert alone.average_precision is not None
    assert set(alone.average_precision) == set(test.names)


def test_accuracy_is_the_share_of_scenes_with_every_label_right(folder: Path) -> None:
    experiment = small(folder)
    torch.manual_seed(0)
    model = build_for(experiment).eval()
    pairs = list(batches_of_test(experiment, None, CPU))
    right = torch.cat([((model(x) > 0) == (label > 0)).all(1) for x, label in pairs])
    names = open_set(experiment.data, "test").names
    found = score(model, pairs, names=names)
    assert found.accuracy == right.double().mean()
    reads = collect(model, pairs)
    assert torch.equal(reads.right, right)
    assert "no label" in reads.names(names)


def rates_of(stepper: Stepper) -> dict[str, float]:
    rates = {id(p): float(group["lr"]) for group in stepper.adamw.param_groups for p in group["params"]}
    return {name: rates[id(p)] for name, p in stepper.named.items()}


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_parameters_that_wrapping_added_have_their_own_rate(folder: Path, decay: Any) -> None:
    model = build_for(small(folder))
    settings = Optimizer(1e-4, 2, 10, 4, 0.1, decay, schedule="cosine", new_lr=1e-2)
    stepper = Stepper(model, settings)
    for step in (0, 1, 5, 10):
        stepper.set_rate(step)
        for name, rate in rates_of(stepper).items():
            assert rate == pytest.approx(rate_at(settings, step) * (100 if is_added(name) else 1), rel=1e-5)
    added = {name for name in rates_of(stepper) if is_added(name)}
    assert {"scan.score.weight", "head.layer.weight", "vit.head.weight"} & added
    assert not any(name.startswith("vit.blocks") for name in added)
    decays = {id(p): group["weight_decay"] for group in stepper.adamw.param_groups for p in group["params"]}
    plain = Stepper(model, dataclasses.replace(settings, new_lr=None))
    assert decays == {id(p): group["weight_decay"] for group in plain.adamw.param_groups for p in group["params"]}


def test_a_rate_of_new_parameters_that_is_the_rate_changes_nothing(folder: Path) -> None:
    ends = []
    for new_lr in (None, 1e-3):
        experiment = small(folder, optimizer=Optimizer(1e-3, 0, 4, 4, new_lr=new_lr))
        trainer = Trainer(experiment)
        list(trainer.train(2))
        ends.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_a_run_with_two_rates_that_stops_goes_on_as_the_unbroken_one(folder: Path, tmp_path: Path) -> None:
    experiment = small(folder, optimizer=Optimizer(1e-4, 1, 4, 4, schedule="cosine", new_lr=1e-2))
    unbroken, broken, resumed = (Trainer(experiment) for _ in range(3))
    losses = [float(stats.loss) for stats in unbroken.train(4)]
    begun = [float(stats.loss) for stats in broken.train(2)]
    resumed.load(broken.save(tmp_path, {}))
    assert begun + [float(stats.loss) for stats in resumed.train(2)] == losses


def test_a_plain_vit_sees_a_rectangle() -> None:
    settings = ImageModel("vit_tiny_patch16_224", {"embed_dim": 32, "depth": 1, "num_heads": 2})
    model = build_image_model(settings, (96, 160), 3, 4)
    assert model.vit.patch_embed.grid_size == (6, 10)
    assert model(torch.randn(2, 3, 96, 160)).shape == (2, 4)
    with pytest.raises(ValueError, match=r"patch_size is 16; it must divide data.size, \(96, 150\)"):
        build_image_model(settings, (96, 150), 3, 4)


def trained(folder: Path, out: Path, *more: str) -> Path:
    settings = ["model.name=vit_tiny_patch16_224", "model.pretrained=null", "engine.workers=0", "engine.precision=fp32"]
    given = ["--path", str(folder), "--height", "96", "--width", "160", "--steps", "4", "--batch", "4", *more]
    main(["train", "scenes", *given, "--validate-on", "0.5", "--out", str(out), "--device", "cpu",
          *itertools.chain(*(("--set", each) for each in settings))])  # fmt: skip
    return out


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    small_ones = ["--window", "16", "--reads", "2", "--search", "8", "--scan-width", "4"]
    options = ["--set", f"model.options={json.dumps(SMALL_VIT)}"]
    return trained(folder, tmp_path_factory.mktemp("runs") / "scenes", *small_ones, *options)


def result_in(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


@pytest.fixture(autouse=True)
def _few_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adatape.serve.engine.REPEATS", 3)
    monkeypatch.setattr("adatape.evaluate.budget.MOST", 6)


def test_eval_says_mean_ap_and_what_result_json_says(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", str(run), "--device", "cpu", "--json"])
    said = capsys.readouterr().out
    again, result = json.loads(said.splitlines()[-1]), result_in(run)
    assert again == {name: result[name] for name in again}
    assert {"mean_ap", "average_precision", "logits_sha256"} <= set(again)
    assert "mean AP" in said
    assert "all labels right" in said
    assert "average precision: =blue" in said


def test_a_plain_vit_is_trained_on_the_same_scenes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--set", 'model.options={"embed_dim": 32, "depth": 1, "num_heads": 2}']
    out = trained(folder, tmp_path / "plain", "--system", "plainvit", *options)
    assert "validation mean AP" in capsys.readouterr().out
    assert load_run(out)[1].vit.patch_embed.img_size == (96, 160)
    assert 0 < result_in(out)["mean_ap"] <= 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("eval RUN --budgets 1,2 --device cpu", "mean AP"),
        ("budget RUN --accuracy 50pt-of-best --device cpu", "mean AP reported on the test set"),
        ("figures RUN --device cpu", "training.png"),
        ("report RUN --out RUN/report.html", "mean AP %"),
    ],
)
def test_verbs_compare_by_mean_ap(run: Path, capsys: pytest.CaptureFixture[str], command: str, said: str) -> None:
    main(command.replace("RUN", str(run)).split())
    assert said in capsys.readouterr().out


def test_fewshot_refuses_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fewshot", str(run), "--on", "digits", "--device", "cpu"])
    assert "is a run on images with several labels" in capsys.readouterr().err


def test_a_release_gives_the_same_logits_and_mean_ap_by_its_own_card(
    run: Path, folder: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["release", str(run), "--to", str(tmp_path / "released")])
    card = (tmp_path / "released" / "README.md").read_text()
    assert "of which an image may show several or none" in card
    assert "| mean AP |" in card
    [code] = card.split("```python\n")[1:]
    # Twice as tall as the model's input, so that it is letterboxed.
    image = Image.open(folder / "images" / "7.png").convert("RGB").resize((160, 192))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"image": image}
    exec(code.partition("```")[0], names)
    model = load_run(run)[1].eval()
    with torch.no_grad():
        logits = model(letterboxed(image, SIZE)[None].float() / 127.5 - 1)[0]
    assert torch.equal(names["probability"], logits.sigmoid())
    assert names["there"] == [name for name, p in zip(["=blue", "green", "red"], logits, strict=True) if p > 0]
    test = open_set(load_config(run / "config.json").data, "test")
    assert test.images is not None
    chances = []
    for n in range(len(test.images)):
        names["image"] = test.images.read(n).convert("RGB")
        exec(code.partition("```")[0], names)
        chances.append(names["probability"].detach())
    labels = torch.from_numpy(test.images.labels)
    by_class = precision_by_class(torch.stack(chances), labels, test.names)
    main(["eval", str(run), "--device", "cpu", "--json"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert mean_precision(by_class) == said["mean_ap"]


def asked(run: Path, work: Callable[[httpx.AsyncClient], Any]) -> Any:
    return inside(create_app(load_served(run)), work)


def test_the_server_tells_every_label_with_its_own_probability(run: Path, folder: Path) -> None:
    content = (folder / "images" / "7.png").read_bytes()

    async def work(client: httpx.AsyncClient) -> list[Any]:
        post = await client.post("/v1/classify", files=[("image", ("7.png", content))], data={"tape": "1"})
        return [post.json(), *[(await client.get(path)).json() for path in ("/v1/model", "/v1/examples?count=3")]]

    answer, model, examples = asked(run, work)
    [result] = answer["results"]
    with torch.no_grad():
        x = seen(Image.open(folder / "images" / "7.png"), 3, SIZE)[None].float() / 127.5 - 1
        chances = load_run(run)[1].eval()(x)[0].sigmoid()
    told = {each["class"]: each for each in result["top"]}
    assert [told[n]["name"] for n in range(3)] == ["=blue", "green", "red"]
    torch.testing.assert_close(torch.tensor([told[n]["probability"] for n in range(3)]), chances, rtol=0, atol=1e-6)
    assert all(each["present"] == (each["probability"] > 0.5) for each in told.values())
    assert (result["tape_length"], len(result["tape"])) == (2, 2)
    assert model["input"] == {"size": [96, 160], "channels": 3}
    assert model["several_labels"]
    assert model["mean_ap"] == pytest.approx(result_in(run)["mean_ap"])
    shown = [(each["label"], each["name"]) for each in examples["examples"]]
    assert len(shown) == 3
    assert all(name == (", ".join(model["classes"][n] for n in label) or "no label") for label, name in shown)


def test_examples_that_show_only_some_labels_do_not_rename_the_others(run: Path, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "examples").mkdir()
    shutil.copy(folder / "images" / "7.png", copy / "examples")
    (copy / "examples" / "labels.csv").write_text("file,labels,split\n7.png,red,test\n")
    with pytest.raises(ValueError, match=r"examples names 1 labels and the model has 3; add scenes"):
        load_served(copy)
    shutil.copy(folder / "images" / "8.png", copy / "examples")
    with (copy / "examples" / "labels.csv").open("a") as file:
        file.write("8.png,green;=blue,test\n")
    assert load_served(copy).classes == ["=blue", "green", "red"]


def test_a_card_pads_as_training_did_whatever_the_mean(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ["--system", "plainvit", "--set", 'model.options={"embed_dim": 32, "depth": 1, "num_heads": 2}']
    name = "deit_tiny_patch16_224"  # whose mean is not 0.5
    out = trained(folder, tmp_path / "run", *plain, "--set", f"model.name={name}", "--set", "model.scaling=backbone")
    main(["release", str(out), "--to", str(tmp_path / "released")])
    [code] = (tmp_path / "released" / "README.md").read_text().split("```python\n")[1:]
    image = Image.open(folder / "images" / "7.png").convert("RGB").resize((160, 192))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"image": image}
    exec(code.partition("```")[0], names)
    model = load_run(out)[1].eval()
    with torch.no_grad():
        expected = model(letterboxed(image, SIZE)[None].float() / 127.5 - 1)[0].sigmoid()
    torch.testing.assert_close(names["probability"].detach(), expected, rtol=0, atol=1e-5)


def test_show_tape_letterboxes_a_picture_as_training_did(run: Path, folder: Path) -> None:
    model = load_run(run)[1].eval()
    image = Image.open(folder / "images" / "7.png").convert("RGB").resize((160, 192))
    drawn = adatape.show_tape(model, image).images[0].get_array()
    expected = adatape.show_tape(model, letterboxed(image, SIZE).float() / 127.5 - 1).images[0].get_array()
    np.testing.assert_allclose(drawn, expected, atol=1e-5)


def test_pretrained_weights_that_are_no_file_are_named_by_their_option(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "scenes", "--path", str(folder), "--pretrained", "none", "--out", str(tmp_path / "run")])
    said = "model.pretrained is 'none', which is no file; it must be hub, a safetensors file, or null"
    assert said in capsys.readouterr().err


def test_a_server_need_not_have_the_scenes(run: Path, folder: Path, tmp_path: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    away = {**config, "data": {**config["data"], "path": str(tmp_path / "gone")}}
    (run / "config.json").write_text(json.dumps(away))
    try:
        served = load_served(run)
    finally:
        (run / "config.json").write_text(json.dumps(config))
    assert served.images is None
    assert served.sample.shape == (3, *SIZE)
    assert str(folder) not in served.missing


def test_gtsdb_becomes_such_a_folder(tmp_path: Path) -> None:
    classes = {"0": ["speed limit 20", "prohibitory"], "1": ["crossing", "danger"]}
    (tmp_path / "gtsdb_classes.json").write_text(json.dumps(classes))
    for split in ("train", "test"):
        files = [b"first", b"second", b"third"]
        offsets = np.cumsum([0, *map(len, files)])
        boxes = np.array([[0, 1, 1, 9, 9, 1], [0, 1, 1, 9, 9, 0], [2, 1, 1, 9, 9, 0], [2, 5, 5, 9, 9, 0]], np.int32)
        np.savez(tmp_path / f"gtsdb_{split}.npz", bytes=np.frombuffer(b"".join(files), np.uint8), offsets=offsets,
                 boxes=boxes)  # fmt: skip
    made = script(ROOT / "research" / "large" / "gtsdb_folder.py").write_folder(tmp_path, tmp_path / "out")
    assert made == {"train": 3, "test": 3}
    assert (tmp_path / "out" / "test" / "00001.webp").read_bytes() == b"second"
    test = open_set(Scenes(str(tmp_path / "out")), "test")
    assert test.names == ["danger", "prohibitory"]
    assert test.images is not None
    assert test.images.labels.tolist() == [[1, 1], [0, 0], [0, 1]]
