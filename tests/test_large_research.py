"""Rivals in the studies of large images: shortcuts that change nothing, costs, and learning at a tiny size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from scripts import script
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adatape.evaluate.accuracy import mean_precision, precision_by_class

ROOT = Path(__file__).parents[1]


def canvases(count: int = 2) -> torch.Tensor:
    """Mostly empty, with a few strokes."""
    images = torch.zeros(count, 1500, 1500, dtype=torch.uint8)
    draw = torch.Generator().manual_seed(0)
    for image in images:
        for top, left in torch.randint(0, 1470, (12, 2), generator=draw).tolist():
            image[top : top + 28, left : left + 28] = torch.randint(1, 256, (28, 28), generator=draw)
    return images


@torch.no_grad()
def test_few_empty_patches_are_encoded_and_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = script("research/large/rivals.py")
    torch.manual_seed(0)
    model = rivals.Pooled(20, width=16).eval()
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(norm.running_mean, 0, 0.1)
    patches = rivals.patches_of(canvases())
    places = rivals.patch_centres(patches.device).expand(2, -1, -1)
    counts: list[int] = []
    handle = model.encoder.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
    quick, chosen = model.tokens(patches, places), model.highest(patches, places)
    handle.remove()
    assert set(counts) == {rivals.SHAPES}  # a stroke of 28 pixels lies in four patches at most, of 900 on a canvas
    monkeypatch.setattr(model, "encode_shown", model.encoder)
    torch.testing.assert_close(quick, model.tokens(patches, places))
    assert torch.equal(chosen, model.highest(patches, places))


def test_a_patch_that_is_left_out_has_no_gradient_and_training_goes_on() -> None:
    rivals = script("research/large/rivals.py")
    torch.manual_seed(0)
    model = rivals.Pooled(5, width=16).train()
    counts: list[int] = []

    def count(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        counts.extend([len(args[0])] if torch.is_grad_enabled() else [])

    model.encoder.register_forward_pre_hook(count)
    answers, _ = model(canvases())
    answers.sum().backward()
    assert counts == [2 * 5]
    assert model.training
    assert all(p.grad is not None for p in model.parameters())


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "vit.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224").state_dict(), path)
    return path


def test_algorithm_2_reads_patches_of_the_full_scene_at_the_cost_that_is_told(weights: Path) -> None:
    street = script("research/large/street.py")
    torch.manual_seed(0)
    model: Any = street.Algorithm2(weights).eval()
    scenes = torch.randn(2, 3, 160, 272)
    # Before 2.15 torch counts the CPU's fused attention as nothing.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        alone = model(scenes[:1])
    assert model.index.shape == (1, 10, 5)
    read = model.index[model.index >= 0]
    assert len(read.unique()) == len(read)
    assert read.max() < 10 * 17
    rest = 40 * 4 * 192 + 10 * 8 * 192 * 192 + 4 * 192  # the tape's feed-forward and the head are small beside
    assert abs(counter.get_total_flops() / 2 - model.macs(10 * 17)) < rest + 0.01 * model.macs(10 * 17)
    torch.testing.assert_close(model(scenes)[:1], alone, rtol=1e-3, atol=1e-4)


def test_algorithm_2_trains_in_all_its_parts(weights: Path) -> None:
    street = script("research/large/street.py")
    torch.manual_seed(0)
    model: Any = street.Algorithm2(weights)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    images, labels = torch.randn(4, 3, 160, 272), torch.eye(4)
    loss = street.fit(model, model.new, lambda at: images[at], labels, 3e-4, 2, 2)
    assert loss == loss
    still = [name for name, each in model.named_parameters() if torch.equal(each, before[name])]
    assert still == []


def test_a_scan_that_was_not_trained_is_refused_by_the_names_of_those_that_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, wide = script("research/large/street_run.py"), script("research/large/large_tables.py").WIDE
    assert f"--scans {wide}" in run.__doc__
    torch.save({"vit": {}, "head": {}, "16,32,48,48:1500:": {}}, tmp_path / "state.pt")
    given = ["--state", str(tmp_path / "state.pt"), "--path", "data", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["street_run.py", *given])
    with pytest.raises(SystemExit):
        run.main()
    assert f"plan is {wide}; {tmp_path / 'state.pt'} has 16,32,48,48:1500:" in capsys.readouterr().err


def test_scores_of_new_systems_join_the_stored_ones_if_they_are_of_the_same_scenes(tmp_path: Path) -> None:
    tables = script("research/large/large_tables.py")
    stored, labels = tmp_path / "stored.npz", np.eye(4, dtype=np.uint8)
    np.savez(stored, **{"labels": labels, "plain 224 seed 0": np.zeros((4, 4), np.float16)})
    np.savez(tmp_path / "street-scores-algorithm2-1.npz", **{"labels": labels, "algorithm2 10": np.ones((4, 4))})
    assert tables.add_scores(tmp_path, stored) == ["algorithm2 10 seed 1"]
    assert set(np.load(stored).files) == {"labels", "plain 224 seed 0", "algorithm2 10 seed 1"}
    np.savez(tmp_path / "street-scores-2.npz", **{"labels": labels[:2], "all 8": np.ones((2, 4))})
    with pytest.raises(ValueError, match="other scenes"):
        tables.add_scores(tmp_path, stored)


def test_equal_scores_share_their_last_rank_as_in_the_package() -> None:
    tables = script("research/large/large_tables.py")
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (60, 3), generator=generator).float()
    labels = (torch.rand(60, 3, generator=generator) < 0.3).float()
    names = ["a", "b", "c"]
    expected = mean_precision(precision_by_class(scores, labels, names))
    assert tables.mean_ap(scores.numpy(), labels.numpy()) == pytest.approx(expected)
    often = torch.randint(0, 3, (60,), generator=generator)
    drawn = torch.arange(60).repeat_interleave(often)
    expected = mean_precision(precision_by_class(scores[drawn], labels[drawn], names))
    assert tables.mean_ap(scores.numpy(), labels.numpy(), often.numpy()) == pytest.approx(expected)


def test_probabilities_at_every_budget_are_the_models_and_their_table_compares_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets, tables = script("research/large/street_budgets.py"), script("research/large/large_tables.py")
    out = tmp_path / "budgets.npz"
    rows = np.random.default_rng(0).random((40, 2)).astype(np.float32)
    stored = {"labels": (rows > 0.5).astype(np.uint8), "1": rows[::-1], "4": rows}
    np.savez(out, **stored, **{"gflops 1": np.array(1.0), "gflops 4": np.array(4.0)})
    monkeypatch.setattr(tables, "BUDGETS", out)
    tables.budgets()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "| 4 | 4.00 | 1.000 | 1.000 | +0.0 [+0.0, +0.0] |"
    model = torch.nn.Linear(3, 2)
    batches = [(torch.randn(4, 3), torch.zeros(4, 2)), (torch.randn(2, 3), torch.zeros(2, 2))]
    found = budgets.probabilities(model, batches)
    assert np.allclose(found[4:], model(batches[1][0]).sigmoid().detach().numpy())
