"""Megapixel MNIST: a canvas is a function of seed, split and number, and its answers are those of its digits."""

from __future__ import annotations

import dataclasses
import gzip
import io
import struct
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from scripts import script
from test_serve import inside

from adatape.data import sets
from adatape.data.batch import Shard
from adatape.data.megapixel import DIGIT, draw_stamps, line_patterns, render
from adatape.data.sets import open_set
from adatape.data_config import Megapixel
from adatape.evaluate.reading import spread_batches
from adatape.recipes.megapixel import megapixel
from adatape.serve.app import create_app
from adatape.serve.served import load_served
from adatape.train.folder import load_run
from adatape.train.launch import train_to_folder
from adatape.train.release import release_to_folder
from adatape.train.trainer import Trainer

make = script("research/large/canvas.py").make
SIDE = 160
CPU = torch.device("cpu")


def some_digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bright in the middle and empty around it, as MNIST's; each is like no other."""
    digits = np.zeros((count, DIGIT, DIGIT), np.uint8)
    digits[:, 4:24, 4:24] = np.random.default_rng(seed).integers(1, 256, (count, 20, 20))
    return digits, np.arange(count) % 10


@pytest.fixture
def mnist(tmp_path: Path) -> str:
    for part, count in (("train", 120), ("test", 40)):
        digits, labels = some_digits(count, count)
        np.save(tmp_path / f"{part}_images.npy", digits)
        np.save(tmp_path / f"{part}_labels.npy", labels)
    return str(tmp_path)


def config(path: str, **options: Any) -> Megapixel:
    return Megapixel(path, **{"side": SIDE, "noise": 12, "train": 30, "held_out": 9, **options})


def canvases(path: str, split: Any = "train", batch: int = 7, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = list(open_set(config(path, **options), split).evaluation_batches(batch, Shard(), CPU))
    return torch.cat([each.x for each in found]), torch.cat([each.label for each in found])


def test_a_canvas_does_not_depend_on_how_many_there_are_nor_on_the_batch(mnist: str) -> None:
    x, label = canvases(mnist)
    for options in ({"batch": 30}, {"train": 40}, {"batch": 3, "train": 31}):
        again, labels = canvases(mnist, **options)
        assert torch.equal(again[:30], x)
        assert torch.equal(labels[:30], label)
    assert not torch.equal(canvases(mnist, seed=1)[0], x)
    assert not torch.equal(canvases(mnist, "validation")[0], x[:9])


def test_pictures_look_at_no_more_canvases_at_once_than_scoring(mnist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "EVAL_PIXELS", 2 * SIDE**2)
    experiment = dataclasses.replace(megapixel(mnist, side=SIDE), data=config(mnist))
    sizes = [len(x) for x, _ in spread_batches(experiment, 5, CPU)]
    assert sum(sizes) == 5
    assert max(sizes) == 2


def test_training_batches_show_the_canvases_of_the_set(mnist: str) -> None:
    x, label = canvases(mnist)
    data = open_set(config(mnist), "train")
    whole = next(data.training_loader(30, 5, Shard(), CPU).batches(2))
    halves = [next(data.training_loader(30, 5, Shard(rank, 2), CPU).batches(2)) for rank in range(2)]
    order = [int((x == each).flatten(1).all(1).nonzero()) for each in whole.x]
    assert sorted(order) == list(range(30))
    assert torch.equal(label[order], whole.target)
    for part in ("x", "target", "key"):
        assert torch.equal(torch.cat([getattr(half, part) for half in halves]), getattr(whole, part))


def test_what_is_drawn_when_needed_is_what_is_drawn_at_once(mnist: str) -> None:
    digits, labels = some_digits(120, 120)
    for order in ("under", "over"):
        options: dict[str, Any] = {"side": SIDE, "noise": 12, "order": order}
        at_once = make(digits[:100], labels[:100], 30, split=0, **options)
        x, _ = canvases(mnist, order=order)
        assert torch.equal(((x[:, 0] + 1) * 127.5).round().to(torch.uint8), at_once.images)


def test_labels_are_those_of_the_digits_at_the_corners() -> None:
    digits, labels = some_digits(100, 0)
    made = make(digits, labels, 40, split=1, side=SIDE, noise=12)
    by_content = {digit.tobytes(): int(label) for digit, label in zip(digits, labels, strict=True)}
    for n in range(40):
        found = {}
        for top, left in made.corners[n].tolist():
            stamp = made.images[n, top : top + DIGIT, left : left + DIGIT].numpy()
            found[top, left] = by_content[np.ascontiguousarray(stamp).tobytes()]
        classes = list(found.values())
        majority = [c for c in set(classes) if classes.count(c) >= 3]
        assert majority == [int(made.majority[n])]
        assert max(classes) == int(made.maximum[n])
        highest = min(top for top, _ in found)
        assert int(made.topmost[n]) in [c for (top, _), c in found.items() if top == highest]
        assert set(classes) == set(made.present[n].nonzero()[:, 0].tolist())


def test_boxes_of_digits_do_not_overlap() -> None:
    corners = draw_stamps(np.arange(50) % 10, 60, 0, 0, SIDE, 3).corners
    apart = (corners[:, :, None] - corners[:, None]).abs().amax(-1) + DIGIT * torch.eye(5, dtype=torch.int64)
    assert apart.min() >= DIGIT


def test_both_orders_differ_only_where_lines_cross_digits() -> None:
    digits, labels = some_digits(60, 0)
    stamps = draw_stamps(labels, 20, 0, 0, SIDE, 40)
    pool, shown = line_patterns(0, 0), torch.from_numpy(digits)
    under, over = (render(stamps, shown, pool, SIDE, order) for order in ("under", "over"))  # type: ignore[arg-type]
    lines = render(stamps._replace(digits=torch.zeros_like(stamps.digits)), torch.zeros_like(shown), pool, SIDE, "over")
    inside = render(stamps._replace(patterns=stamps.patterns[:, :0]), torch.full_like(shown, 255), pool, SIDE, "under")
    differ = under != over
    assert differ.any()
    assert not (differ & ~((lines > 0) & (inside > 0))).any()
    assert torch.equal(over, torch.maximum(under, lines))


@pytest.mark.parametrize(("task", "shape"), [("maximum", (9,)), ("topmost", (9,)), ("all", (9, 10))])
def test_every_task_has_its_labels(mnist: str, task: Any, shape: tuple[int, ...]) -> None:
    _, label = canvases(mnist, "test", task=task)
    assert label.shape == shape
    assert config(mnist, task=task).several_labels == (task == "all")


def test_validation_canvases_show_digits_that_no_training_canvas_has(mnist: str) -> None:
    train, held = (open_set(config(mnist), split).canvases.digits for split in ("train", "validation"))  # type: ignore[attr-defined]
    assert (len(train), len(held)) == (100, 20)
    assert not {each.numpy().tobytes() for each in train} & {each.numpy().tobytes() for each in held}
    assert open_set(config(mnist, validate_on=None), "validation").split == "test"


def test_digits_from_idx_files_are_those_from_arrays(mnist: str, tmp_path: Path) -> None:
    raw = tmp_path / "files" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, name in (("train", "train"), ("test", "t10k")):
        for kind, dims in (("images", 3), ("labels", 1)):
            array = np.load(Path(mnist) / f"{part}_{kind}.npy").astype(np.uint8)
            header = struct.pack(f">BBBB{dims}i", 0, 0, 8, dims, *array.shape)
            with gzip.open(raw / f"{name}-{kind}-idx{dims}-ubyte.gz", "wb") as file:
                file.write(header + array.tobytes())
    assert torch.equal(canvases(str(tmp_path / "files"))[0], canvases(mnist)[0])


def test_a_folder_without_mnist_is_refused(tmp_path: Path, mnist: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"contains neither train-images-idx3-ubyte.gz nor MNIST/raw; arrays are"
    ):
        canvases(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="has no digit of class 0 for the validation canvases"):
        canvases(mnist, "validation", validate_on=0.04)


@pytest.mark.parametrize("task", ["majority", "all"])
@pytest.mark.parametrize("system", ["adatape", "plainvit"])
def test_the_recipe_trains(mnist: str, task: Any, system: Any) -> None:
    experiment = megapixel(mnist, task, system=system, side=SIDE, reads=4, steps=4, batch=4)
    small = dataclasses.replace(experiment.data, train=12, held_out=8, noise=5)
    trainer = Trainer(dataclasses.replace(experiment, data=small))
    losses = [float(stats.loss) for stats in trainer.train(2)]
    assert np.isfinite(losses).all()
    assert 0 <= trainer.evaluate().accuracy <= 1


def as_png(canvas: torch.Tensor) -> tuple[Image.Image, bytes]:
    """A standardised canvas as the image that it was."""
    image, file = Image.fromarray(((canvas[0] + 1) * 127.5).round().byte().numpy()), io.BytesIO()
    image.save(file, "PNG")
    return image, file.getvalue()


@pytest.mark.parametrize("task", ["majority", "all"])
def test_server_and_card_see_a_canvas_as_scoring_did(
    mnist: str, task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = megapixel(mnist, task, side=SIDE, reads=4, steps=1, batch=4)
    data = dataclasses.replace(experiment.data, train=12, held_out=8, noise=5)
    run = train_to_folder(dataclasses.replace(experiment, data=data), tmp_path / "run", "cpu").out
    x, _ = canvases(mnist, "test", task=task, train=12, held_out=8, noise=5)
    with torch.no_grad():
        logits = load_run(run)[1].eval()(x[:1])[0]
    expected = logits.sigmoid() if task == "all" else logits.softmax(-1)
    image, content = as_png(x[0])

    async def work(client: httpx.AsyncClient) -> list[Any]:
        wide = as_png(torch.zeros(1, 90, 200))[1]
        posts = [await client.post("/v1/classify", files=[("image", ("a.png", each))], data={"tape": "1", "top": "10"})
                 for each in (content, wide)]  # fmt: skip
        return [*posts, await client.get("/v1/model")]

    exact, wide, about = inside(create_app(load_served(run)), work)
    assert about.json()["input"] == {"size": [SIDE, SIDE], "channels": 1}
    told = {each["class"]: each["probability"] for each in exact.json()["results"][0]["top"]}
    torch.testing.assert_close(torch.tensor([told[n] for n in range(10)]), expected, rtol=0, atol=1e-6)
    boxes = [read["box"][0] for read in wide.json()["results"][0]["tape"]]
    assert {(height, width) for _, _, height, width in boxes} == {(60, 60)}  # 48 of 160 pixels, that were 200

    release_to_folder(run, tmp_path / "released", licence="mit")
    [code] = (tmp_path / "released" / "README.md").read_text().split("```python\n")[1:]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"image": image}
    exec(code.partition("```")[0], names)
    assert torch.equal(names["transform"](image), x[0])
    if task == "majority":
        assert names["answer"] == int(logits.argmax())
