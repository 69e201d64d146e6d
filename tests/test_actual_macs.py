"""The multiply-adds of a sample are the cost formula at its own length, depth or tokens."""

from __future__ import annotations

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from adatape.evaluate.catalogue import typical_gflops
from adatape.evaluate.cost import cost, total
from adatape.models import AViT

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 4}
TAPE = {"depth": 2, "bank_patch": 4, "steps": 6, "threshold": 1.5, "merge": 4, "query_width": 32, "norm_scale": 2.0}
SYSTEMS = {
    "adatape_tiny_patch16_224": TAPE,
    "ut_tiny_patch16_224": {"steps": 6, "halting_bias": 0.0},
    "u2t_tiny_patch16_224": {"steps": 6, "halting_bias": 0.0},
    "uvit_tiny_patch16_224": {"steps": 6, "depth": 2, "halting_bias": 0.0},
    "avit_tiny_patch16_224": {"depth": 4, "gamma": 2.0, "beta": -1.0},
    "ponder_tiny_patch16_224": {"steps": 6},
    "plainvit_tiny_patch16_224": {"depth": 2},
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **SYSTEMS[name]}).eval()


def images(n: int) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_sample_costs_more_than_the_bound(name: str) -> None:
    model = build(name)
    spent, bound = model.actual_macs(model(images(24), output=True)), total(cost(model)).macs
    assert spent.shape == (24,)
    assert (spent <= bound).all()
    if name.startswith(("adatape", "ut", "u2t", "uvit", "avit", "ponder")):
        assert (spent < bound).any()
    else:
        assert (spent == bound).all()
    assert total(cost(model)).macs == bound


def test_a_tapes_cost_follows_its_length() -> None:
    model = build("adatape_tiny_patch16_224")
    output = model(images(24), output=True)
    assert output.tape.length.unique().numel() > 1
    for length, macs in zip(output.tape.length.tolist(), model.actual_macs(output).tolist(), strict=True):
        assert macs == total(cost(model, length)).macs


def test_the_counter_agrees_with_what_a_lone_sample_spends() -> None:
    """Alone, a UT stops where its one sample stops, and a packed A-ViT keeps that sample's tokens only."""
    for name in ("ut_tiny_patch16_224", "uvit_tiny_patch16_224", "avit_tiny_patch16_224"):
        model = build(name).requires_grad_(False)
        if isinstance(model, AViT):
            model.set_packed()
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
        for x in images(4).split(1):
            with FlopCounterMode(display=False) as counter:
                output = model(x, output=True)
            assert counter.get_total_flops() // 2 == model.actual_macs(output).item(), name


def test_typical_is_between_nothing_and_the_bound() -> None:
    model = build("adatape_tiny_patch16_224")
    assert 0 < typical_gflops(model) <= total(cost(model)).macs / 1e9


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_samples_have_whole_numbers_too(name: str) -> None:
    model = build(name)
    spent = model.actual_macs(model(images(0), output=True))
    assert (spent.shape, spent.dtype) == ((0,), torch.int64)
