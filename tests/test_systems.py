"""Properties of every system of the paper, with the same loss and training code."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import adatape.models  # noqa: F401  registers the models
from adatape.evaluate.cost import cost, total
from adatape.evaluate.paper import ROWS
from adatape.models.registry import default_cfgs

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 4}
TAPE = {"depth": 2, "bank_patch": 4, "bank_size": 80, "steps": 4, "threshold": 1.0, "merge": 4, "query_width": 32}
SYSTEMS = {
    "adatape input": ("adatape_tiny_patch16_224", TAPE),
    "adatape learn": ("adatape_tiny_patch16_224", {**TAPE, "bank": "learn", "tape_ffn": "append+blocks"}),
    "adatape parallel": ("adatape_tiny_patch16_224", {**TAPE, "reader": "parallel"}),
    "adatape fixed": ("adatape_tiny_patch16_224", {**TAPE, "reader": "fixed"}),
    "adatape act": ("adatape_tiny_patch16_224", {**TAPE, "reader": "act"}),
    "ut": ("ut_tiny_patch16_224", {"steps": 4}),
    "u2t": ("u2t_tiny_patch16_224", {"steps": 4}),
    "uvit": ("uvit_tiny_patch16_224", {"depth": 2}),
    "avit": ("avit_tiny_patch16_224", {"depth": 3, "beta": -3.0}),
    "ponder": ("ponder_tiny_patch16_224", {"steps": 4}),
    "plainvit": ("plainvit_tiny_patch16_224", {"depth": 2}),
    "vit3ffn": ("vit3ffn_base_patch28_224", {"depth": 2}),
}


def build(system: str) -> torch.nn.Module:
    torch.manual_seed(0)
    name, options = SYSTEMS[system]
    return timm.create_model(name, **{**SMALL, **options})


def sixty_four() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(64, 3, 32, 32, generator=draw), torch.randint(0, 4, (64,), generator=draw)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_learns_64_images_by_heart_under_one_loss(system: str) -> None:
    model, (x, label) = build(system).train(), sixty_four()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model.loss(model(x, output=True), label, ponder_weight=0.001).backward()
        optimizer.step()
        if (model(x).argmax(-1) == label).all():
            break
    assert (model(x).argmax(-1) == label).float().mean() > 0.98


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_saved_and_loaded_by_one_path(system: str, tmp_path: Path) -> None:
    model, other = build(system).eval(), build(system).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert torch.equal(model(sixty_four()[0]), other(sixty_four()[0]))


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_gives_output_and_features(system: str) -> None:
    model = build(system).eval()
    x = sixty_four()[0][:3]
    output = model(x, output=True)
    torch.testing.assert_close(output.logits, model(x), rtol=1e-5, atol=1e-6)
    assert output.features.shape == (3, 64)
    assert output.ponder.shape == (3,)
    assert model.forward_intermediates(x, indices=1, intermediates_only=True)[0].shape == (3, 64, 4, 4)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_answers_a_sample_alone_as_in_a_batch(system: str) -> None:
    model, x = build(system).eval(), sixty_four()[0][:4]
    alone = torch.cat([model(row) for row in x.split(1)])
    torch.testing.assert_close(alone, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_parameter_is_counted(system: str) -> None:
    model = build(system)
    assert total(cost(model)).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_the_papers_rows(row) -> None:
    """GFLOPs within 0.6 %, parameters as printed, truncated; deviations must be those in the notes."""
    with torch.device("meta"):
        whole = total(cost(timm.create_model(row.model, **row.options)))
    if row.gflops and "misprint" not in row.note:
        assert whole.macs / 1e9 == pytest.approx(row.gflops, rel=0.006)
    if row.parameters and not row.note:
        assert int(whole.parameters / 1e5) / 10 == row.parameters


@pytest.mark.parametrize(
    ("name", "millions"),
    [("vit_tiny_patch16_224", 5.717), ("vit_small_patch16_224", 22.051), ("vit_base_patch16_224", 86.568)],
)
def test_vit_and_deit_are_timms(name: str, millions: float) -> None:
    for model in (name, name.replace("vit", "deit")):
        with torch.device("meta"):
            whole = total(cost(timm.create_model(model)))
        assert round(whole.parameters / 1e6, 3) == millions


def test_features_only_works_for_every_registered_name_by_itself() -> None:
    for name in default_cfgs:
        if "large" in name or "base" in name:
            continue
        features = timm.create_model(name, features_only=True)
        assert features(torch.randn(1, 3, 224, 224))[-1].dim() == 4, name


def test_all_names_of_the_house_are_registered() -> None:
    for name in ("ut_tiny", "u2t_small", "u2t_base", "uvit_large", "avit_small", "ponder_tiny", "plainvit_base"):
        assert timm.is_model(f"{name}_patch16_224"), name
    for name in ("vit3ffn_base_patch14_224", "vit3ffn_base_patch28_224", "uvit_tiny_patch32_224"):
        assert timm.is_model(name), name
