"""Cost formulas against PyTorch's FLOP counter and the paper's tables."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import adatape.models  # noqa: F401  registers the models
from adatape.config import ReaderConfig, SequenceModel
from adatape.data.parity import held_out_set
from adatape.evaluate.cost import cost, total
from adatape.models.sequence import build_sequence_model

# GFLOPs of the paper's AdaTape rows: GLU at append and in the blocks, 18,291 classes, all ten tokens.
PAPER = {
    ("base", 32, "learn"): 5.585,
    ("base", 16, "learn"): 18.837,
    ("large", 32, "learn"): 19.497,
    ("large", 16, "learn"): 65.941,
    ("base", 32, "input"): 6.057,
    ("base", 16, "input"): 19.304,
    ("large", 32, "input"): 20.141,
    ("large", 16, "input"): 66.570,
}
OPTIONS = [
    {},
    {"bank": "learn"},
    {"bank": "learn", "tape_ffn": "blocks", "bank_size": 300},
    {"tape_ffn": "append+blocks"},
    {"tape_ffn": "none", "layer": 3},
    {"tape_ffn": "append+blocks", "layer": 0, "reg_tokens": 2},
    {"gate": True},
    {"gate": True, "tape_ffn": "append+blocks", "bank": "learn", "bank_size": 300},
    {"reader": "parallel"},
    {"reader": "fixed"},
    {"reader": "act"},
    {"reader": "act-after-norm", "tape_ffn": "blocks", "bank": "learn", "bank_size": 300},
]


def counted(model: torch.nn.Module, x: torch.Tensor) -> int:
    """Multiply-adds of one forward, without fused attention, which torch before 2.15 does not count on a CPU."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval().requires_grad_(False)(x)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(("model", "gflops"), PAPER.items())
def test_gflops_are_the_papers_within_six_parts_in_a_thousand(model: tuple[str, int, str], gflops: float) -> None:
    size, patch, bank = model
    with torch.device("meta"):
        name = f"adatape_{size}_patch{patch}_224"
        built = timm.create_model(name, bank=bank, tape_ffn="append+blocks", num_classes=18291)
    assert total(cost(built)).macs / 1e9 == pytest.approx(gflops, rel=0.006)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tape", [10, 3, 0])
def test_the_formula_equals_the_counter_to_the_last_multiply(options: dict, tape: int) -> None:
    model = timm.create_model("adatape_tiny_patch32_224", depth=4, **options)
    bound, shorter = cost(model), cost(model, tape)
    model.set_budget(steps=tape)
    model.never_halt()
    assert total(cost(model)) == total(shorter)
    assert total(shorter).macs == counted(model, torch.randn(1, 3, 224, 224))
    assert total(shorter).macs <= total(bound).macs


@pytest.mark.parametrize("bank", ["input", "learn"])
@torch.no_grad()
def test_a_tape_that_ends_early_costs_a_cpu_what_its_length_costs(bank: str) -> None:
    model = timm.create_model("adatape_tiny_patch32_224", depth=4, bank=bank, norm_scale=2.0).eval()
    image = torch.randn(1, 3, 224, 224)
    output = model(image, output=True)
    assert 0 < output.tape.length.item() < 10
    assert counted(model, image) == model.actual_macs(output).item() < total(cost(model)).macs


@pytest.mark.parametrize("options", OPTIONS)
def test_every_parameter_belongs_to_one_part(options: dict) -> None:
    model = timm.create_model("adatape_tiny_patch32_224", depth=4, **options)
    assert total(cost(model)).parameters == sum(p.numel() for p in model.parameters())


def test_a_plain_vit_is_counted_by_the_same_formula() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", depth=2)
    assert total(cost(vit)).macs == counted(vit, torch.randn(1, 3, 224, 224))
    with torch.device("meta"):
        base = timm.create_model("vit_base_patch16_224", num_classes=18291)
    assert total(cost(base)).macs / 1e9 == pytest.approx(17.634, rel=0.006)


@pytest.mark.parametrize("reading", [None, ReaderConfig(4, 2.0, 2, 32)])
def test_sequence_models_are_counted_too(reading: ReaderConfig | None) -> None:
    config = SequenceModel(width=48, depth=2, reading=reading)
    if reading is not None:
        config = dataclasses.replace(config, layer=0, tape_ffn="append+blocks")
    model = build_sequence_model(config, length=8)
    assert total(cost(model)).macs == counted(model, held_out_set(8, 1).symbols)


def test_an_impossible_tape_and_an_unknown_model_are_refused() -> None:
    with pytest.raises(ValueError, match="tape is 11; it must be between 0 and 10"):
        cost(timm.create_model("adatape_tiny_patch32_224", depth=2), tape=11)
    with pytest.raises(TypeError, match="no cost formula for ResNet"):
        cost(timm.create_model("resnet18"))
