"""The tools around timm's models work on ours: each row of docs/tools.md names the test that runs it."""

from __future__ import annotations

import ast
import copy
import importlib
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from packaging.requirements import Requirement
from PIL import Image
from test_cost import counted
from test_wrap import VITS
from timm.data import Mixup, create_loader
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import Dataset

import adatape
import adatape.models
from adatape.banks import Bank, PatchView
from adatape.evaluate.cost import cost, total
from adatape.models import AdaTape
from adatape.models.rescale import Rescale
from adatape.reader import TapeReader
from adatape.records import Output
from adatape.train.release import release

ROOT = Path(__file__).parents[1]
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "depth": 3, "num_classes": 5}
READS: dict[str, Any] = {"patch": 4, "bank_size": 80, "steps": 6, "threshold": 1.5, "merge": 4}
REGISTERED = {"bank_patch": 4, "steps": 3, "merge": 2, "query_width": 32}
DEEP = {**VIT, "depth": 12, "embed_dim": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdaTape": ("adatape_tiny_patch16_224", REGISTERED),
    "wrapped": ("adatape", {"backbone": "vit_tiny_patch16_224", "patch": 4, "steps": 3, "query_width": 32}),
    "U2T": ("u2t_tiny_patch16_224", {"depth": 12}),
    "UViT": ("uvit_tiny_patch16_224", {}),
    "A-ViT": ("avit_tiny_patch16_224", {}),
    "PlainViT": ("plainvit_tiny_patch16_224", {}),
}

KINDS = ["CLIP", "DINOv2 with registers", "parallel branches", "SigLIP, attention pooling", "DeiT, distilled", "EVA-02"]
KINDS += ["DINOv3, drawn coordinates", "RoPE, mixed"]


def images(n: int = 4, size: int = 32) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def wrapped(bank: str = "input", opened: bool = True, **options: Any) -> AdaTape:
    """A wrapped ViT with weights as after training, and open gates."""
    torch.manual_seed(0)
    model = adatape.wrap(timm.create_model("vit_tiny_patch16_224", **{**VIT, **options}), bank, **READS)  # type: ignore[call-overload]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if opened or name != "gate.open":
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def both_paths(model: nn.Module, x: Tensor) -> list[Output]:
    """The output on the CPU's path of reading and on the GPU's, both run on the CPU."""
    [ours] = [module for module in model.modules() if isinstance(module, AdaTape)]
    readers = [module for module in ours.modules() if isinstance(module, TapeReader)]
    found = []
    for use_kernels in (False, True):
        for reader in readers:
            reader.use_kernels = use_kernels
        found.append(ours(x, output=True))
    return found  # type: ignore[return-value]


def assert_paths_agree(model: nn.Module) -> None:
    cpu, gpu = both_paths(model, images())
    assert torch.equal(cpu.tape.index, gpu.tape.index)  # type: ignore[union-attr]
    torch.testing.assert_close(cpu.logits, gpu.logits, rtol=1e-5, atol=1e-5)


# timm


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_features_only_takes_any_out_indices(family: str) -> None:
    name, options = FAMILIES[family]
    for indices in ([2, 5, 8], [0], [-1], [0, 11], 4):
        features = timm.create_model(name, features_only=True, out_indices=indices, **{**DEEP, **options}).eval()
        count = indices if isinstance(indices, int) else len(indices)
        assert [tuple(grid.shape) for grid in features(images(2))] == [(2, 32, 4, 4)] * count
        assert features.feature_info.channels() == [32] * count


@torch.no_grad()
def test_pruned_features_are_those_of_the_whole_model() -> None:
    whole, x = wrapped(depth=5), images()
    wanted = whole.forward_intermediates(x, [1, 3], intermediates_only=True)
    pruned = wrapped(depth=5).requires_grad_(False)
    assert pruned.prune_intermediate_layers([1, 3]) == [1, 3]
    assert len(pruned.blocks) == 4
    for mine, theirs in zip(pruned.forward_intermediates(x, [1, 3], intermediates_only=True), wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert not any(parameter.requires_grad for parameter in pruned.parameters()), "what was frozen stays frozen"


@torch.no_grad()
def test_intermediate_layers_have_timms_shapes_and_with_shut_gates_timms_values() -> None:
    model, x = wrapped(opened=False, reg_tokens=2), images()
    assert (model.num_prefix_tokens, len(model.blocks), model.patch_embed.patch_size) == (3, 3, (8, 8))
    for options in ({}, {"n": 2, "reshape": True, "norm": True}, {"n": [0, 2], "return_prefix_tokens": True}):
        mine, theirs = (each.get_intermediate_layers(x, **options) for each in (model, model.vit))
        torch.testing.assert_close(list(mine), list(theirs), rtol=1e-4, atol=1e-4)


class Pictures(Dataset[Any]):
    """Eight images in memory; timm's loader sets the transform."""

    transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        return image if self.transform is None else self.transform(image), index % 5


def test_timms_loader_mixup_optimizer_and_average_train_a_wrapped_vit(tmp_path: Path) -> None:
    model = wrapped(opened=False).train()
    data = timm.data.resolve_model_data_config(model)
    assert data["input_size"] == (3, 32, 32)
    loader = create_loader(
        Pictures(), **{name: data[name] for name in ("input_size", "mean", "std")}, batch_size=4, is_training=True,
        num_workers=0, persistent_workers=False, device=torch.device("cpu"),
    )  # fmt: skip
    mixup, average = Mixup(mixup_alpha=0.8, num_classes=5), ModelEmaV3(model, decay=0.5)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-2, weight_decay=0.05, layer_decay=0.75)
    before = model.gate.open.detach().clone()  # type: ignore[union-attr]
    for x, label in loader:
        x, target = mixup(x, label)
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
        average.update(model)
    assert (model.gate.open != before).all()  # type: ignore[union-attr]
    timm.utils.CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path)).save_checkpoint(0, metric=0.5)
    saved, other = wrapped(), wrapped()
    timm.models.load_checkpoint(saved, str(tmp_path / "last.pth.tar"))
    assert torch.equal(saved.eval()(images()), model.eval()(images()))
    other.load_state_dict(average.module.state_dict())
    assert not torch.equal(other(images()), model(images()))


def test_timms_optimizer_spares_gates_and_positions_of_decay_and_scales_rates_by_layer() -> None:
    model = wrapped()
    groups = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5).param_groups
    group = {id(parameter): group for group in groups for parameter in group["params"]}
    of = {name: group[id(parameter)] for name, parameter in model.named_parameters()}
    assert len(of) == sum(len(group["params"]) for group in groups)
    spared = {"gate.open", "bank.pos_embed", "vit.cls_token", "vit.pos_embed"}
    assert all(of[name]["weight_decay"] == 0 for name in spared)
    assert of["bank.h2.weight"]["weight_decay"] == of["append_mlp.fc1.weight"]["weight_decay"] == 0.05
    scales = [of[name].get("lr_scale") for name in ("vit.patch_embed.proj.weight", "vit.blocks.0.mlp.fc1.weight",
                                                    "vit.blocks.2.mlp.fc1.weight", "bank.h2.weight")]  # fmt: skip
    assert scales == sorted(scales)
    assert scales[-1] == 1.0


def test_timms_scripts_know_our_names_after_one_import(tmp_path: Path) -> None:
    """timm's train.py is in its repository, not in its package: this script creates a model as it does."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom timm.models import create_model\n"
        "if __name__ == '__main__':\n"
        "    model = create_model(sys.argv[sys.argv.index('--model') + 1], depth=2)\n"
        "    print(type(model).__name__)\n"
    )
    [line] = re.findall(r"^(python -c .*) train\.py --model adatape", (ROOT / "docs" / "tools.md").read_text(), re.M)
    code = re.fullmatch(r'python -c "(.*)"', line)
    assert code is not None
    command = [sys.executable, "-c", code[1], str(script), "--model", "adatape_tiny_patch16_224"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "AdaTape\n", done.stderr


PRIVATE = {
    "timm.models._builder": {"build_model_with_cfg"},
    "timm.models._features": {"feature_take_indices"},
    "timm.models._hub": {"save_config_for_hf"},
    "timm.models._manipulate": {"checkpoint"},
    "timm.models._registry": {"generate_default_cfgs", "get_pretrained_cfg", "register_model"},
}
USED_OF_VIT = {
    "_pos_embed", "patch_drop", "norm_pre", "blocks", "norm", "fc_norm", "head", "pool_include_prefix",
    "num_prefix_tokens", "num_reg_tokens", "grad_checkpointing", "attn_pool", "forward_head", "reset_classifier",
    "prune_intermediate_layers", "set_input_size", "no_weight_decay", "feature_info", "head_hidden_size",
}  # fmt: skip


def timm_names_used() -> dict[str, set[str]]:
    """What the package imports from each module of timm."""
    used: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "timm":
                used.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return used


def test_the_names_of_timm_that_we_use_exist_and_few_are_private() -> None:
    used = timm_names_used()
    assert {module: names for module, names in used.items() if "._" in module} == PRIVATE
    for module, names in used.items():
        for name in names:
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"
    vit = timm.create_model("vit_tiny_patch16_224", depth=1)
    assert not [name for name in USED_OF_VIT if not hasattr(vit, name)]


def test_the_range_of_timm_is_stated_and_holds_the_installed_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [needed] = [each for each in map(Requirement, project["dependencies"]) if each.name == "timm"]
    assert {clause.operator for clause in needed.specifier} == {">=", "<"}
    assert needed.specifier.contains(timm.__version__)


# timm's hub format, transformers


@pytest.mark.parametrize("bank", ["input", "learn"])
@torch.no_grad()
def test_a_wrapped_vit_saved_by_timm_is_loaded_by_timm_and_transformers(bank: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification, TimmWrapperForImageClassification, TimmWrapperModel

    model, x = wrapped(bank, reg_tokens=1, global_pool="avg"), images()
    timm.models.save_for_hf(model, str(tmp_path), **adatape.hub_settings(model), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))
    assert again.pretrained_cfg["input_size"] == [3, 32, 32]
    for kind in (TimmWrapperForImageClassification, AutoModelForImageClassification):
        assert torch.equal(kind.from_pretrained(tmp_path).eval()(x).logits, model(x))
    hidden = TimmWrapperModel.from_pretrained(tmp_path).eval()(x, output_hidden_states=True)
    assert torch.equal(hidden.last_hidden_state, model.forward_features(x))
    assert len(hidden.hidden_states) == 3


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_other_kinds_of_wrapped_vits_are_the_same_when_timm_loads_them(kind: str, tmp_path: Path) -> None:
    name, options = VITS[kind]
    vit = timm.create_model(name, **{**VIT, **options, "drop_rate": 0.1}).eval()
    model = adatape.wrap(vit, **READS)
    nn.init.constant_(model.gate.open, 0.1)  # type: ignore[union-attr]
    timm.models.save_for_hf(model, str(tmp_path), **adatape.hub_settings(model), safe_serialization=True)
    assert torch.equal(timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(images()), model(images()))


@pytest.mark.parametrize("kind", ["AugReg", "MAE, mean of patches and a norm", "DeiT, distilled", "EVA-02", "DINOv3"])
@torch.no_grad()
def test_timm_loads_a_wrapped_vit_for_other_images_as_it_loads_a_vit(kind: str, tmp_path: Path) -> None:
    """As timm's train.py with --img-size or --in-chans: positions are resampled, and channels summed."""
    name, options = VITS[kind]
    model = adatape.wrap(timm.create_model(name, **{**VIT, **options}).eval(), **READS)
    nn.init.constant_(model.gate.open, 0.1)  # type: ignore[union-attr]
    timm.models.save_for_hf(model, str(tmp_path), **adatape.hub_settings(model), safe_serialization=True)
    grey = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, in_chans=1).eval()
    x = images()[:, :1]
    torch.testing.assert_close(grey(x), model(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=48).eval()
    model.set_input_size(48)
    assert torch.equal(larger(images(2, 48)), model(images(2, 48)))


@pytest.mark.parametrize("pool", ["avg", "max", "token"])
@pytest.mark.parametrize("kind", ["AugReg", "CLIP", "EVA-02", "DINOv3", "SigLIP, attention pooling"])
@torch.no_grad()
def test_a_wrapped_vit_whose_pooling_was_changed_is_the_same_when_timm_loads_it(
    kind: str, pool: str, tmp_path: Path
) -> None:
    """The tape is still read for the query that it was built with."""
    name, options = VITS[kind]
    model = adatape.wrap(timm.create_model(name, **{**VIT, **options}).eval(), **READS)
    model.reset_classifier(7, "avg" if model.vit.cls_token is None else pool)
    nn.init.constant_(model.gate.open, 0.1)  # type: ignore[union-attr]
    timm.models.save_for_hf(model, str(tmp_path), **adatape.hub_settings(model), safe_serialization=True)
    assert torch.equal(timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(images()), model(images()))


@pytest.mark.parametrize("channels", [1, 2, 4])
@torch.no_grad()
def test_a_wrapped_vit_of_other_channels_saved_by_timm_is_the_same_when_loaded(channels: int, tmp_path: Path) -> None:
    """Also once it is saved again: timm would convert or draw anew a first layer of other than 3 channels."""
    x, model = torch.randn(2, channels, 32, 32), wrapped(in_chans=channels)
    logits = model(x)
    for folder in (tmp_path / "once", tmp_path / "again"):
        timm.models.save_for_hf(model, str(folder), **adatape.hub_settings(model), safe_serialization=True)
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        assert torch.equal(model(x), logits)


@torch.no_grad()
def test_a_reader_of_windows_saved_by_timm_is_the_same_when_loaded(tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", **{**VIT, "depth": 2})
    model, x = adatape.wrap(vit, "windows", image=(96, 128), window=32, steps=2).eval(), torch.rand(2, 3, 96, 128)
    timm.models.save_for_hf(model, str(tmp_path), **adatape.hub_settings(model), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))
    assert timm.data.resolve_model_data_config(again)["input_size"] == [3, 96, 128]


@torch.no_grad()
def test_a_release_is_loaded_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    model, labels = wrapped(), ["ant", "bee", "cat", "dog", "elk"]
    options = {"num_classes": 5, **adatape.hub_settings(model)["model_args"]}
    release(model, "adatape", options, tmp_path / "r", result={"accuracy": 0.5}, command="-", classes=labels)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "r").eval()
    assert torch.equal(loaded(images()).logits, model(images()))
    assert list(loaded.config.id2label.values()) == labels


class OtherBank(Bank):
    size = 80

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.new_zeros(80, 64)


def test_what_timm_could_not_build_again_is_refused_when_saving(tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", **VIT)
    with pytest.raises(ValueError, match="the bank is a OtherBank, which timm cannot build"):
        adatape.hub_settings(adatape.wrap(vit, OtherBank()))
    changed = wrapped()
    changed.vit.blocks[1].mlp.act = nn.ReLU()
    with pytest.raises(ValueError, match=r"the ViT is not vit_tiny_patch16_224.* instead of .*GELU"):
        adatape.hub_settings(changed)
    scaled = wrapped()
    scaled.rescale = Rescale((0.4,) * 3, (0.2,) * 3)
    with pytest.raises(
        ValueError, match=r"a run that scales images itself, which timm would not; use `adatape release`"
    ):
        adatape.hub_settings(scaled)
    turned = timm.create_model("eva02_tiny_patch14_224", **VIT, rope_temperature=100.0)
    with pytest.raises(ValueError, match=r"rope\.temperature 100\.0 instead of rope\.temperature 10000\.0"):
        adatape.hub_settings(adatape.wrap(turned, **READS))
    model = wrapped()
    timm.models.save_for_hf(model, str(tmp_path))
    with pytest.raises(ValueError, match=r"backbone is None; .*\*\*adatape\.hub_settings\(model\)"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


# PEFT, int8


@pytest.mark.parametrize("targets", ["all-linear", ["qkv", "proj"]], ids=str)
@pytest.mark.parametrize("bank", ["input", "learn"])
def test_lora_reads_the_same_tokens_on_both_paths(bank: str, targets: Any) -> None:
    from peft import LoraConfig, get_peft_model

    plain = wrapped(bank)
    model = get_peft_model(wrapped(bank), LoraConfig(target_modules=targets, init_lora_weights=False)).eval()
    assert_paths_agree(model)
    if bank == "input" and targets == "all-linear":
        assert not torch.equal(both_paths(model, images())[0].tape.index, both_paths(plain, images())[0].tape.index)  # type: ignore[union-attr]


def test_a_bank_of_rows_goes_through_an_adapted_patch_embedding() -> None:
    from peft import LoraConfig, get_peft_model

    model = timm.create_model("adatape_tiny_patch16_224", **{**VIT, **REGISTERED}).eval()
    tuned = get_peft_model(model, LoraConfig(target_modules=["h1.proj"], init_lora_weights=False)).eval()
    assert_paths_agree(tuned)
    bank = tuned.base_model.model.bank
    adapted = bank(images())
    with tuned.disable_adapter():
        assert (bank(images()) - adapted).abs().max() > 1e-3


def test_lora_with_the_tapes_modules_trains_gates_and_keeps_the_budget(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = wrapped(opened=False)
    names = adatape.tape_modules(model)
    assert names == ["bank", "reader.norm", "append_mlp.fc1", "append_mlp.fc2", "gate"]
    settings = LoraConfig(target_modules="all-linear", modules_to_save=[*names, "vit.head"])
    tuned = get_peft_model(model, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.train()
    F.cross_entropy(tuned(images()), torch.arange(4)).backward()
    trained = {name for name, parameter in tuned.named_parameters() if parameter.grad is not None}
    assert any("gate" in name for name in trained)
    assert not any("vit.blocks" in name and "lora" not in name for name in trained)
    model.set_budget(3)
    assert model.budget() == adatape.models.AdaTape.budget(model)
    assert both_paths(tuned.eval(), images())[0].tape.length.max() == 3  # type: ignore[union-attr]
    assert_paths_agree(tuned)
    with torch.no_grad():
        model.gate.open.fill_(0.1)  # type: ignore[union-attr]
    tuned.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(wrapped(opened=False), tmp_path).eval()
    loaded.base_model.model.set_budget(3)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images()), tuned(images()))
    merged = loaded.merge_and_unload()
    opened = merged.bank.open(images(), torch.zeros(4, 1, 64), torch.zeros(4, 64))
    assert type(opened) is PatchView, "a merged model reads as fast as before"
    assert_paths_agree(merged)
    torch.testing.assert_close(merged(images()), tuned(images()), rtol=1e-4, atol=1e-4)


def test_an_adapter_that_attention_reads_past_is_warned_of_and_works_by_the_line_that_is_named() -> None:
    from peft import LoraConfig, get_peft_model

    name, options = VITS["EVA-02"]
    model = adatape.wrap(timm.create_model(name, **{**VIT, **options}), **READS)
    settings = LoraConfig(target_modules=["qkv"], modules_to_save=adatape.tape_modules(model))
    tuned = get_peft_model(model, settings)
    with pytest.warns(UserWarning, match=r"vit.blocks.0.attn reads the weight of its qkv, .*qkv_bias_separate = True"):
        tuned.train()
    for block in model.vit.blocks:
        block.attn.qkv_bias_separate = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.train()
    F.cross_entropy(tuned(images()), torch.arange(4)).backward()
    added = [parameter.grad for name, parameter in tuned.named_parameters() if "lora_B" in name]
    assert len(added) == 3
    assert all(grad is not None and grad.any() for grad in added)
    assert name in adatape.hub_settings(tuned.merge_and_unload())["model_args"]["backbone"]


def test_gates_left_frozen_by_an_adapter_are_warned_of() -> None:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(wrapped(opened=False), LoraConfig(target_modules=["qkv"]))
    with pytest.warns(UserWarning, match=r"gates of the tape are frozen at 0.*modules_to_save=adatape\.tape_modules"):
        tuned.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(opened=False).requires_grad_(False).train()  # nothing trains
        get_peft_model(wrapped(), LoraConfig(target_modules=["qkv"])).train()  # trained before
    with pytest.raises(TypeError, match="a Linear without a tape"):
        adatape.tape_modules(nn.Linear(1, 1))


@pytest.mark.parametrize("bank", ["input", "learn"])
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchaos_int8_reads_the_same_tokens_on_both_paths(config: str, bank: str) -> None:
    from torchao import quantization

    model, exact = wrapped(bank), wrapped(bank)
    quantization.quantize_(model, getattr(quantization, config)())
    assert type(model.vit.blocks[0].mlp.fc1.weight) is not nn.Parameter
    assert_paths_agree(model)
    with torch.no_grad():
        assert (model(images()) - exact(images())).abs().max() < 0.2 * exact(images()).abs().max()


def replace_linear(module: nn.Module, kind: Any) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            layer = kind(child.in_features, child.out_features, child.bias is not None, has_fp16_weights=False)
            layer.load_state_dict(child.state_dict())
            setattr(module, name, layer)
        else:
            replace_linear(child, kind)


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_bitsandbytes_int8_reads_the_same_tokens_on_both_paths(bank: str) -> None:
    import bitsandbytes

    model, exact = wrapped(bank), wrapped(bank)
    replace_linear(model, bitsandbytes.nn.Linear8bitLt)
    model.to("cpu")  # quantises the weights
    assert model.vit.blocks[0].mlp.fc1.weight.dtype == torch.int8
    assert_paths_agree(model)
    with torch.no_grad():
        assert (model(images()) - exact(images())).abs().max() < 0.2 * exact(images()).abs().max()


# Trainers


def test_accelerate_trains_and_restores(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = wrapped(opened=False).train()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    accelerator.backward(F.cross_entropy(prepared(images()), torch.arange(4)))
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    after = model.eval()(images())
    with torch.no_grad():
        model.gate.open.zero_()  # type: ignore[union-attr]
        assert not torch.equal(model(images()), after)
    accelerator.load_state(str(tmp_path))
    assert torch.equal(model(images()), after)


def test_lightning_trains(tmp_path: Path) -> None:
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = wrapped(opened=False)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            output = self.model(batch[0], output=True)
            return self.model.loss(output, batch[1], ponder_weight=0.01)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return create_optimizer_v2(self.model, "adamw", lr=1e-2)

    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images(8), torch.arange(8) % 5), 4)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    assert module.model.gate.open.any()  # type: ignore[union-attr]


# Graphs, other devices and sizes


def test_a_wrapped_vit_exports_with_gradients_enabled(tmp_path: Path) -> None:
    import onnxruntime

    model, x = wrapped(depth=2), images()
    model.set_budget(1)
    assert torch.is_grad_enabled()
    free = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(model, (x,), dynamic_shapes=free)
    torch.testing.assert_close(program.module()(images(3)), model(images(3)), rtol=1e-5, atol=1e-5)
    torch.onnx.export(program, f=tmp_path / "m.onnx", dynamo=True, verbose=False, dynamic_shapes=free)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    [logits] = session.run(None, {"x": images(3).numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(images(3)).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("bank", ["input", "learn"])
def test_a_forward_on_the_meta_device_gives_shapes(bank: str, use_kernels: bool) -> None:
    model = wrapped(bank).to("meta")
    model.reader.use_kernels = use_kernels
    output = model(images().to("meta"), output=True)
    assert isinstance(output, Output)
    assert output.tape is not None
    assert (output.logits.shape, output.tape.tokens.shape) == ((4, 5), (4, 6, 64))


@pytest.mark.parametrize("name", ["adatape_tiny_patch16_224", "plainvit_tiny_patch16_224", "ponder_tiny_patch16_224"])
@torch.no_grad()
def test_a_model_built_without_memory_is_the_same_once_its_weights_are_loaded(name: str) -> None:
    model = timm.create_model(name, **VIT, **({"bank_patch": 4, "steps": 3} if "adatape" in name else {})).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    assigned, emptied = (copy.deepcopy(model).to("meta") for _ in range(2))
    assigned.load_state_dict(model.state_dict(), assign=True)
    emptied.to_empty(device="cpu").load_state_dict(model.state_dict())
    for other in (assigned, emptied):
        reinit_non_persistent_buffers(other)
        assert torch.equal(other(images()), model(images()))


@pytest.mark.parametrize("name", ["ut", "u2t", "uvit", "ponder", "avit"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_models_of_adaptive_depth_are_mapped_over_samples(name: str) -> None:
    model = timm.create_model(f"{name}_tiny_patch16_224", **VIT, **({} if name == "avit" else {"steps": 3})).eval()
    each = torch.func.vmap(lambda image: model(image[None])[0])(images())
    torch.testing.assert_close(each, model(images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("size", [(48, 32), (24, 40), (64, 64)])
@torch.no_grad()
def test_images_of_any_size_are_read_as_after_set_input_size(size: tuple[int, int], kernels: bool) -> None:
    wide = torch.randn(2, 3, *size)
    assert wrapped("learn", dynamic_img_size=True)(wide).shape == (2, 5)
    model, fixed = (wrapped(dynamic_img_size=True) for _ in range(2))
    fixed.set_input_size(size)
    for each in (model, fixed):
        each.reader.use_kernels = kernels
    mine, theirs = (each(wide, output=True) for each in (model, fixed))
    assert torch.equal(mine.tape.index, theirs.tape.index)
    assert mine.tape.index.max() >= min(model.bank.size, size[0] * size[1] // 16) // 2
    torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    assert (fixed.bank.size, model.bank.size) == (size[0] * size[1] // 16, 64)
    model.set_budget(0)
    assert torch.equal(model(wide), model.vit(wide))
    assert torch.equal(model(images()), model.vit(images()))


@pytest.mark.parametrize(
    ("size", "message"),
    [((30, 32), "images are 30 × 32 and the bank's patches 4 × 4"), (16, "steps is 6; it needs 24 .* the bank has 16")],
)
def test_an_input_size_that_the_bank_cannot_give_is_refused_at_once(size: Any, message: str) -> None:
    model = wrapped()
    before = model(images())
    with pytest.raises(ValueError, match=message):
        model.set_input_size(size)
    assert torch.equal(model(images()), before)
    model.set_budget(3)
    model.set_input_size(16)
    assert model(images(size=16)).shape == (4, 5)


def test_patches_of_another_size_are_set_as_by_timm() -> None:
    model = wrapped(opened=False)
    before = model.bank(images())
    model.set_input_size(patch_size=(16, 16))
    torch.testing.assert_close(model(images()), model.vit(images()), rtol=1e-4, atol=1e-4)
    assert torch.equal(model.bank(images()), before)


def test_a_shut_tape_of_an_image_of_another_size_changes_nothing_and_its_positions_learn() -> None:
    model, wide = wrapped(opened=False, dynamic_img_size=True), torch.randn(2, 3, 48, 32)
    torch.testing.assert_close(model(wide), model.vit(wide), rtol=1e-4, atol=1e-5)
    model = wrapped(dynamic_img_size=True).train()
    model(wide).sum().backward()
    assert model.bank.pos_embed.grad.norm() > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["EVA-02", "DINOv3, drawn coordinates", "RoPE, mixed"])
@torch.no_grad()
def test_images_of_any_size_have_rotary_positions_of_their_own_grid(kind: str) -> None:
    name, options = VITS[kind]
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        vit = timm.create_model(name, **{**VIT, **options, "dynamic_img_size": True})
        made.append(adatape.wrap(vit, **READS).eval())  # type: ignore[call-overload]
        torch.nn.init.constant_(made[-1].gate.open, 0.05)
    model, fixed = made
    fixed.set_input_size((48, 32))
    wide = torch.randn(2, 3, 48, 32)
    torch.testing.assert_close(model(wide), fixed(wide), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_an_image_of_another_size_costs_is_what_torch_counts() -> None:
    model = wrapped(dynamic_img_size=True)
    model.reader.never_halt()
    own = total(cost(model)).macs
    for size in ((48, 32), (24, 40)):
        assert total(cost(model, image=size)).macs == counted(model, torch.randn(1, 3, *size)) != own
    assert total(cost(model)).macs == own == counted(model, images(1))
    assert total(cost(model.vit, image=(48, 32))).macs == counted(model.vit, torch.randn(1, 3, 48, 32))


def test_a_size_that_the_banks_patch_does_not_divide_is_refused() -> None:
    model = wrapped(dynamic_img_size=True, dynamic_img_pad=True)
    assert model.vit(torch.randn(1, 3, 50, 32)).shape == (1, 5)
    assert model(torch.randn(1, 3, 44, 32)).shape == (1, 5)  # the ViT pads it to 48
    with pytest.raises(ValueError, match=r"images are 50 × 32 and the bank's patches 4 × 4; they must divide both"):
        model(torch.randn(1, 3, 50, 32))
    with pytest.raises(ValueError, match=r"bank has 16 tokens; steps × merge needs 24"):
        model(torch.randn(1, 3, 16, 16))
    with pytest.raises(AssertionError, match="Input height"):
        wrapped()(torch.randn(1, 3, 48, 32))


def test_fx_is_refused_with_what_to_use_instead() -> None:
    from torchvision.models.feature_extraction import create_feature_extractor

    with pytest.raises(TypeError, match=r"torch\.fx cannot trace .* forward_intermediates"):
        create_feature_extractor(wrapped(), ["vit.blocks.1"])


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")
def test_jit_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(TypeError, match=r"torch\.jit cannot trace an adaptive model.* use torch\.export"):
        torch.jit.trace(wrapped(), images())


@pytest.mark.parametrize("bank", ["input", "learn"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_gives_every_samples_own_gradient(bank: str) -> None:
    from torch.func import functional_call, grad, vmap

    model, x = wrapped(bank), images()
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(model, parameters, (image[None],)).square().sum()

    found = vmap(grad(loss), (None, 0))(own, x)
    for row in range(4):
        model.zero_grad()
        model(x[row : row + 1]).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][row], parameter.grad, rtol=1e-3, atol=1e-4)


# The table


def test_every_row_of_the_table_names_a_test_and_the_pinned_version() -> None:
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs" / "tools.md").read_text().splitlines() if line[:1] == "|"]
    header, _, *rows = [[cell.strip() for cell in row] for row in rows]
    assert header == ["tool", "version", "what works", "what to write", "test"]
    tests = {f"`{name}`" for name in globals() if name.startswith("test_")}
    assert len(rows) > 15
    assert [row[-1] for row in rows if row[-1] not in tests] == []
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for tool, version, *_ in rows:
        package = tool.partition(":")[0].partition(" ")[0].strip("`").lower().replace("lightning", "pytorch-lightning")
        assert pinned[package] == version, tool
