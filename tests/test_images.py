"""Labelled image sets: contents, errors, and replacement of unreadable images."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adatape.data import images as images_module
from adatape.data.decode import BrokenImage, decode
from adatape.data.images import open_images, stratified
from adatape.data.imageset import Pixels, Tally, read_or_next
from adatape.data_config import Images

MODES = ("1", "L", "P", "LA", "RGBA", "CMYK", "RGB")


def encoded(mode: str, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (6, 6), (200, 30, 90)).convert(mode).save(content, kind)
    return content.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def half(kind: str) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(content, kind)
    return content.getvalue()[: content.tell() // 2]


def wide_png() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(content, "PNG")
    return content.getvalue()


BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the file is empty"),
    "text": (lambda: b"no image at all", "not an image"),
    "half a jpeg": (lambda: half("JPEG"), "truncated"),
    "half a png": (lambda: half("PNG"), "truncated"),
    "bomb": (lambda: png_claiming(60_000, 60_000), "3600000000 pixels"),
    "half a bomb": (lambda: png_claiming(10_000, 10_000), "10000 × 10000 pixels"),
    "16 bits": (wide_png, "mode I;16"),
}


def class_folders(root: Path, per_class: int = 4, parts: tuple[str, ...] = ("train", "test")) -> Path:
    for part in parts:
        for label, name in enumerate(("ant", "bee")):
            (root / part / name).mkdir(parents=True)
            for i in range(per_class):
                value = (label * 100 + i, i, 0)
                Image.new("RGB", (8, 6), value).save(root / part / name / f"{i:03d}.png")
    return root


def arrays(root: Path, n: int = 12, shape: tuple[int, ...] = (4, 4, 3), classes: int = 3) -> Path:
    for part in ("train", "test"):
        np.save(root / f"{part}_images.npy", np.random.default_rng(0).integers(0, 256, (n, *shape), np.uint8))
        np.save(root / f"{part}_labels.npy", np.arange(n) % classes)
    return root


def folder(path: Path, **options: object) -> Images:
    return Images(source="folder", path=str(path), **options)  # type: ignore[arg-type]


def test_digits_are_cut_once_into_1437_and_360_with_each_class_in_its_share() -> None:
    train, test = (open_images(Images(), split) for split in ("train", "test"))
    assert (len(train), len(test), train.classes, train.channels) == (1437, 360, 10, 1)
    whole = np.bincount(train.labels) + np.bincount(test.labels)
    assert np.all(np.abs(np.bincount(test.labels) - whole * 360 / 1797) < 1)
    assert train.pixels is not None
    assert train.pixels.shape == (1437, 8, 8, 1)
    assert (train.pixels.dtype, train.pixels.min(), train.pixels.max()) == (np.uint8, 0, 255)
    assert np.array_equal(train.labels[:10], open_images(Images(), "train").labels[:10])
    assert np.array_equal(train.labels[:10], [0, 1, 2, 3, 4, 5, 6, 9, 1, 2]), "the cut is part of every result"


def test_an_image_read_by_number_is_its_row_of_pixels() -> None:
    for split in ("train", "validation"):
        digits = open_images(Images(validate_on=0.1), split)
        assert digits.pixels is not None
        assert np.array_equal(np.asarray(digits.read(17)), digits.pixels[17, ..., 0])
        assert digits.read(17).mode == "L"


def test_validation_is_test_unless_a_share_is_cut_from_train(tmp_path: Path) -> None:
    class_folders(tmp_path, per_class=10)
    assert len(open_images(folder(tmp_path), "train")) == 20
    assert open_images(folder(tmp_path), "validation").path(0).startswith(str(tmp_path / "test"))  # type: ignore[attr-defined]
    parts = [open_images(folder(tmp_path, validate_on=0.3), split) for split in ("train", "validation")]
    assert [np.bincount(part.labels).tolist() for part in parts] == [[7, 7], [3, 3]]
    paths = [{part.path(i) for i in range(len(part))} for part in parts]  # type: ignore[attr-defined]
    assert not paths[0] & paths[1]
    assert len(open_images(folder(tmp_path, validate_on=0.3), "test")) == 20


@pytest.mark.parametrize("share", [0.0, 1.0, -0.2, 0.01])
def test_a_share_that_empties_a_part_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match=f"validate_on is {share} of 8 images"):
        open_images(folder(class_folders(tmp_path), validate_on=share), "train")


def test_a_stratified_draw_has_the_count_asked_for_and_no_class_off_by_one() -> None:
    labels = np.random.default_rng(0).integers(0, 7, 1000) ** 2 // 6
    for count in (1, 13, 500, 999):
        drawn = stratified(labels, count, 5)
        assert drawn.sum() == count
        assert np.all(np.abs(np.bincount(labels[drawn], minlength=7) - np.bincount(labels) * count / 1000) < 1)
    assert not np.array_equal(stratified(labels, 500, 5), stratified(labels, 500, 6))


def test_a_folder_gives_classes_by_name_and_rgb_images(tmp_path: Path) -> None:
    images = open_images(folder(class_folders(tmp_path, parts=("train", "val"))), "test")
    assert (images.names, images.labels.tolist(), images.pixels) == (["ant", "bee"], [0] * 4 + [1] * 4, None)
    assert images.read(6).getpixel((0, 0)) == (102, 2, 0)
    assert images.read(6).size == (8, 6)


def test_arrays_are_mapped_and_read_alike_with_and_without_a_channel(tmp_path: Path) -> None:
    images = open_images(Images(source="arrays", path=str(arrays(tmp_path))), "train")
    assert isinstance(images.pixels, np.memmap)
    assert (len(images), images.classes, images.channels, images.read(5).mode) == (12, 3, 3, "RGB")
    (tmp_path / "grey").mkdir()
    grey = open_images(Images(source="arrays", path=str(arrays(tmp_path / "grey", shape=(4, 4)))), "test")
    assert grey.pixels is not None
    assert (grey.channels, grey.pixels.shape, grey.read(5).mode) == (1, (12, 4, 4, 1), "L")


def test_a_named_set_reads_arrays_that_lie_in_its_folder(tmp_path: Path) -> None:
    images = open_images(Images(source="cifar100", path=str(arrays(tmp_path))), "test")
    assert (images.classes, len(images)) == (100, 12)


def test_cifar_comes_from_torchvision_and_its_absence_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import CIFAR10

    with pytest.raises(ValueError, match="does not contain cifar10: Dataset not found"):
        open_images(Images(source="cifar10", path=str(tmp_path)), "train")
    batches = tmp_path / CIFAR10.base_folder
    batches.mkdir()
    data = np.arange(4 * 3072, dtype=np.uint32).astype(np.uint8).reshape(4, 3072)
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        (batches / name).write_bytes(pickle.dumps({"data": data, "labels": [0, 9, 3, 1]}))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {i}" for i in range(10)]}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    test = open_images(Images(source="cifar10", path=str(tmp_path)), "test")
    assert (test.labels.tolist(), test.names[9], len(open_images(Images("cifar10", str(tmp_path)), "train"))) == (
        [0, 9, 3, 1],
        "class 9",
        20,
    )
    assert test.read(1).getpixel((2, 0)) == tuple(data[1].reshape(3, 32, 32)[:, 0, 2])


@pytest.mark.parametrize("place", [".", "FashionMNIST/raw"])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_fashion_reads_idx_files_packed_or_not_in_either_place(tmp_path: Path, place: str, end: str) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    data = np.arange(5 * 6 * 7, dtype=np.uint8).reshape(5, 6, 7)
    pack = gzip.compress if end else bytes
    for name, array in (("images-idx3", data), ("labels-idx1", np.array([1, 9, 0, 4, 2], np.uint8))):
        header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
        (tmp_path / place / f"t10k-{name}-ubyte{end}").write_bytes(pack(header + array.tobytes()))
    fashion = open_images(Images(source="fashion", path=str(tmp_path)), "test")
    assert (fashion.labels.tolist(), fashion.names[1], fashion.channels) == ([1, 9, 0, 4, 2], "Trouser", 1)
    assert np.array_equal(np.asarray(fashion.read(3)), data[3])
    with pytest.raises(FileNotFoundError, match=r"contains neither train-images-idx3-ubyte.gz nor FashionMNIST/raw"):
        open_images(Images(source="fashion", path=str(tmp_path)), "train")


def test_pets_train_on_trainval(tmp_path: Path) -> None:
    notes, pictures = (tmp_path / "oxford-iiit-pet" / name for name in ("annotations", "images"))
    notes.mkdir(parents=True)
    pictures.mkdir()
    for part, cats in (("trainval", ("Abyssinian_1", "beagle_2", "beagle_3")), ("test", ("Abyssinian_7", "beagle_9"))):
        (notes / f"{part}.txt").write_text("".join(f"{cat} {1 + (cat > 'b')} 1 1\n" for cat in cats))
        for cat in cats:
            (pictures / f"{cat}.jpg").write_bytes(encoded("RGB", "JPEG"))
    pets = open_images(Images(source="pets", path=str(tmp_path)), "train")
    assert (pets.names, pets.labels.tolist(), pets.read(2).size) == (["Abyssinian", "Beagle"], [0, 1, 1], (6, 6))
    assert len(open_images(Images(source="pets", path=str(tmp_path)), "test")) == 2


def test_imagenet_has_the_names_of_its_list_or_else_of_its_folders(tmp_path: Path) -> None:
    class_folders(tmp_path, parts=("train", "val"))
    assert open_images(Images(source="imagenet", path=str(tmp_path)), "test").names == ["ant", "bee"]
    torch.save(({"ant": ("emmet", "pismire"), "bee": ("bumblebee",)}, []), tmp_path / "meta.bin")
    listed = open_images(Images(source="imagenet", path=str(tmp_path)), "test")
    assert (listed.names, len(listed)) == (["emmet", "bumblebee"], 8)


@pytest.mark.parametrize("mode", MODES)
def test_every_eight_bit_mode_becomes_rgb_and_is_counted(mode: str) -> None:
    image, converted = decode(encoded(mode, "JPEG" if mode == "CMYK" else "PNG"), "x")
    assert (image.mode, converted) == ("RGB", mode != "RGB")
    if mode in ("RGB", "RGBA"):
        assert image.getpixel((3, 3)) == (200, 30, 90)


def test_a_palette_with_transparency_is_converted_without_a_warning() -> None:
    content = io.BytesIO()
    image = Image.new("RGB", (6, 6), (200, 30, 90)).convert("P")
    image.save(content, "PNG", transparency=bytes([255, 10, 200]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(content.getvalue(), "x").image.mode == "RGB"


def test_refused_modes_name_file_and_mode_when_the_set_is_opened(tmp_path: Path) -> None:
    path = class_folders(tmp_path) / "train" / "bee" / "grey.png"
    path.write_bytes(encoded("L"))
    (tmp_path / "train" / "ant" / "empty.png").touch()
    assert len(open_images(folder(tmp_path), "train")) == 10
    with pytest.raises(ValueError, match=r"bee/grey.png has mode L; with modes=refuse"):
        open_images(folder(tmp_path, modes="refuse"), "train")
    path.unlink()
    assert len(open_images(folder(tmp_path, modes="refuse"), "train")) == 9, "a broken image is not a refused one"


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_every_kind_of_unreadable_image_names_itself_and_the_reason(tmp_path: Path, kind: str) -> None:
    content, reason = BROKEN[kind]
    path = class_folders(tmp_path) / "train" / "ant" / "bad.png"
    path.write_bytes(content())
    images = open_images(folder(tmp_path), "train")
    with pytest.raises(BrokenImage, match=reason) as caught:
        images.read(4)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_vanishes_is_a_broken_image(tmp_path: Path) -> None:
    images = open_images(folder(class_folders(tmp_path)), "train")
    (tmp_path / "train" / "ant" / "002.png").unlink()
    with pytest.raises(BrokenImage, match=r"002.png: No such file"):
        images.read(2)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_run_through_a_set_with_one_percent_broken_images_completes(tmp_path: Path) -> None:
    (tmp_path / "train" / "ant").mkdir(parents=True)
    kinds = dict(zip(range(50, 700, 100), BROKEN.values(), strict=True))
    for i in range(700):
        content = kinds[i][0]() if i in kinds else encoded("RGB", "JPEG" if i % 2 else "PNG")
        (tmp_path / "train" / "ant" / f"{i:03d}.{'jpg' if i % 2 else 'png'}").write_bytes(content)
    images = open_images(folder(tmp_path), "train")
    tally = Tally(len(images), 0.02)
    for _ in range(2):
        for i in range(0, 700, 20):
            reads = [read_or_next(images, k) for k in range(i, i + 20)]
            tally.add(len(reads), [note for read in reads for note in read.broken])
    assert [Path(note.split(":")[0]).stem for note in tally.first] == [f"{i:03d}" for i in kinds]
    assert all(reason in note for note, (_, reason) in zip(tally.first, kinds.values(), strict=True))
    assert (tally.reads, len(tally.broken)) == (1400, 7)


def test_a_broken_image_is_replaced_by_the_next_and_the_last_by_the_first(tmp_path: Path) -> None:
    class_folders(tmp_path)
    for name in ("ant/002", "ant/003", "bee/003"):
        (tmp_path / "train" / f"{name}.png").write_bytes(b"")
    images = open_images(folder(tmp_path), "train")
    read = read_or_next(images, 2)
    assert (read.label, read.image.getpixel((0, 0)), len(read.broken)) == (1, (100, 0, 0), 2)
    last = read_or_next(images, 7)
    assert (last.label, last.image.getpixel((0, 0)), len(last.broken)) == (0, (0, 0, 0), 1)
    assert read_or_next(images, 0).broken == ()


def test_a_set_without_a_readable_image_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    class_folders(tmp_path)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"8 images in a row could not be read: first .*the file is empty"):
        read_or_next(open_images(folder(tmp_path), "train"), 3)


def test_too_many_broken_images_stop_a_run_with_their_share() -> None:
    tally = Tally(100_000, 0.02)
    tally.add(963, [])
    with pytest.raises(
        ValueError, match=r"37 of 1,000 images could not be read, 3.7 %; broken allows 2.0 %: first 0: x"
    ):
        tally.add(37, [f"{i}: x" for i in range(37)])
    assert len(tally.first) == 20


def test_the_same_broken_image_counts_once_and_a_run_of_bad_luck_stops_nothing() -> None:
    tally = Tally(10_000, 0.02)
    for _ in range(50):
        tally.add(100, [f"{i}: x" for i in range(5)])
    Tally(1000, 0.02).add(100, ["1: x", "2: x", "3: x"])
    Tally(30, 0.02).add(300, ["the only one: x"])


def test_a_whole_set_is_held_to_its_share_exactly() -> None:
    tally = Tally(1000, 0.02)
    tally.add(50, [f"{i}: x" for i in range(20)])
    with pytest.raises(ValueError, match="21 of 51 images"):
        tally.add(1, ["20: x"])
    with pytest.raises(ValueError, match=r"broken allows 0.0 %"):
        Tally(1000, 0.0).add(1, ["1: x"])
    with pytest.raises(ValueError, match=r"broken is 2.0; it must be a fraction"):
        Tally(1000, 2.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Images(source="cifar10"), "path is None; source cifar10 needs a folder"),
        (Images(source="folder", path="/nowhere"), "path /nowhere is not a folder"),
        (Images(source="folder", path="/nowhere", download=True), "path /nowhere is not a folder"),
        (Images(source="imagenette"), "source is 'imagenette'; sets with random access are digits"),  # type: ignore[arg-type]
        (Images(source="shards"), "source is 'shards'"),
        (Images(classes=7), "classes is 7; digits has 10"),
    ],
)
def test_settings_that_lead_nowhere_say_so(config: Images, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        open_images(config, "train")


def test_an_unknown_split_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="split is 'val'; it must be train, validation or test"):
        open_images(Images(), "val")  # type: ignore[arg-type]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> None:
        raise ModuleNotFoundError

    monkeypatch.setattr(images_module.importlib, "import_module", absent)
    with pytest.raises(
        ValueError, match=r"source digits needs scikit-learn: .* `pip install 'adatape\[train\]'` installs"
    ):
        open_images(Images(), "train")


def no_train(root: Path) -> None:
    (root / "ant").mkdir()


def no_test(root: Path) -> None:
    class_folders(root, parts=("train",))


def no_classes(root: Path) -> None:
    (root / "train").mkdir()
    (root / "test").mkdir()
    Image.new("RGB", (2, 2)).save(root / "train" / "1.png")


def an_empty_class(root: Path) -> None:
    class_folders(root)
    for part in ("train", "test"):
        (root / part / "cow").mkdir()
        (root / part / "cow" / "readme.txt").write_text("none yet")


def another_class(root: Path) -> None:
    class_folders(root)
    (root / "test" / "cow").mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_train, "must contain train/CLASS/IMAGE and test or val/CLASS/IMAGE"),
        (no_test, "must contain train/CLASS/IMAGE and test or val/CLASS/IMAGE"),
        (no_classes, "train contains no class folders"),
        (an_empty_class, "class folder .*cow contains no image"),
        (another_class, "class cow is in only one of .*train and .*test"),
    ],
)
def test_each_bad_folder_is_named_in_one_line(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(tmp_path)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        open_images(folder(tmp_path), "test")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train_labels", np.arange(11) % 3, "images has 12 images and .*labels 11 labels"),
        ("train_labels", np.zeros(12), "has type float64"),
        ("train_labels", np.zeros((12, 3), int), r"shape \(12, 3\); it must be N whole numbers"),
        ("train_labels", np.arange(12) % 3 - 1, "has label -1; with 2 classes it must be 0 to 1"),
        ("train_labels", np.arange(12) % 3 + 1, "goes up to 3 but has no label 0; set classes"),
        ("test_labels", np.arange(12) % 4, "test_labels.npy has label 3; with 3 classes it must be 0 to 2"),
        ("train_images", np.zeros((12, 4, 4, 3), np.float32), "has type float32; it must be uint8"),
        ("train_images", np.zeros((12, 4, 4, 4), np.uint8), r"has shape \(12, 4, 4, 4\); it must be"),
        ("train_images", np.zeros((12, 48), np.uint8), r"has shape \(12, 48\); it must be"),
        ("test_images", np.zeros((12, 4, 4), np.uint8), "train has 3 channels and test 1"),
        ("train_images", np.array([None] * 12), "is not a NumPy array file"),
    ],
)
def test_each_bad_array_is_named_in_one_line(tmp_path: Path, name: str, array: np.ndarray, message: str) -> None:
    np.save(arrays(tmp_path) / f"{name}.npy", array)
    for split in ("train", "test"):
        with pytest.raises(ValueError, match=message) as caught:
            open_images(Images(source="arrays", path=str(tmp_path)), split)
        assert "\n" not in str(caught.value)


def test_an_array_file_that_is_absent_empty_or_none_is_named(tmp_path: Path) -> None:
    arrays(tmp_path)
    for content in (b"", b"not an array"):
        (tmp_path / "train_images.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"train_images.npy is not a NumPy array file"):
            open_images(Images(source="arrays", path=str(tmp_path)), "train")
    (tmp_path / "train_images.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"contains no train_images.npy"):
        open_images(Images(source="arrays", path=str(tmp_path)), "train")


def test_a_part_of_a_mapped_set_copies_nothing_until_all_of_it_is_wanted(tmp_path: Path) -> None:
    config = Images(source="arrays", path=str(arrays(tmp_path)), validate_on=0.25)
    part = open_images(config, "validation")
    assert isinstance(part, Pixels)
    assert isinstance(part.stored, np.memmap)
    assert part.rows is not None
    assert np.array_equal(np.asarray(part.read(2)), part.stored[part.rows[2]])
    assert np.array_equal(part.pixels[2], np.asarray(part.read(2)))
