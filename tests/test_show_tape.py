"""A picture of a tape shows what was read, where it was read, and in which order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import timm
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from small_runs import tiny
from timm.models.vision_transformer import VisionTransformer

import adatape
from adatape.models.base import Adaptive
from adatape.train.task import build_for

mpl.use("Agg")
IMAGE = (96, 128)
SHAPE: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def windows(**options: Any) -> Adaptive:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=32, patch_size=8, **SHAPE)
    return adatape.wrap(vit, "windows", image=IMAGE, window=16, cell=8, steps=4, **options).eval()


def patches(**options: Any) -> Adaptive:
    torch.manual_seed(0)
    shape = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "query_width": 16}
    tape = {"bank": "input", "bank_patch": 8, "steps": 4, "threshold": 2.0, **options}
    return timm.create_model("adatape_tiny_patch16_224", **shape, **tape).eval()


def boxes_of(axes: Any) -> list[tuple[float, ...]]:
    found = [each for each in axes.patches if isinstance(each, Rectangle)]
    return [(each.get_y() + 0.5, each.get_x() + 0.5, each.get_height(), each.get_width()) for each in found]


def numbers_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_windows_are_drawn_in_reading_order_where_they_were_cut() -> None:
    model, x = windows(), torch.randn(3, *IMAGE)
    axes = adatape.show_tape(model, x)
    index = model(x[None], output=True).tape.index[0, :, 0]
    centres = model.scan.centres(index, 16)
    expected = [(float(row) - 8, float(column) - 8, 16.0, 16.0) for row, column in centres]
    assert boxes_of(axes) == expected
    assert numbers_of(axes) == ["1", "2", "3", "4"]


def test_windows_below_the_floor_are_not_drawn() -> None:
    model, x = windows(view=32, layer=1), torch.randn(1, 3, *IMAGE)
    weight = model(x, output=True).tape.weight[0, :, 0]
    model.floor = float(weight[2])
    assert len(boxes_of(adatape.show_tape(model, x))) == 2


def test_patches_of_an_input_bank_are_outlined_on_its_grid() -> None:
    model, x = patches(), torch.randn(1, 3, 32, 32)
    tape = model(x, output=True).tape
    length = int(tape.length[0])
    axes = adatape.show_tape(model, x)
    taken = tape.index[0, :length].flatten().tolist()
    assert boxes_of(axes) == [(i // 4 * 8.0, i % 4 * 8.0, 8.0, 8.0) for i in taken]
    assert numbers_of(axes) == [str(n + 1) for n in range(length)]


def test_a_learned_bank_and_a_sequence_are_bars_of_weight_by_index() -> None:
    for model, x in (
        (patches(bank="learn", bank_size=40), torch.randn(3, 32, 32)),
        (build_for(tiny("parity adatape")), torch.tensor([1, -1, 0, 1, 1, -1, 0, 0])),
    ):
        axes = adatape.show_tape(model, x)
        tape = model.eval()(x[None], output=True).tape
        length = int(tape.length[0])
        assert numbers_of(axes) == [str(n + 1) for n in range(length)]
        assert [float(bar.get_height()) for bar in axes.patches] == tape.weight[0, :length].flatten().tolist()
        read = [int(tick.get_text()) for tick in axes.get_xticklabels()]
        assert read == tape.index[0, :length].flatten().tolist()
        assert axes.get_xlabel().startswith("index in the bank")


def test_it_draws_into_axes_that_are_given_and_leaves_the_model_as_it_was() -> None:
    model = windows().train()
    ax = Figure().subplots()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert adatape.show_tape(model, torch.randn(3, *IMAGE), ax) is ax
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_picture_and_its_file_are_read_as_the_tensor_that_they_become(tmp_path: Path) -> None:
    model = patches()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    mean, std = (torch.tensor(model.pretrained_cfg[name]) for name in ("mean", "std"))  # type: ignore[index]
    x = ((torch.from_numpy(pixels).float() / 255 - mean) / std).permute(2, 0, 1)
    expected = boxes_of(adatape.show_tape(model, x))
    for given in (Image.fromarray(pixels), tmp_path / "x.png", str(tmp_path / "x.png")):
        assert boxes_of(adatape.show_tape(model, given)) == expected
    assert len(boxes_of(adatape.show_tape(model.bfloat16(), Image.fromarray(pixels)))) == len(expected)


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ValueError, match="no pretrained_cfg with mean and std; pass a tensor"):
        adatape.show_tape(windows(), Image.new("RGB", (32, 32)))
    with pytest.raises(ValueError, match=r"image has shape \(2, 3, 32, 32\); it must be one image"):
        adatape.show_tape(patches(), torch.randn(2, 3, 32, 32))
    with pytest.raises(ValueError, match="reads no tape; there is nothing to show"):
        adatape.show_tape(build_for(tiny("plainvit")), torch.randn(1, 8, 8))
    with pytest.raises(ValueError, match="image is a Image and the model takes 4 channels, not 1 or 3; pass a tensor"):
        adatape.show_tape(patches(in_chans=4), Image.new("RGB", (32, 32)))
    with pytest.raises(TypeError, match=r"a VisionTransformer, which reads no tape; adatape.wrap gives a ViT one"):
        adatape.show_tape(VisionTransformer(img_size=32, patch_size=8, **SHAPE), torch.randn(3, 32, 32))  # type: ignore[arg-type]
    model = patches()
    model.set_budget(0)
    with pytest.raises(ValueError, match="reads no tape at a budget of 0"):
        adatape.show_tape(model, torch.randn(3, 32, 32))


def test_a_model_that_repeats_blocks_has_no_tape_at_any_budget() -> None:
    model = timm.create_model("ut_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, num_heads=2, steps=2)
    with pytest.raises(ValueError, match="this model, Universal, reads no tape; there is nothing to show"):
        adatape.show_tape(model, torch.randn(3, 32, 32))


def test_showing_leaves_every_part_in_its_mode() -> None:
    model = patches().train()
    model.vit.blocks[0].eval()
    before = [part.training for part in model.modules()]
    adatape.show_tape(model, torch.randn(3, 32, 32))
    assert [part.training for part in model.modules()] == before


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith(("matplotlib.", "adatape.report.pictures"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'adatape\[plot\]'"):
        adatape.show_tape(windows(), torch.randn(3, *IMAGE))
