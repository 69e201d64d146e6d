"""Universal Transformer, U2T and UViT: adaptive depth with timm's blocks."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from adatape.evaluate.cost import cost, total
from adatape.models.universal import Universal, UniversalStage, UViT, sinusoid

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 5}
NAMES = ["ut_tiny_patch16_224", "u2t_tiny_patch16_224", "uvit_tiny_patch16_224"]


def small(name: str, **options) -> Universal | UViT:
    """A shallow model; without signals, which are the same for all samples, samples halt at different steps."""
    torch.manual_seed(0)
    depth = {} if name.startswith(("ut", "u2t")) else {"depth": 2}
    model = timm.create_model(name, **{**SMALL, "steps": 5, "signals": False, **depth, **options})
    torch.nn.init.normal_(model.stage.halt.weight, std=0.3)
    return model


def images(n: int = 6) -> torch.Tensor:
    """Images of different brightness, so that mean scores differ."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 32, 32, generator=draw) + 3 * torch.randn(n, 1, 1, 1, generator=draw)


def depths(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x, output=True).steps.weight > 0).float().sum(1)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("ut_tiny_patch16_224", 0.8241),
        ("u2t_tiny_patch16_224", 6.1625),
        ("u2t_small_patch16_224", 23.8255),
        ("uvit_tiny_patch16_224", 6.1625),
        ("uvit_small_patch16_224", 23.8255),
    ],
)
def test_parameter_counts(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 4) == millions
    assert total(cost(model)).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "gflops"),
    [
        ("u2t_base_patch32_224", 5.513),
        ("u2t_base_patch16_224", 22.016),
        ("uvit_base_patch32_224", 5.511),
        ("uvit_base_patch16_224", 22.011),
        ("uvit_large_patch32_224", 19.242),
        ("uvit_large_patch16_224", 77.114),
    ],
)
def test_gflops_are_the_papers_within_six_parts_in_a_thousand(name: str, gflops: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=18291)
    assert total(cost(model)).macs / 1e9 == pytest.approx(gflops, rel=0.006)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["sample", "token"])
def test_weights_sum_to_one_and_depth_differs_between_samples(name: str, level: str) -> None:
    model = small(name, level=level, halting_bias=-0.5).eval()
    output = model(images(24), output=True)
    weight = output.steps.weight
    assert weight.shape[:1] + weight.shape[2:] == ((24, 17) if level == "token" else (24,))
    torch.testing.assert_close(weight.sum(1), torch.ones_like(weight[:, 0]))
    assert depths(model, images(24)).unique().numel() > 1
    assert output.ponder.shape == (24,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["sample", "token"])
def test_a_sample_alone_equals_the_same_sample_in_a_batch(name: str, level: str) -> None:
    """With early exit: alone, a sample may stop earlier than in a batch."""
    model = small(name, level=level, halting_bias=-0.5).eval()
    together = model(images())
    for row in range(6):
        torch.testing.assert_close(model(images()[row : row + 1])[0], together[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_early_exit_changes_nothing_but_the_work(name: str) -> None:
    model = small(name, halting_bias=20.0)
    in_training, at_inference = model.train()(images(), output=True), model.eval()(images(), output=True)
    assert at_inference.steps.weight.shape[1] < in_training.steps.weight.shape[1]
    torch.testing.assert_close(at_inference.logits, in_training.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_halting_bias_turns_depth_down(name: str) -> None:
    mean = [depths(small(name, halting_bias=bias).eval(), images(24)).mean() for bias in (-20.0, -1.0, 1.0, 20.0)]
    assert mean == sorted(mean, reverse=True)
    assert mean[0] > 4.5
    assert mean[-1] < mean[0]


def test_at_the_start_a_bias_of_minus_one_halts_everything_at_step_four() -> None:
    model = timm.create_model("ut_tiny_patch16_224", **SMALL).eval()
    weight = model(images(), output=True).steps.weight
    torch.testing.assert_close(weight[0], torch.tensor([0.2689, 0.2689, 0.2689, 0.1932]), rtol=1e-3, atol=1e-4)


def test_unshared_layers_start_apart_and_shared_ones_are_one() -> None:
    u2t, ut = small("u2t_tiny_patch16_224"), small("ut_tiny_patch16_224")
    first, second = (u2t.vit.blocks[i].attn.qkv.weight for i in (0, 1))
    assert not torch.equal(first, second)
    assert len(ut.vit.blocks) == 1
    assert len(u2t.vit.blocks) == u2t.stage.steps == 5


def test_u2t_has_more_steps_than_vit_has_layers() -> None:
    with torch.device("meta"):
        assert timm.create_model("u2t_tiny_patch16_224").stage.steps == 13
        assert timm.create_model("u2t_base_patch16_224").stage.steps == 15


def test_one_step_without_signals_is_a_vit_of_one_block() -> None:
    model = small("ut_tiny_patch16_224", steps=1).eval()
    torch.testing.assert_close(model(images()), model.vit(images()))


def test_a_universal_stage_that_halts_at_once_leaves_a_vit_one_block_deeper() -> None:
    model = small("uvit_tiny_patch16_224", halting_bias=50.0).eval()
    deeper = VisionTransformer(**SMALL, depth=3).eval()
    deeper.load_state_dict({**deeper.state_dict(), **model.vit.state_dict()}, strict=True)
    for layer, block in enumerate([model.block, *model.vit.blocks]):
        deeper.blocks[layer].load_state_dict(block.state_dict())
    torch.testing.assert_close(model(images()), deeper(images()), rtol=1e-5, atol=1e-5)


def test_the_stage_can_stand_above_the_vit() -> None:
    below, above = (small("uvit_tiny_patch16_224", above=above).eval() for above in (False, True))
    above.load_state_dict(below.state_dict())
    assert not torch.allclose(below(images()), above(images()))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns_from_loss_and_ponder(name: str) -> None:
    model = small(name, halting_bias=-4.0).train()
    output = model(images(), output=True)
    (output.logits.square().mean() + 0.01 * output.ponder.mean()).backward()
    still = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_are_finite_in_bfloat16(name: str) -> None:
    model = small(name)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images(), output=True)
        loss = output.logits.float().square().mean() + output.ponder.mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True])
def test_compiles_without_a_graph_break(name: str, training: bool) -> None:
    model = small(name, steps=3, signals=True).train(training)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_budgets_are_kept_and_timms_conventions_hold(name: str) -> None:
    model = small(name, halting_bias=-20.0).eval()
    model.set_budget(np.int64(2))
    assert (depths(model, images()) == 2).all()
    torch.testing.assert_close(model.forward_head(model.forward_features(images())), model(images()))
    with pytest.raises(ValueError, match="steps is 6; it must be between 1 and the 5 that the model was built for"):
        model.set_budget(6)
    model.set_budget()
    assert (depths(model, images()) == 5).all()
    maps = model.forward_intermediates(images(), intermediates_only=True)
    assert all(grid.shape == (6, 64, 4, 4) for grid in maps)


def test_sinusoids_are_the_papers() -> None:
    table = sinusoid(7, 6)
    for i, j in ((0, 0), (3, 0), (3, 1), (6, 2)):
        angle = torch.tensor(i / 10000 ** (2 * j / 6))
        assert table[i, 2 * j].item() == pytest.approx(angle.sin().item(), abs=1e-6)
        assert table[i, 2 * j + 1].item() == pytest.approx(angle.cos().item(), abs=1e-6)


def test_senseless_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        UniversalStage(8, 0)
    with pytest.raises(ValueError, match="level is 'batch'; it must be sample or token"):
        UniversalStage(8, 2, level="batch")
    with pytest.raises(ValueError, match=r"the ViT has 2 blocks; for 5 steps it needs 1 \(shared\) or 5"):
        Universal(VisionTransformer(**SMALL, depth=2), 5)
