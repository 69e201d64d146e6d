"""Images that are read in tiles, and images of several sizes in one list."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from test_windows import small
from torch.nn.functional import interpolate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adatape
from adatape.data.decode import BrokenImage
from adatape.data.large import LargeImage
from adatape.models.windows import WindowTape
from adatape.windows.scan import Scan, scan_shape
from adatape.windows.sources import TiledImage
from adatape.windows.tiles import Box, tiles_of

CPU = torch.device("cpu")
SIZES = [(150, 203), (96, 128), (64, 331)]


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def standardised(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).movedim(-1, 0).float() / 127.5 - 1


def several(tile: int = 40) -> tuple[list[torch.Tensor], list[LargeImage]]:
    arrays = [pixels(*size, seed=n) for n, size in enumerate(SIZES)]
    return [standardised(each) for each in arrays], [adatape.open_image(each, tile=tile) for each in arrays]


class Counted:
    """An opened image that counts what is read of it."""

    def __init__(self, image: LargeImage) -> None:
        self.image, self.shape, self.mean, self.std, self.tile = image, image.shape, image.mean, image.std, image.tile
        self.reads: Counter[Box] = Counter()
        self.threads: set[threading.Thread] = set()

    def read(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        self.reads[Box(top, left, height, width)] += 1
        self.threads.add(threading.current_thread())
        return self.image.read(top, left, height, width)


@pytest.mark.parametrize(("cell", "scale", "fold", "wide"), [(16, 2, 2, True), (8, 1, 2, False), (16, 1, 2, True)])
@pytest.mark.parametrize("tile", [1, 32, 70, 500])
def test_scores_of_tiles_are_those_of_the_whole_image(cell: int, scale: int, fold: int, wide: bool, tile: int) -> None:
    torch.manual_seed(0)
    scan = Scan(3, scan_shape(cell, scale, fold, 4, wide), classes=3).eval()
    array = pixels(150, 203)
    with torch.no_grad():
        found = TiledImage(adatape.open_image(array, tile=tile), CPU, None).scanned(scan).scores
        torch.testing.assert_close(found, scan(standardised(array)[None]).scores)


def test_a_smaller_halo_would_change_scores() -> None:
    for wide in (False, True):
        shape = scan_shape(16, 2, 2, 4, wide)
        assert shape.halo == 1 + wide
        scan = Scan(1, shape).eval()
        x = torch.randn(1, 1, 160, 160)
        cut = 16 * (5 - shape.halo + 1)
        assert not torch.allclose(scan(x[..., cut:, :]).scores[:, 5 - cut // 16], scan(x).scores[:, 5])


def test_every_cell_is_kept_by_one_tile() -> None:
    kept = np.zeros((13, 22), int)
    for tile in tiles_of(13, 22, 5, halo=2):
        kept[tile.kept.within(Box(0, 0, 13, 22))] += 1
        rows, columns = tile.kept.within(tile.around)
        assert 0 <= rows.start <= 2
        assert 0 <= columns.start <= 2
    assert (kept == 1).all()


def test_tiles_are_of_one_size_however_large_the_image_is() -> None:
    """… at its borders too, where a halo is on one side only: memory does not depend on the image's size."""
    for halo in (0, 1, 2):
        largest = {max(tile.around.height for tile in tiles_of(count, count, 7, halo)) for count in (8, 13, 40, 100)}
        assert largest == {7}
    assert {(tile.around.height, tile.around.width) for tile in tiles_of(5, 6, 7, 2)} == {(5, 6)}
    assert all(tile.around.height <= 5 for tile in tiles_of(40, 40, 1, 2))  # the fewest that keep a cell


@pytest.mark.parametrize("options", [{}, {"view": 32, "layer": 2}, {"labels": "several", "floor": 0.05}])
def test_images_of_several_sizes_are_read_as_one_by_one(options: dict[str, Any]) -> None:
    model = small(**options)
    tensors, opened = several()
    with torch.no_grad():
        alone = [model(each[None], output=True) for each in tensors]
        for images in (tensors, opened, [tensors[0], opened[1], tensors[2]]):
            out = model(images, output=True)
            for n, one in enumerate(alone):
                assert torch.equal(out.tape.index[n], one.tape.index[0])
                torch.testing.assert_close(out.logits[n], one.logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (150, 203), (170, 300)])
def test_a_view_of_tiles_is_that_of_the_whole_image(size: tuple[int, int]) -> None:
    array = pixels(150, 203)
    view = TiledImage(adatape.open_image(array, tile=47), CPU, None).view(size)
    whole = interpolate(standardised(array)[None], size, mode="bilinear", antialias=True)
    torch.testing.assert_close(view, whole, rtol=1e-4, atol=1e-4)


def test_a_budget_of_nothing_reads_opened_images_too() -> None:
    model = small(view=32, layer=2)
    model.set_budget(0)
    tensors, opened = several()
    torch.testing.assert_close(model(opened), model(tensors), rtol=1e-4, atol=1e-5)


def test_in_inference_every_tile_is_read_once_and_by_other_threads() -> None:
    model = small(view=32, layer=2)
    image = Counted(adatape.open_image(pixels(150, 203), tile=40))
    with torch.no_grad():
        model([image])
    halo = model.scan.shape.halo
    wanted = [tile.around.in_pixels(8, (150, 203)) for tile in tiles_of(*model.scan.grid(150, 203), 5, halo)]
    assert {box: count for box, count in image.reads.items() if (box.height, box.width) != (16, 16)} == dict.fromkeys(
        wanted, 1
    )
    assert threading.main_thread() not in image.threads


def gradients(model: WindowTape, images: Any, fixed: bool = False) -> dict[str, torch.Tensor]:
    """Of a training step on images with labels, at places by key; `fixed` statistics by hand."""
    model.zero_grad()
    model.train()
    for layer in model.scan.modules():
        if fixed and isinstance(layer, torch.nn.BatchNorm2d):
            layer.eval()
    count = len(images)
    out = model(images, output=True, key=torch.arange(count))
    model.loss(out, torch.arange(count)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{}, {"search": 12}, {"view": 32, "layer": 2}])
def test_gradients_of_tiles_are_those_of_the_whole_image(options: dict[str, Any]) -> None:
    array = pixels(96, 128)
    found = gradients(small(**options), [adatape.open_image(array, tile=40)])
    whole = gradients(small(**options), standardised(array)[None], fixed=True)
    assert set(found) == set(whole)
    assert all(whole[name].any() for name in whole if name.startswith("scan.layers"))
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("search", [0, 12])
def test_the_loss_of_several_sizes_is_the_mean_of_the_losses_of_each(search: int) -> None:
    """… in what the images do not share: the mixture of guesses, and what was searched."""
    model = small(search=search).train()
    _, opened = several()
    key, target = torch.arange(3), torch.eye(5)[:3]
    together = model(opened, output=True, key=key).places
    each = [model([image], output=True, key=key[n : n + 1]).places for n, image in enumerate(opened)]
    for n, one in enumerate(each):
        count = one.scores.shape[1]
        torch.testing.assert_close(together.evidence[n, :count], one.evidence[0], rtol=1e-4, atol=1e-5)
        if search:
            assert torch.equal(together.searched.index[n], one.searched.index[0])
    if not search:

        def loss(places: Any, target: torch.Tensor) -> torch.Tensor:
            return model.answer.found(places.found.flatten(1), places.guesses.flatten(1, 2), target)

        losses = [loss(one, target[n : n + 1]) for n, one in enumerate(each)]
        mixed = loss(together, target)
        torch.testing.assert_close(mixed, torch.stack(losses).mean())


def test_lists_leave_the_statistics_of_batch_norms_alone() -> None:
    model = small().train()
    before = {name: each.clone() for name, each in model.scan.named_buffers()}
    model(several()[0])
    assert all(torch.equal(each, before[name]) for name, each in model.scan.named_buffers())
    assert all(layer.training for layer in model.scan.modules())


class PeakMemory(TorchDispatchMode):
    """Counts bytes of tensors that are alive, and those of the largest at its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._add(each.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self.seen:
            self.seen[storage] = None
            size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.live -= size


def peak_memory(call: Callable[[], object]) -> int:
    with PeakMemory() as memory:
        call()
    return memory.peak


@pytest.mark.parametrize("training", [False, True])
def test_memory_grows_with_the_image_only_by_what_is_kept_of_each_cell(training: bool) -> None:
    model = small(view=32, layer=2, search=4 if training else 0).train(training)

    def step(image: LargeImage) -> None:
        with torch.set_grad_enabled(training):
            out = model([image], output=True, key=torch.arange(1))
        if training:
            model.loss(out, torch.arange(1)).backward()
            model.zero_grad()

    few, many = (adatape.open_image(pixels(side, side), tile=64) for side in (256, 768))
    step(few)
    grown = peak_memory(lambda: step(many)) - peak_memory(lambda: step(few))
    cells = (768 // 8) ** 2 - (256 // 8) ** 2
    assert grown <= 40 * cells  # ten floats; the pixels of a cell are 192
    whole = peak_memory(lambda: model(standardised(pixels(768, 768))[None]))
    assert whole > peak_memory(lambda: step(many)) + 192 * cells


def write_pyramid(array: np.ndarray, path: Path, tile: int = 50, overlap: int = 1, kind: str = "png") -> Path:
    height, width = array.shape[:2]
    folder = path / "slide_files" / str(int(np.ceil(np.log2(max(height, width)))))
    folder.mkdir(parents=True)
    for row in range(-(-height // tile)):
        for column in range(-(-width // tile)):
            top, left = max(0, row * tile - overlap), max(0, column * tile - overlap)
            part = array[top : (row + 1) * tile + overlap, left : (column + 1) * tile + overlap]
            Image.fromarray(part).save(folder / f"{column}_{row}.{kind}")
    text = f'<Image TileSize="{tile}" Overlap="{overlap}" Format="{kind}" xmlns="http://schemas.microsoft.com/deepzoom/2008">'
    (path / "slide.dzi").write_text(f'{text}<Size Width="{width}" Height="{height}"/></Image>')
    return path / "slide.dzi"


def stored(kind: str, array: np.ndarray, path: Path) -> Any:
    if kind == "array":
        return array
    if kind == "tensor":
        return torch.from_numpy(np.atleast_3d(array)).movedim(-1, 0)
    if kind == "npy":
        np.save(path / "image.npy", array)
        return path / "image.npy"
    if kind == "pyramid":
        return write_pyramid(array, path)
    how: dict[str, Any] = {"rowsperstrip": 30} if kind == "strips" else {"tile": (64, 32), "compression": kind}
    colour = "rgb" if array.ndim == 3 else "minisblack"
    tifffile.imwrite(path / "image.tif", array, photometric=colour, **how)
    return str(path / "image.tif")


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("kind", ["array", "tensor", "npy", "pyramid", "deflate", "lzw", "strips"])
def test_an_image_has_the_same_pixels_from_any_source(kind: str, grey: bool, tmp_path: Path) -> None:
    array = pixels(150, 203)[..., 0] if grey else pixels(150, 203)
    image = adatape.open_image(stored(kind, array, tmp_path), tile=40)
    whole = np.moveaxis(np.atleast_3d(array), -1, 0)
    assert image.shape == whole.shape
    assert np.array_equal(image.read(0, 0, 150, 203), whole)
    around = np.pad(whole, ((0, 0), (100, 100), (100, 100)))
    inside, outside = [(49, 51, 2, 2), (60, 30, 64, 64)], [(-10, -7, 60, 90), (120, 180, 90, 50), (150, 9, 20, 20)]
    for box in [*inside, *outside, (-90, 0, 9, 9)]:
        read = image.read(*box)
        top, left, height, width = box[0] + 100, box[1] + 100, box[2], box[3]
        assert read.dtype == np.uint8
        assert np.array_equal(read, around[:, top : top + height, left : left + width])


def test_a_jpeg_tiff_is_what_tifffile_says(tmp_path: Path) -> None:
    smooth = np.cumsum(pixels(150, 203) // 200, 0).astype(np.uint8)
    path = stored("jpeg", smooth, tmp_path)
    assert np.array_equal(adatape.open_image(path).read(0, 0, 150, 203), np.moveaxis(tifffile.imread(path), -1, 0))


def test_only_the_tiles_that_are_needed_are_decoded(tmp_path: Path) -> None:
    source = adatape.open_image(stored("deflate", pixels(300, 300), tmp_path)).source
    source.crop(70, 40, 10, 10)
    source.crop(72, 42, 10, 10)
    info = source.kept.cache_info()  # type: ignore[attr-defined]
    assert (info.misses, info.hits) == (1, 1)


def broken(kind: str, path: Path) -> Any:
    array = pixels(150, 203)
    if kind == "dtype":
        return array.astype(np.float32)
    if kind == "shape":
        return np.moveaxis(array, -1, 0)
    if kind == "suffix":
        return path / "image.jp2"
    if kind in ("npy", "npy dtype"):
        file = stored("npy", array if kind == "npy" else array.astype(np.uint16), path)
        file.write_bytes(file.read_bytes()[: -1000 if kind == "npy" else None])
        return file
    if kind == "header":
        (path / "image.tif").write_bytes(b"II*\x00 nothing")
        return path / "image.tif"
    if kind == "tile":
        file = Path(stored("deflate", array, path))
        with tifffile.TiffFile(file) as tiff:
            last = int(tiff.pages[0].dataoffsets[-1])  # type: ignore[union-attr]
        file.write_bytes(file.read_bytes()[: last + 10])
        return file
    file = write_pyramid(array, path)
    tile = path / "slide_files" / "8" / "2_1.png"
    if kind == "hole":
        tile.unlink()
    elif kind == "half a tile":
        tile.write_bytes(tile.read_bytes()[:2000])
    elif kind == "size":
        Image.fromarray(array[:20, :20]).save(tile)
    else:
        file.write_text("<Image TileSize='50'/>")
    return file


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dtype", "the array has dtype float32; it must be uint8"),
        ("shape", r"the array has shape \(3, 150, 203\)"),
        ("suffix", "image.jp2 has suffix '.jp2'; it must be one of .npy"),
        ("npy", "image.npy: "),
        ("npy dtype", "image.npy has dtype uint16"),
        ("header", "image.tif: "),
        ("tile", r"image.tif, tile 20 has 10 bytes of \d+"),
        ("hole", "lacks 1 of 15 tiles, 2_1.png first"),
        ("half a tile", "2_1.png: "),
        ("size", r"2_1.png is \(20, 20\) of mode RGB; it must be \(52, 52\), RGB"),
        ("description", "slide.dzi is not a DeepZoom description"),
    ],
)
def test_what_cannot_be_read_is_one_error_that_says_what(kind: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenImage, match=said):
        adatape.open_image(broken(kind, tmp_path)).read(0, 0, 150, 203)


def test_a_tile_that_breaks_while_it_is_read_ahead_ends_the_call(tmp_path: Path) -> None:
    image = adatape.open_image(broken("tile", tmp_path), tile=40)
    with pytest.raises(BrokenImage, match="tile 20"):
        small()([image])


def test_training_goes_on_after_a_broken_tile(tmp_path: Path) -> None:
    """One's own loop may leave out an image that cannot be read: the next step is as if it had not been there."""
    good = adatape.open_image(pixels(96, 128), tile=40)
    expected = gradients(small(), [good])
    model = small().train()
    with pytest.raises(BrokenImage, match="tile 20"):
        model([adatape.open_image(broken("tile", tmp_path), tile=40)], output=True, key=torch.arange(1))
    assert all(layer.training for layer in model.scan.modules())
    found = gradients(model, [good])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.zeros((12, 100, 3), np.uint8), "window is 16; it must fit the image, 12 × 100"),
        (np.zeros((24, 24, 3), np.uint8), "steps is 4; an image of 24 × 24 has room for 2, with cells of 8 × 8 pixels"),
        (np.zeros((96, 128), np.uint8), r"image 1 has shape \(1, 96, 128\); it must have 3 channels"),
    ],
)
def test_an_image_that_does_not_suit_the_model_is_refused(image: np.ndarray, said: str) -> None:
    good = adatape.open_image(pixels(96, 128))
    with pytest.raises(ValueError, match=said):
        small()([good, adatape.open_image(image)])


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(TypeError, match=r"image 0 is a ndarray; it must be a tensor or from adatape\.open_image"):
        small()([pixels(96, 128)])
    with pytest.raises(ValueError, match="mean has 2 values; the image has 3 channels"):
        adatape.open_image(pixels(96, 128), mean=(0.5, 0.5))
    with pytest.raises(ValueError, match="std is 0"):
        adatape.open_image(pixels(96, 128), std=0)
