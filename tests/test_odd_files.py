"""Files that are not images, EXIF orientation, and killed workers: reported, counted, without blocking."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageOps
from small_runs import Forks, children_of, command, logged, newest_step, tiny, wait_until, write_folder
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from adatape.config import from_dict, to_dict
from adatape.data.batch import Shard
from adatape.data.class_folders import MOST_LINKS, files_below
from adatape.data.decode import MOST_BYTES, BrokenImage, decode
from adatape.data.images import open_images
from adatape.data.imageset import Files, ImageSet, read_or_next
from adatape.data.loaders import from_workers, labelled_images
from adatape.data.sets import open_set
from adatape.data.shards import open_shards
from adatape.data.streams import ShardStream
from adatape.data.workers import WorkerDied
from adatape.data_config import Images
from adatape.recipes import RECIPES
from adatape.serve.pictures import open_upload, picture
from adatape.serve.served import PACKAGED, load_served
from adatape.train.fewshot import data_named
from adatape.train.folder import load_config
from adatape.train.run import run

CPU = torch.device("cpu")
SECONDS = 20  # after which a test that waits for a pipe has failed


@pytest.fixture(autouse=True)
def _never_waits() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"still waiting after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS * 3)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def bound_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket has little room
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "not a regular file"),
    "device that never ends": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "terminal": (lambda path: path.symlink_to("/dev/tty"), "not a regular file"),
    "socket": (bound_socket, "not a regular file"),
    "terabyte of nothing": (sparse, f"1,099,511,627,776 bytes; at most {MOST_BYTES:,} are read"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "link to itself": (lambda path: path.symlink_to(path.name), "symbolic links"),
}


def folder_of(path: Path, **options: Any) -> Images:
    return Images("folder", str(path), 16, **options)


@pytest.mark.parametrize("kind", ODD)
def test_a_file_that_is_not_regular_is_named_and_replaced_by_the_next(tmp_path: Path, kind: str) -> None:
    make, reason = ODD[kind]
    odd = write_folder(tmp_path, 8) / "train/even/000.png"
    odd.unlink()
    make(odd)
    images = open_images(folder_of(tmp_path), "train")
    assert len(images) == 8
    read = read_or_next(images, 0)
    assert len(read.broken) == 1
    assert read.broken[0].startswith(f"{odd}: ")
    assert reason in read.broken[0]
    if kind != "link to nothing":
        open_images(folder_of(tmp_path, modes="refuse"), "train")


def test_a_run_counts_a_pipe_among_its_images_and_goes_on(tmp_path: Path) -> None:
    folder, out = write_folder(tmp_path / "images", 60), tmp_path / "run"
    (folder / "train/even/000.png").unlink()
    os.mkfifo(folder / "train/even/000.png")
    experiment = tiny(
        "plainvit", 5, data__source="folder", data__path=str(folder), data__size=16, data__validate_on=None
    )
    assert run(experiment, out, "cpu", lambda _: None)["broken_images"] == 1


def test_a_folder_with_the_name_of_an_image_is_a_folder(tmp_path: Path) -> None:
    inner = write_folder(tmp_path, 4) / "train/even/x.png"
    inner.mkdir()
    shutil.copy(tmp_path / "train/even/000.png", inner / "y.png")
    images = open_images(folder_of(tmp_path), "train")
    assert isinstance(images, Files)
    assert str(inner / "y.png") in [images.path(i) for i in range(len(images))]


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("train/even/up", "."),
        ("train/even/up", ".."),
        ("train/even/up", "../.."),
        ("train/self", "."),
        ("train/self", ".."),
    ],
)
def test_a_link_to_a_folder_that_holds_it_is_refused_by_name(tmp_path: Path, link: str, target: str) -> None:
    write_folder(tmp_path, 4)
    (tmp_path / "val/self").mkdir()
    (tmp_path / "train/self").mkdir()
    if link == "train/self":
        (tmp_path / "train/self").rmdir()
    (tmp_path / link).symlink_to(target, target_is_directory=True)
    with pytest.raises(ValueError, match=f"{tmp_path / link} links to .*, a folder that contains it"):
        open_images(folder_of(tmp_path), "train")


def test_a_circle_of_links_out_of_the_set_is_refused(tmp_path: Path) -> None:
    folder, pool = write_folder(tmp_path / "set", 4), tmp_path / "pool"
    pool.mkdir()
    (folder / "train/even/pool").symlink_to(pool)
    (pool / "again").symlink_to(pool)
    with pytest.raises(ValueError, match="a folder that contains it"):
        open_images(folder_of(folder), "train")


def test_links_that_multiply_are_refused(tmp_path: Path) -> None:
    for n in range(24):
        (tmp_path / str(n)).mkdir()
        for name in ("a", "b") if n < 23 else ():
            (tmp_path / str(n) / name).symlink_to(tmp_path / str(n + 1))
    with pytest.raises(ValueError, match=f"more than {MOST_LINKS:,} links to folders"):
        files_below(tmp_path / "0")


def test_links_out_of_the_set_are_data(tmp_path: Path) -> None:
    folder, pool = write_folder(tmp_path / "set", 4), write_folder(tmp_path / "pool", 6)
    (folder / "train/even/more").symlink_to(pool / "train/even")
    (folder / "train/odd/one.png").symlink_to(pool / "train/odd/001.png")
    images = open_images(folder_of(folder), "train")
    assert np.bincount(images.labels).tolist() == [2 + 3, 2 + 1]


def test_files_come_in_the_order_of_torchvision(tmp_path: Path) -> None:
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    for name in (
        "even/b/0.png",
        "even/b.c/0.PNG",
        "even/a.jpeg",
        "even/z.txt",
        "even/B/10.png",
        "odd/x.tif",
        "even/9.png",
    ):
        for split in ("train", "val"):
            (tmp_path / split / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / split / name).touch()
    images = open_images(folder_of(tmp_path), "train")
    wanted = make_dataset(tmp_path / "train", {"even": 0, "odd": 1}, IMG_EXTENSIONS)
    assert isinstance(images, Files)
    assert [(images.path(i), int(images.labels[i])) for i in range(len(images))] == wanted


@pytest.mark.parametrize("name", ["train_images.npy", "train_labels.npy"])
def test_a_pipe_among_arrays_is_named(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "train_images.npy", np.zeros((4, 2, 2, 3), np.uint8))
    np.save(tmp_path / "train_labels.npy", np.arange(4) % 2)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=name):
        open_images(Images("arrays", str(tmp_path)), "train")


def test_an_array_that_claims_more_than_it_has_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "train_images.npy", np.zeros((4, 2, 2, 3), np.uint8))
    header = {"descr": "<i8", "fortran_order": False, "shape": (1 << 45,)}
    with (tmp_path / "train_labels.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match=r"train_labels\.npy is not a NumPy array file"):
        open_images(Images("arrays", str(tmp_path)), "train")


def test_a_shard_whose_file_claims_a_terabyte_is_refused(tmp_path: Path) -> None:
    """A sparse member is small in the tar but has its full size when read."""
    with (tmp_path / "0.jpg").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "0.cls").write_text("0")
    for name in ("train.tar", "test.tar"):
        subprocess.run(["tar", "--sparse", "-cf", name, "0.jpg", "0.cls"], cwd=tmp_path, check=True)
    assert (tmp_path / "train.tar").stat().st_size < 100_000
    data = Images("shards", f"{tmp_path}/{{split}}.tar", 8, classes=2)
    stream = ShardStream(open_shards(data, "train"), 0, 1, 0)
    with pytest.raises(OSError, match=r"train\.tar could not be read: .*0\.jpg has 1,099,511,627,776 bytes"):
        next(stream.samples())


def test_a_picture_that_would_start_another_program_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "EPS")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("it starts Ghostscript"))
    with pytest.raises(BrokenImage, match="not an image that Pillow can identify"):
        decode(content.getvalue(), "x.png")


def pattern() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 16, 3), np.uint8))


def turned(orientation: int, kind: str = "PNG") -> bytes:
    exif, content = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    pattern().save(content, kind, exif=exif)
    return content.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_says(orientation: int, kind: str) -> None:
    content = turned(orientation, kind)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    assert np.array_equal(decode(content, "x", exif_orientation=True).image, upright)
    if kind != "TIFF":  # which Pillow turns by itself
        assert np.array_equal(decode(content, "x").image, Image.open(io.BytesIO(content)).convert("RGB"))


BAD_EXIF = [b"", b"MM\0*\0\0\0\x08\xff\xff", b"nonsense", b"II*\0\x08\0\0\0\x01\0\x12\x01"]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", BAD_EXIF)
def test_damaged_exif_costs_no_image(exif: bytes) -> None:
    content = io.BytesIO()
    pattern().save(content, "JPEG", exif=b"Exif\0\0" + exif)
    found = decode(content.getvalue(), "x", exif_orientation=True).image
    assert np.array_equal(found, Image.open(io.BytesIO(content.getvalue())).convert("RGB"))


def test_new_runs_turn_images_and_an_old_config_means_that_they_were_not() -> None:
    paths = {"path": "somewhere"}
    for name, recipe in RECIPES.items():
        takes = recipe.__code__.co_varnames[: recipe.__code__.co_argcount]
        data = recipe(**{key: value for key, value in paths.items() if key in takes}).data
        assert not isinstance(data, Images) or data.exif_orientation, name
    old = {key: value for key, value in to_dict(Images()).items() if key != "exif_orientation"}
    assert not from_dict(Images, old).exif_orientation
    assert not load_config(PACKAGED["digits"] / "config.json").data.exif_orientation  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def sideways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of images with EXIF rotation, as folders and as shards."""
    folder = tmp_path_factory.mktemp("sideways")
    for split in ("train", "test"):
        with tarfile.open(folder / f"{split}-0.tar", "w") as tar:
            for label, name in enumerate(("ant", "bee")):
                path = folder / split / name / f"{label}.png"
                path.parent.mkdir(parents=True)
                path.write_bytes(turned(6))
                for suffix, content in (("png", turned(6)), ("cls", str(label).encode())):
                    file = tarfile.TarInfo(f"{label}.{suffix}")
                    file.size = len(content)
                    tar.addfile(file, io.BytesIO(content))
    return folder


def scored(data: Images) -> torch.Tensor:
    return torch.cat([x for x, _ in open_set(data, "test").evaluation_batches(8, Shard(), CPU)])


@pytest.mark.parametrize("exif_orientation", [False, True])
def test_training_scoring_few_shot_and_uploads_see_the_same_image(sideways: Path, exif_orientation: bool) -> None:
    data = Images("folder", str(sideways), 16, exif_orientation=exif_orientation)
    shards = Images("shards", f"{sideways}/{{split}}-0.tar", 16, classes=2, exif_orientation=exif_orientation)
    upload = picture(open_upload(turned(6), "x.png"), "x.png", 3, 16, exif_orientation)
    assert (upload.width, upload.height) == ((24, 16) if exif_orientation else (16, 24))
    wanted = upload.pixels.float() / 127.5 - 1
    assert torch.allclose(scored(data)[0], wanted, atol=1e-6)
    assert torch.allclose(scored(shards)[0], wanted, atol=1e-6)
    few = data_named(str(sideways), 16, exif_orientation)
    assert torch.equal(scored(few), scored(data))
    assert open_images(data, "train").read(0).size == (upload.width, upload.height)
    assert next(
        ShardStream(open_shards(shards, "train"), 0, 1, 0, exif_orientation=exif_orientation).samples()
    ).image.size == (
        upload.width,
        upload.height,
    )
    kept = open_images(data, "train").subset(np.array([1]))
    assert kept.read(0).size == (upload.width, upload.height)


def test_a_server_turns_uploads_as_its_run_did() -> None:
    served = load_served(PACKAGED["digits"])
    assert not served.exif_orientation
    data = served.experiment.data
    assert isinstance(data, Images)
    turning = served.experiment.__class__(**{**vars(served.experiment), "data": Images(exif_orientation=True)})
    assert served._replace(experiment=turning).exif_orientation


def test_a_killed_worker_is_one_line_and_the_run_goes_on_later(forks: Forks, tmp_path: Path) -> None:
    folder, out = write_folder(tmp_path / "images", 40), tmp_path / "run"
    images = {"data__source": "folder", "data__path": str(folder), "data__size": 16, "engine__workers": 2}
    child = forks.start(command(out, 4000, **images))
    wait_until(lambda: newest_step(out) >= 3)
    worker = children_of(child.pid)[0]
    os.kill(worker, signal.SIGKILL)
    assert child.wait() == 2
    assert len(child.errors) == 1
    how = rf"(data worker {worker} was killed by SIGKILL|a data worker has died); usually the machine .*"
    assert re.fullmatch(rf"adatape: {how}; `adatape train {out}` resumes from the newest checkpoint", child.errors[0])
    reached = newest_step(out)
    again = forks.start(["train", str(out), "--device", "cpu"])
    wait_until(lambda: logged(out) > reached + 3)
    again.kill(signal.SIGTERM)
    assert again.wait() == 143


class Ending(ImageSet):
    """A set whose first image ends the worker that reads it."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__(["0"], np.zeros(4, np.int64))
        self.end = end

    def load(self, i: int) -> Any:  # noqa: ARG002
        self.end()

    def subset(self, rows: Any) -> Any:  # noqa: ARG002
        return self


ENDS: dict[str, Callable[[], None]] = {
    "was killed by SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exited with code 3": lambda: os._exit(3),
}


@pytest.mark.parametrize("said", ENDS)
def test_a_worker_that_dies_while_scoring_says_how(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))  # seconds until it looks
    with pytest.raises(WorkerDied, match=rf"data worker \d+ {said}; .* lower engine\.workers"):
        list(labelled_images(Ending(ENDS[said]), 8, [range(4)], CPU, workers=1))


def test_a_dead_worker_interrupts_nothing_but_the_wait_for_data() -> None:
    """torch's handler would raise anywhere in the main thread, even within a checkpoint."""
    before = signal.getsignal(signal.SIGCHLD)
    items = from_workers(torch.utils.data.TensorDataset(torch.arange(8)), 1, CPU, [[n] for n in range(8)])
    next(items)
    assert signal.getsignal(signal.SIGCHLD) == before
    items.close()
