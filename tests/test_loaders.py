"""A step's batch depends on seed and step only: not on processes, workers or the first step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adatape.config import Engine, Experiment, ImageModel, Optimizer
from adatape.counter_rng import key_of
from adatape.data.batch import Batch, Shard
from adatape.data.decode import Decoded
from adatape.data.images import open_images
from adatape.data.imageset import Pixels
from adatape.data.loaders import MIX, DecodingLoader, ResidentLoader, even_chunks, labelled_images
from adatape.data.mixing import draw_mixing
from adatape.data.sampler import Order
from adatape.data.sets import open_set
from adatape.data.shard_loader import ShardLoader
from adatape.data.shards import write_shards
from adatape.data_config import Augment, Images
from adatape.train.run import run
from adatape.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than there are cores

CPU = torch.device("cpu")
MIXED = Augment(crop="inception", flip=True, randaug=1, jitter=0.5, mixup=0.8, cutmix=1.0, erase=0.25, smoothing=0.1)
PLAIN = Augment(crop="pad", pad=1)


def noise_set(n: int, size: int = 6) -> Pixels:
    pixels = np.random.default_rng(0).integers(0, 256, (n, size, size, 3), np.uint8)
    return Pixels([str(label) for label in range(3)], np.arange(n) % 3, pixels)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(noise_set(75), folder, per_shard=9)
    write_shards(noise_set(31), folder, per_shard=9, prefix="test")
    return f"{folder}/{{split}}-*.tar"


def sharded(path: str, augment: Augment, **options: Any) -> Images:
    return Images("shards", path, size=8, augment=augment, classes=3, **options)


def whole_batches(
    data: Images, world: int, workers: int, first: int = 0, count: int = 4, batch: int = 16
) -> list[Batch]:
    """Global batches: the parts of all processes concatenated."""
    loaders = [ShardLoader(data, batch, 5, Shard(rank, world), CPU, workers).batches(first) for rank in range(world)]
    rows = zip(*(itertools.islice(loader, count) for loader in loaders), strict=True)
    return [Batch(*map(torch.cat, zip(*parts, strict=True))) for parts in rows]


def assert_same(found: list[Batch], wanted: list[Batch]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("augment", [PLAIN, MIXED, dataclasses.replace(MIXED, repeats=3)], ids=["plain", "mixed", "3"])
def test_shards_give_the_same_batches_to_any_number_of_processes_and_workers(shards: str, augment: Augment) -> None:
    data = sharded(shards, augment)
    wanted = whole_batches(data, 1, 0)
    assert not torch.equal(wanted[0].x, wanted[1].x)
    for world, workers in [(2, 0), (4, 0), (1, 2), (1, 3), (2, 2), (2, 3), (4, 3)]:
        assert_same(whole_batches(data, world, workers), wanted)


@pytest.mark.parametrize("augment", [PLAIN, dataclasses.replace(MIXED, repeats=2)], ids=["plain", "mixed"])
@pytest.mark.parametrize(("workers", "then"), [(0, 2), (2, 0)])
def test_shards_resume_at_any_step_with_nothing_saved(shards: str, augment: Augment, workers: int, then: int) -> None:
    data = sharded(shards, augment)
    unbroken = whole_batches(data, 1, workers, count=12)
    for first in (1, 7, 11):
        assert_same(whole_batches(data, 1, then, first, 12 - first), unbroken[first:])


def test_a_sample_of_a_shard_is_mixed_with_its_successor_in_the_stream(shards: str) -> None:
    blended = dataclasses.replace(MIXED, cutmix=0.0)
    alone = [batch.x.unflatten(0, (8, 2)) for batch in whole_batches(plainly(shards, blended), 1, 0, count=3)]
    for step, batch in enumerate(whole_batches(sharded(shards, blended), 1, 0, count=2)):
        chains = torch.cat([alone[step], alone[step + 1][:, :1]], 1)
        share = draw_mixing(blended, 8, key_of(5, MIX, step)).share
        wanted = torch.lerp(chains[:, 1:], chains[:, :-1], share).flatten(0, 1)
        torch.testing.assert_close(batch.x, wanted)


def plainly(path: str, augment: Augment) -> Images:
    return sharded(path, dataclasses.replace(augment, mixup=0.0, cutmix=0.0))


def test_a_pass_over_shards_has_each_sample_once(shards: str) -> None:
    data = sharded(shards.replace("{split}-*", "train-000000"), Augment(), samples=9)
    batches = whole_batches(data, 1, 0, count=6, batch=3)
    passes = [torch.cat([batch.x for batch in batches[at : at + 3]]).flatten(1) for at in (0, 3)]
    assert len(passes[0].unique(dim=0)) == 9
    assert torch.equal(passes[0].unique(dim=0), passes[1].unique(dim=0))
    assert len(torch.cat([batch.key for batch in batches]).unique()) == 18


def test_repeats_show_an_image_that_often_in_a_batch_of_shards(shards: str) -> None:
    (batch,) = whole_batches(sharded(shards, Augment(repeats=2)), 1, 0, count=1)
    _, copies = batch.x.flatten(1).unique(dim=0, return_counts=True)
    assert copies.tolist() == [2] * 8


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 0), (3, 2), (4, 0)])
def test_test_shards_are_scored_once_each_by_any_number_of_processes(shards: str, world: int, workers: int) -> None:
    data = sharded(shards, PLAIN)
    one = list(open_set(data, "test").evaluation_batches(100, Shard(), CPU))
    parts = [
        list(open_set(data, "test").evaluation_batches(4, Shard(rank, world), CPU, workers)) for rank in range(world)
    ]
    assert len({len(part) for part in parts}) == 1, "sharded weights are gathered at every batch"
    for field in range(2):
        assert torch.equal(torch.cat([each[field] for part in parts for each in part]), one[0][field])
    assert one[0].label.shape == (31,)


@pytest.mark.parametrize(("total", "batch", "world"), [(31, 4, 3), (8, 4, 2), (9, 4, 2), (5, 100, 5), (1001, 500, 2)])
def test_chunks_cover_a_set_evenly(total: int, batch: int, world: int) -> None:
    chunks = [even_chunks(total, batch, Shard(rank, world)) for rank in range(world)]
    assert [i for part in chunks for chunk in part for i in chunk] == list(range(total))
    assert all(0 < len(chunk) <= batch for part in chunks for chunk in part)
    assert len({len(part) for part in chunks}) == 1
    with pytest.raises(ValueError, match="the set has 2 samples; it must have at least one for each of 3 processes"):
        even_chunks(2, 5, Shard(0, 3))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("train-*", {}, "names no test shards; write {split} in it, or TRAIN | TEST"),
        ("{split}-*", {"classes": None}, "classes is None; shards do not store"),
        ("{split}-*", {"resident": True}, "resident is true, but shards are streamed"),
    ],
)
def test_shards_that_lack_something_say_what(shards: str, path: str, options: dict[str, Any], message: str) -> None:
    data = dataclasses.replace(sharded(shards.replace("{split}-*", path), PLAIN), **options)
    with pytest.raises(ValueError, match=message):
        Trainer(tiny(data))


def tiny(data: Images, steps: int = 6, workers: int = 0) -> Experiment:
    options = {"patch_size": 4, "embed_dim": 32, "num_heads": 2, "depth": 2, "query_width": 16}
    tape = {"bank_patch": 2, "steps": 2, "threshold": 1.0, "merge": 2}
    return Experiment(
        recipe="tiny",
        data=data,
        model=ImageModel("adatape_tiny_patch16_224", {**options, **tape}),
        optimizer=Optimizer(lr=1e-3, warmup=2, steps=steps, batch=16),
        ponder_weight=0.01,
        evaluate_every=steps,
        engine=Engine(workers=workers, log_every=2),
    )


def test_a_run_on_shards_is_the_same_with_workers_and_when_resumed(shards: str, tmp_path: Path) -> None:
    data = sharded(shards, MIXED)
    unbroken, other = Trainer(tiny(data)), Trainer(tiny(data, workers=2))
    losses = [float(stats.loss) for stats in unbroken.train(6)]
    resumed = [float(stats.loss) for stats in other.train(3)]
    other.save(tmp_path, {})
    fresh = Trainer(tiny(data, workers=3))
    fresh.load(tmp_path / "step-00000003")
    assert resumed + [float(stats.loss) for stats in fresh.train(3)] == losses
    assert unbroken.evaluate("test") == fresh.evaluate("test")
    assert unbroken.task.epoch(6) == 6 * 16 / 75


def folder_of(path: Path, broken: int, count: int = 300, converted: int = 3) -> Images:
    """Tiny JPEGs of three classes; some are CMYK, others unreadable for different reasons."""
    bad = [b"", b"no image", None, b"\x89PNG\r\n\x1a\n" + b"\0" * 40]
    draws = np.random.default_rng(0)
    odd = draws.permutation(count)[: broken + converted]
    for split, n in (("train", count), ("test", 12)):
        for i in range(n):
            file = path / split / "abc"[i % 3] / f"{i:03d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(draws.integers(0, 256, (12, 10, 3), np.uint8))
            (image.convert("CMYK") if split == "train" and i in odd[broken:] else image).save(file, "JPEG")
    for k, i in enumerate(odd[:broken]):
        file = path / "train" / "abc"[i % 3] / f"{i:03d}.jpg"
        content = bad[k % len(bad)]
        file.write_bytes(bomb() if k % 5 == 4 else file.read_bytes()[:200] if content is None else content)
    return Images("folder", str(path), size=8, augment=PLAIN)


def bomb() -> bytes:
    """A bitmap whose header claims 20,000 × 20,000 pixels."""
    return (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 20000, 20000, 1, 24, 0, 0, 0, 0, 0, 0)
    )


def nobody(status: object) -> None:
    """Watches no run."""


def journal(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_one_per_cent_of_broken_images_are_counted_and_the_run_completes(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "set", broken=5, count=500)
    results = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        results.append(run(tiny(data, steps=32, workers=workers), out, "cpu", nobody))
        last = [line for line in journal(out) if line["kind"] == "train"][-1]
        assert (last["broken_images"], results[-1]["broken_images"]) == (5, 5)
        assert last["converted_images"] >= 3
    assert results[0]["loss"] == results[1]["loss"]


def test_ten_per_cent_of_broken_images_end_a_run_in_one_line(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "set", broken=30)
    for workers in (0, 2):
        with pytest.raises(ValueError, match=r"images could not be read, .* %; broken allows 2.0 %: first ") as caught:
            run(tiny(data, steps=20, workers=workers), tmp_path / str(workers), "cpu", nobody)
        assert "\n" not in str(caught.value)


def test_an_error_in_a_worker_reaches_the_main_process_in_one_line(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "set", broken=300, converted=0)
    for workers in (0, 2):
        with pytest.raises(ValueError, match="100 images in a row could not be read") as caught:
            list(Trainer(tiny(data, workers=workers)).train(1))
        assert "\n" not in str(caught.value)


def test_unreadable_test_images_end_a_score_too(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "set", broken=0)
    for file in sorted((tmp_path / "set" / "test" / "a").iterdir())[:2]:
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="2 of 12 images could not be read"):
        list(open_set(data, "test").evaluation_batches(12, Shard(), CPU))


@pytest.mark.parametrize("augment", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_decoded_batches_are_the_same_for_any_number_of_processes_and_workers(tmp_path: Path, augment: Augment) -> None:
    images = open_images(folder_of(tmp_path, broken=2, count=40), "train")
    data = Images("folder", str(tmp_path), size=8, augment=augment, broken=1.0)

    def batches(world: int, workers: int, first: int) -> list[Batch]:
        order = Order(len(images), 12, 5)
        parts = [
            DecodingLoader(images, data, order, Shard(r, world), CPU, workers).batches(first) for r in range(world)
        ]
        rows = zip(*(itertools.islice(part, 5 - first) for part in parts), strict=True)
        return [Batch(*map(torch.cat, zip(*row, strict=True))) for row in rows]

    wanted = batches(1, 0, 0)
    for world, workers, first in [(1, 2, 0), (2, 0, 0), (3, 2, 2), (4, 0, 4), (1, 3, 3)]:
        assert_same(batches(world, workers, first), wanted[first:])


@pytest.mark.parametrize("augment", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_resident_batches_are_the_same_for_any_number_of_processes(augment: Augment) -> None:
    images, order = noise_set(40), Order(40, 12, 5, repeats=2)
    data = Images("arrays", size=8, augment=augment)

    def batches(world: int, first: int) -> list[Batch]:
        parts = [ResidentLoader(images, data, order, Shard(r, world), CPU).batches(first) for r in range(world)]
        rows = zip(*(itertools.islice(part, 6 - first) for part in parts), strict=True)
        return [Batch(*map(torch.cat, zip(*row, strict=True))) for row in rows]

    wanted = batches(1, 0)
    for world, first in [(2, 0), (3, 3), (4, 5)]:
        assert_same(batches(world, first), wanted[first:])


class Watched(Pixels):
    """Images of any size, as files are, that count how many of them are held at once."""

    pixels = None  # type: ignore[assignment]

    def load(self, i: int) -> Decoded:
        found = super().load(i)
        self.held = [*getattr(self, "held", []), weakref.ref(found.image)]
        self.most = max(getattr(self, "most", 0), sum(image() is not None for image in self.held))
        return found


def test_evaluation_crops_each_image_before_it_reads_the_next() -> None:
    images = noise_set(20, size=12)
    watched = Watched(images.names, images.labels, images.stored)
    ((x, _),) = labelled_images(watched, 6, [range(20)], CPU)
    assert x.shape == (20, 3, 6, 6)
    assert watched.most <= 2
