"""All kinds of data sets have one interface for training and evaluation."""

from __future__ import annotations

import gzip
import itertools
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adatape.data.batch import Batch, Shard
from adatape.data.decode import BrokenImage
from adatape.data.imageset import Pixels
from adatape.data.loaders import Labelled, even_chunks, fixed_chunks
from adatape.data.sets import LabelledSet, open_set
from adatape.data.shards import write_shards
from adatape.data_config import Augment, Images, Parity, UntrustedImages
from adatape.serve.served import _test_images

CPU = torch.device("cpu")
KINDS = ("digits", "arrays", "grey", "folder", "shards", "compressed", "parity")
SPLITS = ("validation", "test")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, draws = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 23)):
        colour = draws.integers(0, 256, (count, 9, 9, 3), np.uint8)
        images = Pixels(["a", "b", "c"], np.arange(count) % 3, colour)
        write_shards(images, place / "shards", per_shard=9, prefix=split)
        for name, stored in (("arrays", colour), ("grey", colour[..., 0])):
            (place / name).mkdir(exist_ok=True)
            np.save(place / name / f"{split}_images.npy", stored)
            np.save(place / name / f"{split}_labels.npy", images.labels)
        for i in range(count):
            file = place / "folder" / split / "abc"[i % 3] / f"{i:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(colour[i]).save(file)
    (place / "compressed").mkdir()
    for tar in (place / "shards").glob("*.tar"):
        (place / "compressed" / f"{tar.name}.gz").write_bytes(gzip.compress(tar.read_bytes()))
    return place


def config_of(kind: str, place: Path, **given: Any) -> Images | Parity:
    if kind == "parity":
        return Parity(length=6, held_out=23)
    if kind in ("shards", "compressed"):
        return Images("shards", f"{place}/{kind}/{{split}}-*.tar*", 8, classes=3, **given)
    source: Any = {"grey": "arrays"}.get(kind, kind)
    return Images(source, None if kind == "digits" else str(place / kind), 8, **given)


def joined(parts: list[list[Labelled]]) -> Labelled:
    return Labelled(*map(torch.cat, zip(*itertools.chain(*parts), strict=True)))


def equal(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_what_it_says(kind: str, split: Any, place: Path) -> None:
    found = open_set(config_of(kind, place, validate_on=None if kind == "digits" else 0.2), split)
    x, label = joined([list(found.evaluation_batches(7, Shard(), CPU))])
    assert (len(x), len(label)) == (found.samples, found.samples)
    assert (x.shape[1:], found.split) == (found.shape, "test" if kind == "digits" else split)
    assert label.unique().tolist() == list(range(found.classes))
    assert len(found.names) == found.classes
    if found.images is not None:
        assert found.images.labels.tolist() == label.tolist()


@pytest.mark.parametrize("chunks_of", [even_chunks, fixed_chunks])
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_scored_alike_by_one_process_and_by_several(kind: str, chunks_of: Any, place: Path) -> None:
    def scored(rank: int, world: int) -> list[Labelled]:
        return list(
            open_set(config_of(kind, place), "test").evaluation_batches(4, Shard(rank, world), CPU, chunks_of=chunks_of)
        )

    alone = scored(0, 1)
    for world in (2, 3):
        parts = [scored(rank, world) for rank in range(world)]
        assert equal(joined(parts), joined([alone]))
        if chunks_of is fixed_chunks:
            assert [len(each.x) for each in itertools.chain(*parts)] == [len(each.x) for each in alone]


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_learnt_alike_by_one_process_and_by_several_from_any_step(kind: str, place: Path) -> None:
    varied = {} if kind == "parity" else {"augment": Augment(crop="pad", pad=1, flip=True, mixup=0.5)}
    train = open_set(config_of(kind, place, **varied), "train")

    def batches(world: int, first: int) -> list[Batch]:
        loaders = [train.training_loader(12, 5, Shard(rank, world), CPU) for rank in range(world)]
        rows = zip(*(itertools.islice(each.batches(first), 5 - first) for each in loaders), strict=True)
        return [Batch(*map(torch.cat, zip(*row, strict=True))) for row in rows]

    whole = batches(1, 0)
    assert whole[0].x.shape == (12, *train.shape)
    for world, first in ((2, 0), (1, 3), (2, 2)):
        assert all(itertools.starmap(equal, zip(batches(world, first), whole[first:], strict=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_of_a_set_are_so_many_of_all_classes(kind: str, place: Path) -> None:
    whole = open_set(config_of(kind, place), "test")
    for count in (12, 5000):
        few = whole.evenly_spaced(count)
        x, label = joined([list(few.evaluation_batches(5, Shard(), CPU))])
        assert len(x) == few.samples == min(count, whole.samples or 0)
        assert len(label.unique()) > 1
        assert (few.shape, few.names) == (whole.shape, whole.names)


def test_tars_are_scored_alike_by_number_and_as_a_stream(place: Path, tmp_path: Path) -> None:
    """An unreadable image, here the last, is replaced by the same one."""
    content = (place / "shards" / "test-000002.tar").read_bytes()
    start = content.rindex(b"\x89PNG")
    damaged = content[:start] + b"\0" * 8 + content[start + 8 :]
    (tmp_path / "test-0.tar").write_bytes(damaged)
    (tmp_path / "test-0.tar.gz").write_bytes(gzip.compress(damaged))
    first, second = (
        open_set(Images("shards", f"{tmp_path}/{{split}}-0.tar{end}", 8, classes=3, broken=1.0), "test")
        for end in ("", ".gz")
    )
    assert (first.images is None, second.images is None) == (False, True)
    assert equal(
        joined([list(first.evaluation_batches(3, Shard(), CPU))]),
        joined([list(second.evaluation_batches(3, Shard(), CPU))]),
    )


def test_shards_are_described_by_their_config_alone_and_missed_when_they_are_needed() -> None:
    found = open_set(Images("shards", "/nowhere/{split}.tar", 8, classes=3), "test")
    assert (found.shape, found.names, found.of_images) == ((3, 8, 8), ["0", "1", "2"], True)
    with pytest.raises(FileNotFoundError, match=r"1 of 1 shards do not exist; first /nowhere/test\.tar"):
        found.check_exists()


def test_a_config_from_a_file_opens_no_tar_elsewhere() -> None:
    found = open_set(UntrustedImages("shards", "http://127.0.0.1:1/{split}.tar", 8, classes=3), "test")
    for use in (
        found.check_exists,
        lambda: found.images,
        lambda: found.samples,
        lambda: found.evaluation_batches(1, Shard(), CPU),
    ):
        with pytest.raises(ValueError, match="a file may name local shards only"):
            use()


def test_a_server_shows_images_of_tars_on_this_disk(place: Path) -> None:
    images, missing = _test_images(config_of("shards", place))  # type: ignore[arg-type]
    assert images is not None
    assert (len(images), missing, images.read(4).size) == (23, "", (9, 9))
    images, missing = _test_images(config_of("compressed", place))  # type: ignore[arg-type]
    assert (images, missing) == (None, "the data set lies in shards that are read one after the other")


def test_a_tar_that_is_gone_after_it_was_indexed_is_named(place: Path, tmp_path: Path) -> None:
    tar = tmp_path / "test.tar"
    tar.write_bytes((place / "shards" / "test-000002.tar").read_bytes())
    images = open_set(Images("shards", f"{tmp_path}/{{split}}.tar", 8, classes=3), "test").images
    assert images is not None
    tar.unlink()
    with pytest.raises(BrokenImage, match=r"test\.tar/.*\.png: No such file"):
        images.load(0)


def test_sparse_files_in_tars_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "0.png").open("wb") as file:
        file.truncate(1 << 20)
    (tmp_path / "0.cls").write_text("0")
    subprocess.run(["tar", "--sparse", "-cf", "test.tar", "0.png", "0.cls"], cwd=tmp_path, check=True)
    found = open_set(Images("shards", f"{tmp_path}/{{split}}.tar", 8, classes=1), "test")
    with pytest.raises(OSError, match=r"test\.tar could not be read: .*0\.png is stored as a sparse file"):
        next(found.evaluation_batches(1, Shard(), CPU))


def test_training_sequences_are_fresh_and_cannot_be_scored() -> None:
    found: LabelledSet = open_set(Parity(length=6), "train")
    with pytest.raises(ValueError, match="split is train; parity has fresh sequences at every step"):
        found.evaluation_batches(4, Shard(), CPU)
