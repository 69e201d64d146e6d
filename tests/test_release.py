"""timm rebuilds a release to the bit, and loading weights executes no code."""

from __future__ import annotations

import json
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from small_runs import Hostile
from test_systems import SMALL, SYSTEMS
from timm.models import PretrainedCfg

import adatape
from adatape.config import ImageModel
from adatape.train.release import licence_of, release
from adatape.train.weights import read_weights

SAID = {
    "result": {"accuracy": 0.98765432, "note": "a|b", "lengths": [0, 4], "logits_sha256": "bc2b"},
    "command": "adatape train digits --seed 3",
}


def trained(name: str, options: dict[str, Any]) -> torch.nn.Module:
    """A model with random, non-initial weights."""
    model = timm.create_model(name, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def loaded(folder: Path, **options: Any) -> torch.nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_comes_back_to_the_bit(system: str, tmp_path: Path) -> None:
    name, options = SYSTEMS[system][0], {**SMALL, **SYSTEMS[system][1]}
    model, x = trained(name, options), torch.randn(3, 3, 32, 32)
    again = loaded(release(model, name, options, tmp_path / "out", **SAID))
    assert type(again) is type(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert torch.equal(model(x), again(x))


@pytest.fixture
def released(tmp_path: Path) -> Path:
    options = {**SMALL, "depth": 2}
    return release(
        trained("plainvit_tiny_patch16_224", options), "plainvit_tiny_patch16_224", options, tmp_path / "out",
        classes=["ant", "bee", "cat", "dog"], mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), **SAID,
    )  # fmt: skip


def test_a_release_holds_weights_configuration_and_card(released: Path) -> None:
    assert sorted(file.name for file in released.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((released / "config.json").read_text())
    assert config["architecture"] == "plainvit_tiny_patch16_224"
    assert config["num_classes"] == 4
    assert config["label_names"] == ["ant", "bee", "cat", "dog"]
    assert config["model_args"]["patch_size"] == 8
    card = (released / "README.md").read_text()
    parameters = sum(p.numel() for p in loaded(released).parameters())
    for part in (
        f"{parameters:,} parameters",
        "# PlainViT, 32 × 32 pixels, 4 classes\n",
        "name `plainvit_tiny_patch16_224` with the options in `config.json`",
        "| accuracy | 0.987654 |",
        r"a\|b",
        SAID["command"],
        "license: unknown",
        "Licence: unknown: nobody has named one.",
    ):
        assert part in card
    for part in ("# plainvit_tiny", "logits_sha256", "| lengths"):
        assert part not in card


@torch.no_grad()
@pytest.mark.parametrize("kind", ["registered", "wrapped", "windows"])
def test_transformers_loads_a_release(kind: str, tmp_path: Path) -> None:
    from transformers import TimmWrapperForImageClassification

    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
    tape: dict[str, Any] = {"query_width": 16, "steps": 2, "merge": 2}
    window = {"bank": "windows", "image": [64, 64], "window": 16, "cell": 8, "steps": 2}
    name, options = {
        "registered": ("adatape_tiny_patch16_224", {**vit, "bank_patch": 4, **tape}),
        "wrapped": ("adatape", {"backbone": "vit_tiny_patch16_224", **vit, "bank": "input", "patch": 4, **tape}),
        "windows": ("adatape", {"backbone": "vit_tiny_patch16_224", **vit, **window}),
    }[kind]
    model, side = trained(name, options), 64 if kind == "windows" else 32
    folder = release(model, name, options, tmp_path / "out", input_size=(3, side, side), **SAID)
    again, x = TimmWrapperForImageClassification.from_pretrained(folder).eval(), torch.randn(2, 3, side, side)
    assert again.config.num_labels == 4
    assert torch.equal(again(x).logits, model(x))


@pytest.mark.parametrize(
    ("model", "licence", "said"),
    [
        (ImageModel("adatape_tiny_patch16_224"), "apache-2.0", "trained from scratch"),
        (ImageModel("vit_base_patch16_224.mae", pretrained="hub"), "cc-by-nc-4.0", "forbids commercial use"),
        (ImageModel("vit_base_patch16_224.mae"), "apache-2.0", "trained from scratch"),
        (ImageModel("vit_tiny_patch16_224.augreg_in21k", pretrained="hub"), "apache-2.0", "that of vit_tiny_patch16"),
        (ImageModel("vit_pe_core_base_patch16_224.fb", pretrained="hub"), "apache-2.0", "that of vit_pe_core"),
        (ImageModel("vit_tiny_patch16_224", pretrained="mine.safetensors"), "unknown", "ask those who made them"),
        (ImageModel("adatape_tiny_patch16_224", pretrained="x.safetensors"), "unknown", "a file of weights"),
    ],
)
def test_the_licence_is_that_of_the_pretrained_weights(model: ImageModel, licence: str, said: str) -> None:
    found = licence_of(model)
    assert found.name == licence
    assert said in str(found)
    assert licence_of(model, "mit").name == "mit"


def test_weights_whose_licence_timm_does_not_name_have_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda _: PretrainedCfg())
    assert licence_of(ImageModel("vit_tiny_patch16_224", pretrained="hub")).name == "unknown"


def test_a_cards_figures_are_those_of_the_test_set_in_words(tmp_path: Path) -> None:
    names = ("length_mean", "length_var", "sequence_mean", "sequence_max", "gflops_mean", "gflops_p50", "gflops_p95")
    figures = dict.fromkeys((*names, "gflops", "mean_ap", "accuracy", "steps", "parameters", "broken_images"), 0.5)
    result = {**figures, "average_precision": {"no_entry": 0.25}}
    options = {"patch_size": 8, "img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 1, "num_classes": 4}
    model = timm.create_model("plainvit_tiny_patch16_224", **options)
    release(model, "plainvit_tiny_patch16_224", options, tmp_path / "card", result=result, command="")
    rows = re.findall(r"^\| ([^|]+) \| 0.5 \|$", (tmp_path / "card" / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 10
    assert not any("_" in name for name in rows)
    assert {"mean AP", "all labels right", "GFLOPs, mean"} <= set(rows)


def test_the_card_loads_the_model(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(released.parent)
    code = (released / "README.md").read_text().split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {"image": Image.new("RGB", (32, 32))}
    exec(code, found)
    assert found["name"] in ("ant", "bee", "cat", "dog")
    assert torch.equal(found["model"].vit.head.weight, read_weights(released / "model.safetensors")["vit.head.weight"])
    assert found["transform"]


def test_images_are_prepared_as_they_were_for_training(released: Path) -> None:
    data = timm.data.resolve_model_data_config(loaded(released))
    assert [list(data[key]) for key in ("input_size", "mean", "std")] == [[3, 32, 32], [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]


def test_another_number_of_classes_gets_a_new_head_on_the_same_body(released: Path) -> None:
    weights, other = read_weights(released / "model.safetensors"), loaded(released, num_classes=7)
    assert other.vit.head.weight.shape[0] == 7
    assert torch.equal(other.vit.blocks[0].attn.qkv.weight, weights["vit.blocks.0.attn.qkv.weight"])


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_other_channels_come_back_to_the_bit(channels: int, tmp_path: Path) -> None:
    options = {**SMALL, "depth": 2, "in_chans": channels}
    model, x = trained("plainvit_tiny_patch16_224", options), torch.randn(2, channels, 32, 32)
    again = loaded(release(model, "plainvit_tiny_patch16_224", options, tmp_path / "out", **SAID))
    assert torch.equal(model(x), again(x))


def test_a_wrapped_vit_in_channels_last_comes_back_to_the_bit(tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=4)
    model = (
        adatape.wrap(vit, bank="learn", bank_size=80, query=None, gate=False)
        .eval()
        .to(memory_format=torch.channels_last)
    )
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 4, "bank": "learn", "bank_size": 80}
    again = loaded(release(model, "adatape_tiny_patch16_224", options, tmp_path / "out", **SAID))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x), again(x), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items())


def test_what_would_not_come_back_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    name, options = "plainvit_tiny_patch16_224", {**SMALL, "depth": 2}
    model = trained(name, options)
    for wrong, message in (
        ({**options, "depth": 3}, r"is another model: vit\.blocks\.2\.norm1\.weight is missing.*; and 9 more"),
        ({**options, "num_classes": 5}, r"vit\.head\.weight is \(4, 64\), not \(5, 64\)"),
        ({**options, "act_layer": torch.nn.ReLU}, "must be JSON values"),
    ):
        with pytest.raises(ValueError, match=message):
            release(model, name, wrong, tmp_path / "out", **SAID)
    with pytest.raises(ValueError, match="classes has 2 names; the model has 4 classes"):
        release(model, name, options, tmp_path / "out", classes=["a", "b"], **SAID)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_anything_is_refused(released: Path) -> None:
    options = {**SMALL, "depth": 2}
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        release(trained("plainvit_tiny_patch16_224", options), "plainvit_tiny_patch16_224", options, released, **SAID)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("legacy", [True, False])
def test_a_pickle_is_refused_with_advice_and_runs_nothing(tmp_path: Path, suffix: str, legacy: bool) -> None:
    path, mark = tmp_path / f"weights{suffix}", tmp_path / "mark"
    torch.save({"a": Hostile(mark)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match=r"looks like a pickle.*convert it once"):
        read_weights(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists(), "the trap must be able to spring"


def file_of(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        bytes(64),
        b"<html>not found</html>" * 9,
        file_of({"a": tensor(0, 4)}, length=1 << 62),
        file_of({"a": tensor(0, 4)}, length=(1 << 64) - 1),
        file_of({"a": tensor(0, 4)}, length=99_999_999),
        file_of(b"{" * 1000),
        file_of(b'{"a":' * 5000 + b"1" + b"}" * 5000),
        file_of(b"\xff\xfe{}"),
        file_of([1, 2]),
        file_of({"a": tensor(0, 4), "b": tensor(0, 4)}),
        file_of({"a": tensor(0, 4), "b": tensor(2, 6)}),
        file_of({"a": tensor(0, 4)}),
        file_of({"a": tensor(4, 8)}),
        file_of({"a": tensor(4, 0)}),
        file_of({"a": tensor(0, 8, [1 << 62, 16])}),
        file_of({"a": tensor(0, 8, [-1])}),
        file_of({"a": tensor(0, 8, dtype="F99")}),
        file_of({"a": tensor(0, 1 << 60, [1 << 58])}),
        file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[1]}}'),
    ],
)
def test_hostile_safetensors_are_a_clear_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"weights\.safetensors is not a complete safetensors file"):
        read_weights(path)


def test_weights_cut_at_any_byte_are_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, path)
    whole = path.read_bytes()
    assert torch.equal(read_weights(path)["a"], torch.arange(6.0))
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"weights\.safetensors"):
            read_weights(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(OSError, match=str(path)):
            read_weights(path)
