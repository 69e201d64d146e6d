"""Recipes match the paper's tables, and each runs for three steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from small_runs import noise_arrays
from words import experiment_of

from adatape.config import Experiment, ImageModel, from_dict, to_dict
from adatape.data_config import Images
from adatape.recipes import RECIPES
from adatape.recipes.digits import digits
from adatape.recipes.imagenet import deit, imagenet, plainvit, pretrain
from adatape.recipes.systems import System
from adatape.train.optim import Stepper, rate_at
from adatape.train.task import build_for, build_image_model
from adatape.train.trainer import Trainer

OF_IMAGES = [name for name in RECIPES if not name.startswith("parity") and name not in ("scenes", "megapixel")]


def made(name: str, **options: object) -> Experiment:
    needed = {"path": "somewhere"} if name in ("images", "finetune", "scenes", "megapixel") else {}
    return RECIPES[name](**needed, **options)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(noise_arrays(tmp_path_factory.mktemp("arrays")))


def shrunk(experiment: Experiment, arrays: str) -> Experiment:
    """The recipe's loss, schedule, augmentation and family with a small model and a few small images."""
    assert isinstance(experiment.data, Images)
    assert isinstance(experiment.model, ImageModel)
    data = dataclasses.replace(
        experiment.data, source="arrays", path=arrays, size=64, validate_on=None, classes=None, samples=None
    )
    small = {"embed_dim": 64, "num_heads": 2, "depth": 2, "patch_size": 16}
    tape = {name: value for name, value in (("bank_patch", 8), ("bank_size", 80)) if name in experiment.model.options}
    name = experiment.model.name.replace(".augreg_in21k_ft_in1k", "")
    model = dataclasses.replace(experiment.model, name=name, options={**experiment.model.options, **small, **tape},
                                pretrained=None)  # fmt: skip
    optimizer = dataclasses.replace(experiment.optimizer, steps=3, warmup=1, batch=4)
    engine = dataclasses.replace(experiment.engine, compile=False)
    return dataclasses.replace(experiment, data=data, model=model, optimizer=optimizer, engine=engine)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_every_recipe_takes_three_steps(name: str, arrays: str) -> None:
    trainer = Trainer(shrunk(made(name), arrays))
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    losses = [float(stats.loss) for stats in trainer.train(3)]
    assert len(losses) == 3
    assert all(np.isfinite(losses))
    assert any(not torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert 0 <= trainer.evaluate().accuracy <= 1


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_its_json(name: str) -> None:
    experiment = made(name)
    assert from_dict(Experiment, json.loads(json.dumps(to_dict(experiment)))) == experiment


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_its_command(name: str) -> None:
    said = RECIPES[name].__doc__ or ""
    assert f"train {name}" in said, "the docstring gives the command"
    assert len(said.splitlines()[0]) <= 120


@pytest.mark.parametrize("system", get_args(System))
def test_every_system_learns_digits_a_little(system: str) -> None:
    experiment = digits(system=system, epochs=4, lr=2e-3)
    trainer = Trainer(experiment)
    losses = [float(stats.loss) for stats in trainer.train(30)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_imagenet_is_the_papers_table() -> None:
    """lr 1e-3, 10,000 warm-up steps, cosine; decoupled decay 1e-4 (Ti) and 8e-5 (S, B); its augmentation."""
    for size, decay, smoothing, mixup, magnitude in (
        ("tiny", 1e-4, 0.0, 0.2, 10.0),
        ("small", 8e-5, 0.1, 0.5, 15.0),
        ("base", 8e-5, 0.1, 0.5, 15.0),
    ):
        experiment = imagenet(size=size)
        optimizer, augment = experiment.optimizer, experiment.data.augment
        assert (optimizer.lr, optimizer.warmup, optimizer.batch) == (1e-3, 10_000, 1024)
        assert (optimizer.schedule, optimizer.betas, optimizer.clip) == ("cosine", (0.9, 0.999), 1.0)
        assert optimizer.lr * optimizer.weight_decay == pytest.approx(decay)
        assert (augment.smoothing, augment.mixup) == (smoothing, mixup)
        assert (augment.randaug, augment.magnitude, augment.crop, augment.flip) == (2, magnitude, "inception", True)
        assert optimizer.steps == 300 * (1_281_167 // 1024)
        assert experiment.ponder_weight == 0.01
        assert experiment.model.name == f"adatape_{size}_patch16_224"


def test_plainvit_and_deit_are_their_papers() -> None:
    plain, data_efficient = plainvit(), deit()
    assert (plain.optimizer.weight_decay, plain.optimizer.decay, plain.data.augment.mixup) == (0.1, "matrices", 0.2)
    assert plain.data.validate_on == 0.01
    assert plain.optimizer.steps == 90 * (1_281_167 // 1024)
    assert (data_efficient.optimizer.lr, data_efficient.optimizer.weight_decay) == (1e-3, 0.05)
    assert (data_efficient.optimizer.clip, data_efficient.optimizer.ema) == (None, 0.99996)
    augment = data_efficient.data.augment
    assert (augment.mixup, augment.cutmix, augment.erase, augment.repeats) == (0.8, 1.0, 0.25, 3)
    assert data_efficient.model.options["drop_path_rate"] == 0.1


def test_pre_training_is_seven_epochs_of_linear_decay_on_every_tensor() -> None:
    experiment = pretrain()
    assert (experiment.optimizer.schedule, experiment.optimizer.decay) == ("linear", "all")
    assert experiment.model.options["tape_ffn"] == "append+blocks"
    assert experiment.optimizer.steps * experiment.optimizer.batch == pytest.approx(7 * 14_197_122, rel=1e-3)


def test_schedules_reach_their_ends() -> None:
    optimizer = dataclasses.replace(deit().optimizer, steps=100, warmup=10)
    rates = [rate_at(optimizer, step) for step in range(100)]
    assert max(rates) == rates[9] == rates[10] == optimizer.lr
    assert rates[0] == pytest.approx(optimizer.lr / 10)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rate_at(optimizer, 100) == pytest.approx(optimizer.floor)
    assert rate_at(dataclasses.replace(optimizer, schedule="linear", floor=0.0), 55) == pytest.approx(optimizer.lr / 2)


def test_decay_spares_vectors_and_positions_unless_it_takes_all() -> None:
    model = Trainer(digits()).model
    by_kind = {}
    for kind in ("matrices", "all"):
        settings = dataclasses.replace(digits().optimizer, decay=kind)
        groups = Stepper(model, settings).adamw.param_groups
        decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        by_kind[kind] = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert by_kind["all"] == {name for name, _ in model.named_parameters()}
    assert "vit.blocks.0.mlp.fc1.weight" in by_kind["matrices"]
    assert not {n for n in by_kind["matrices"] if n.endswith("bias") or "norm" in n or "pos_embed" in n}


def test_the_tape_alone_can_be_trained(arrays: str) -> None:
    experiment = shrunk(made("finetune", trains="tape"), arrays)
    trainer = Trainer(experiment)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for _ in trainer.train(2):
        pass
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(not name.startswith("vit.") or name.startswith("vit.head") for name in moved)


def test_pretrained_weights_come_from_a_file(arrays: str, tmp_path: Path) -> None:
    experiment = shrunk(made("finetune"), arrays)
    options = experiment.model.options
    vit = timm.create_model("vit_base_patch16_224", img_size=64, num_classes=7, **options)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    model = dataclasses.replace(experiment.model, pretrained=str(tmp_path / "vit.safetensors"))
    wrapped = Trainer(dataclasses.replace(experiment, model=model)).model
    assert torch.equal(wrapped.vit.blocks[0].attn.qkv.weight, vit.blocks[0].attn.qkv.weight)
    assert wrapped.num_classes == 4


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (lambda vit: {f"vit.{name}": value for name, value in vit.items()}, "2 of 2 blocks .* begins with vit.blocks"),
        (lambda vit: {name: value for name, value in vit.items() if "s.1." not in name}, "1 of 2 blocks .*s.1 the f"),
        (lambda vit: {**vit, "norm.weight": torch.ones(7)}, "model.pretrained has weights that do not fit vit_tiny"),
    ],
)
def test_a_file_without_the_weights_of_the_vit_is_refused(stored: Any, message: str, tmp_path: Path) -> None:
    """timm passes over names that differ, and would train such a ViT from random weights."""
    shape = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 16}
    save_file(stored(timm.create_model("vit_tiny_patch16_224", **shape).state_dict()), tmp_path / "vit.safetensors")
    options = {name: value for name, value in shape.items() if name != "img_size"}
    model = ImageModel("vit_tiny_patch16_224", options, str(tmp_path / "vit.safetensors"), wrap={"bank": "learn"})
    with pytest.raises(ValueError, match=message):
        build_image_model(model, 32, 3, 4)


def test_fine_tuning_leaves_the_bank_patch_to_wrap_and_can_do_without_a_tape(arrays: str) -> None:
    assert made("finetune").model.wrap == {"bank": "input"}
    assert made("finetune", bank_patch=4).model.wrap == {"bank": "input", "patch": 4}
    odd = shrunk(made("finetune"), arrays)
    options = {**odd.model.options, "patch_size": 10}
    odd = dataclasses.replace(
        odd, data=dataclasses.replace(odd.data, size=60), model=dataclasses.replace(odd.model, options=options)
    )
    assert build_for(odd).tape_bank().patch == 5
    plain = shrunk(made("finetune", bank="none"), arrays)
    assert build_for(plain).tape_bank() is None
    assert plain.ponder_weight == 0
    with pytest.raises(ValueError, match="bank_patch is 8; bank 'none' has no patches"):
        made("finetune", bank="none", bank_patch=8)


def test_words_are_keywords_of_the_recipe_or_fields_of_its_experiment() -> None:
    text = "adatape patch=8 bank_patch=4 ponder_weight=0.5 model.options.patch_size=[4,8] model.options.reader=parallel"
    said = experiment_of(RECIPES["cifar100"], text, path="data", seed=3)
    assert (said.seed, said.ponder_weight) == (3, 0.5)
    assert said.model.options["patch_size"] == [4, 8]
    assert (said.model.options["bank_patch"], said.model.options["reader"]) == (4, "parallel")
    with pytest.raises(ValueError, match="petch is not a field"):
        experiment_of(RECIPES["cifar100"], "adatape petch=8", path="data")
