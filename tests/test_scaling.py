"""A fine-tuned ViT sees pixels as it was pretrained to: in training, evaluation, server, export and release."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from small_runs import noise_arrays
from test_recipes import made, shrunk
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor

import adatape
import adatape.models
from adatape.config import Experiment, ImageModel, from_dict, to_dict
from adatape.export import facts
from adatape.models.rescale import Rescale, rescale_as
from adatape.serve.engine import Engine
from adatape.train import identity
from adatape.train.folder import load_run
from adatape.train.launch import evaluate_run, train_to_folder
from adatape.train.release import release_to_folder
from adatape.train.task import build_image_model

CLIP = "vit_base_patch32_clip_224.openai"
SETTINGS = timm.get_pretrained_cfg(CLIP)
assert SETTINGS is not None
MEAN, STD = SETTINGS.mean, SETTINGS.std
SMALL = {"embed_dim": 64, "num_heads": 2, "depth": 2, "patch_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `finetune` on noise, from an untrained CLIP."""
    data = noise_arrays(tmp_path_factory.mktemp("arrays"))
    experiment = shrunk(made("finetune", backbone=CLIP), str(data))
    return train_to_folder(experiment, tmp_path_factory.mktemp("runs") / "run", "cpu").out


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randint(0, 256, (3, 64, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def plain_input(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    return ((pixels.float() / 255 - mean) / std)[None]


@torch.no_grad()
def test_a_run_gives_its_backbone_what_the_backbone_was_trained_on(folder: Path, pixels: Tensor) -> None:
    model = load_run(folder)[1].eval()
    seen = []
    model.vit.patch_embed.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for call in (model, model.forward_features, model.forward_intermediates):
        call((pixels.float() / 127.5 - 1)[None])
        torch.testing.assert_close(seen.pop(), plain_input(pixels), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_server_evaluation_export_and_release_agree(folder: Path, pixels: Tensor, tmp_path: Path) -> None:
    experiment, model = load_run(folder)
    logits = model.eval()((pixels.float() / 127.5 - 1)[None])[0]
    [answer] = Engine(model).answers([pixels], None)
    torch.testing.assert_close(torch.tensor(answer.probability), logits.softmax(0).sort(descending=True).values)
    assert facts(experiment, model)["mean"] == [0.5] * 3  # the export holds the whole model
    release_to_folder(folder, tmp_path / "released")
    assert "upright as by PIL.ImageOps.exif_transpose" in (tmp_path / "released" / "README.md").read_text()
    released = timm.create_model(f"local-dir:{tmp_path / 'released'}", pretrained=True).eval()
    config = resolve_model_data_config(released)
    assert tuple(config["mean"]) == pytest.approx(MEAN, abs=1e-7)
    assert tuple(config["std"]) == pytest.approx(STD, abs=1e-7)
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    prepared = create_transform(**config)(picture)[None]
    torch.testing.assert_close(prepared, plain_input(pixels), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(released(prepared)[0], logits, rtol=1e-4, atol=1e-5)
    scored = json.loads((folder / "result.json").read_text())["accuracy"]
    assert evaluate_run(folder, device="cpu").score.accuracy == scored


def test_mean_and_deviation_are_saved_with_the_weights(folder: Path) -> None:
    model = load_run(folder)[1]
    assert isinstance(model.rescale, Rescale)
    mean, std = model.rescale.statistics()
    assert mean == pytest.approx(MEAN, abs=1e-7)
    assert std == pytest.approx(STD, abs=1e-7)
    assert {"rescale.mean", "rescale.std"} <= model.state_dict().keys()
    assert model.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)  # what is to be done before the model


def test_a_config_without_the_field_means_half_and_keeps_its_hash() -> None:
    old = made("finetune")
    old = dataclasses.replace(old, model=dataclasses.replace(old.model, scaling="half"))
    stored = to_dict(old)
    del stored["model"]["scaling"]
    assert from_dict(Experiment, stored) == old
    assert not [name for name in identity.identity(old).fields if "scaling" in name]
    assert identity.identity(old).sha256 != identity.identity(made("finetune")).sha256


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224.augreg_in21k", CLIP])
@pytest.mark.parametrize("wrap", [None, {"patch": 8, "steps": 2, "merge": 2}])
def test_what_was_pretrained_on_minus_one_to_one_needs_nothing(name: str, wrap: dict | None) -> None:
    half = build_image_model(ImageModel(name, SMALL, wrap=wrap), 64, 3, 4)
    assert half.rescale is None
    asked = build_image_model(ImageModel(name, SMALL, wrap=wrap, scaling="backbone"), 64, 3, 4)
    assert (asked.rescale is None) == ("augreg" in name)


def test_other_channels_get_the_average() -> None:
    rescale = rescale_as({"mean": (0.2, 0.4, 0.6), "std": (0.1, 0.2, 0.3)}, 1)
    assert rescale is not None
    assert rescale.statistics() == ((0.4,), (0.2,))
    with pytest.raises(ValueError, match=r"model.scaling is 'backbone', but the model's pretrained_cfg has no std"):
        rescale_as({"mean": (0.5,)}, 3)


@pytest.mark.parametrize("steps", [0, 3])
@torch.no_grad()
def test_a_reader_of_windows_gives_its_backbone_what_that_was_trained_on(steps: int) -> None:
    """Also of lists of images and of opened ones, whose tiles it scales as it reads them."""
    wrap = {"bank": "windows", "window": 32, "steps": 3, "view": 64, "layer": 1}
    options = {"embed_dim": 64, "num_heads": 2, "depth": 2}
    torch.manual_seed(0)
    model = build_image_model(ImageModel(CLIP, options, wrap=wrap, scaling="backbone"), (128, 160), 3, 4).eval()
    plain = build_image_model(ImageModel(CLIP, options, wrap=wrap), (128, 160), 3, 4).eval()
    weights = model.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    for each in (model, plain):
        each.set_budget(steps)
    pixels = torch.randint(0, 256, (2, 3, 128, 160), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    given, wanted = pixels / 127.5 - 1, torch.cat([plain_input(each) for each in pixels])
    expected = plain(wanted)
    torch.testing.assert_close(model(given), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(list(given)), expected, rtol=1e-4, atol=1e-5)
    opened = [adatape.open_image(each.permute(1, 2, 0).numpy(), tile=64) for each in pixels]
    torch.testing.assert_close(model(opened), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.forward_features(given), plain.forward_features(wanted), rtol=1e-4, atol=1e-5)
