"""Non-adaptive ViTs: sincos positions, three feed-forwards, parameter counts, timm's conventions."""

from __future__ import annotations

import copy
import math

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import adatape.models.vit  # noqa: F401  registers the names
from adatape.models.vit import Plain, sincos2d
from adatape.records import Output

NAMES = {
    "plainvit_tiny_patch16_224": 5.6794,
    "plainvit_small_patch16_224": 21.9746,
    "plainvit_base_patch16_224": 86.4156,
}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "depth": 3, "num_classes": 5}


def plainvit(**options) -> Plain:
    return timm.create_model("plainvit_tiny_patch16_224", **{**SMALL, **options})


def vit3ffn(**options) -> Plain:
    return timm.create_model("vit3ffn_base_patch28_224", **{**SMALL, **options})


def images(n: int = 6, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    return torch.randn(n, 3, *size, generator=torch.Generator().manual_seed(0))


def millions(name: str, **options) -> float:
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    return sum(p.numel() for p in model.parameters()) / 1e6


@pytest.mark.parametrize("name", NAMES)
def test_plainvits_parameter_counts(name: str) -> None:
    assert round(millions(name), 4) == NAMES[name]


@pytest.mark.parametrize(("patch", "literal", "narrow"), [(28, 214.32, 200.15), (14, 213.11, 198.95)])
def test_vit3ffns_parameter_counts(patch: int, literal: float, narrow: float) -> None:
    """The literal reading, and the paper's 200.1 and 198.9 with a class feed-forward of 2304."""
    name = f"vit3ffn_base_patch{patch}_224"
    assert round(millions(name, num_classes=18291), 2) == literal
    assert round(millions(name, num_classes=18291, class_mlp_ratio=3.0), 2) == narrow


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("vit_base_patch28_224", 18291, 100.9796),
        ("vit_base_patch14_224", 18291, 99.7723),
        ("vit_tiny_patch32_224", 1000, None),
    ],
)
def test_patch_sizes_that_timm_lacks_are_plain_vits(name: str, classes: int, count: float | None) -> None:
    assert isinstance(timm.create_model(name, **SMALL), Plain)
    if count:
        assert round(millions(name, num_classes=classes), 4) == count


@pytest.mark.parametrize(("height", "breadth", "width"), [(4, 4, 64), (3, 5, 8), (14, 14, 192), (2, 1, 4)])
def test_positions_are_the_formula_term_by_term(height: int, breadth: int, width: int) -> None:
    quarter = width // 4
    table = sincos2d(height, breadth, width)
    assert table.shape == (height * breadth, width)
    for y in range(height):
        for x in range(breadth):
            for k in range(quarter):
                omega = 10000 ** (-k / (quarter - 1)) if quarter > 1 else 1.0
                waves = [math.sin(x * omega), math.cos(x * omega), math.sin(y * omega), math.cos(y * omega)]
                found = table[y * breadth + x, k::quarter].tolist()
                assert found == pytest.approx(waves, abs=2e-6)


def test_positions_are_neither_trained_nor_saved() -> None:
    model = plainvit()
    assert not any("pos_embed" in name for name, _ in model.named_parameters())
    assert not any("pos_embed" in name for name in model.state_dict())
    assert torch.equal(model.vit.pos_embed[0], sincos2d(4, 4, 64))
    other = plainvit()
    other.load_state_dict(copy.deepcopy(model.state_dict()), strict=True)


def test_the_head_is_zero_at_first_and_mean_pooling_has_no_norm_after_it() -> None:
    model = plainvit().eval()
    assert not model.vit.head.weight.any()
    assert not model(images()).any()
    features = model.forward_features(images())
    assert features.shape == (6, 16, 64)
    assert torch.equal(model.forward_head(features, pre_logits=True), features.mean(1))


def test_initialising_again_leaves_positions_and_a_zero_head() -> None:
    model = plainvit()
    torch.nn.init.ones_(model.vit.head.weight)
    model.vit.init_weights()
    assert not model.vit.head.weight.any()
    assert torch.equal(model.vit.pos_embed[0], sincos2d(4, 4, 64))


def test_a_model_built_on_the_meta_device_can_be_filled() -> None:
    with torch.device("meta"):
        model = plainvit()
    model.to_empty(device="cpu").vit.init_weights()
    torch.testing.assert_close(model.vit.pos_embed[0], sincos2d(4, 4, 64))
    assert not any("pos_embed" in name for name in model.state_dict())


def test_positions_follow_dtype() -> None:
    model = plainvit().bfloat16()
    assert model.vit.pos_embed.dtype == torch.bfloat16
    assert model(images().bfloat16()).dtype == torch.bfloat16
    assert plainvit().double()(images().double()).dtype == torch.float64


def test_another_image_size_computes_positions_anew() -> None:
    model = plainvit().double().eval()
    for size in ((48, 32), (32, 48), (32, 32)):
        model.set_input_size(size)
        expected = sincos2d(size[0] // 8, size[1] // 8, 64).double()
        assert torch.equal(model.vit.pos_embed[0], expected)
        assert model(images(2, size).double()).shape == (2, 5)
    assert not any("pos_embed" in name for name in model.state_dict())
    assert not any("pos_embed" in name for name, _ in model.named_parameters())


def test_each_token_passes_exactly_one_feed_forward() -> None:
    """Changing one feed-forward of a block changes its own rows only."""
    model = vit3ffn(depth=1).eval()
    before = model.forward_intermediates(images(), output_fmt="NLC", return_prefix_tokens=True)[1][0]
    rows = {"mlp": [0], "mlp_first": [*range(1, 9)], "mlp_second": [*range(9, 17)]}
    for name, own in rows.items():
        changed = copy.deepcopy(model)
        with torch.no_grad():
            getattr(changed.vit.blocks[0], name).fc2.bias.add_(1.0)
        after = changed.forward_intermediates(images(), output_fmt="NLC", return_prefix_tokens=True)[1][0]
        moved = torch.cat(after[::-1], 1) - torch.cat(before[::-1], 1)
        assert moved.abs().amax((0, 2)).nonzero().flatten().tolist() == own
        torch.testing.assert_close(moved[:, own], torch.ones_like(moved[:, own]))


def test_three_equal_feed_forwards_are_timms_one() -> None:
    model = vit3ffn().eval()
    for block in model.vit.blocks:
        block.mlp_first.load_state_dict(block.mlp.state_dict())
        block.mlp_second.load_state_dict(block.mlp.state_dict())
    plain = VisionTransformer(**SMALL).eval()
    state = {key: value for key, value in model.vit.state_dict().items() if "mlp_" not in key}
    plain.load_state_dict(state, strict=True)
    torch.testing.assert_close(model(images()), plain(images()), rtol=1e-5, atol=1e-5)


def test_feed_forwards_begin_apart_and_all_learn() -> None:
    model = vit3ffn(class_mlp_ratio=2.0)
    block = model.vit.blocks[0]
    assert not torch.equal(block.mlp_first.fc1.weight, block.mlp_second.fc1.weight)
    assert [mlp.fc1.out_features for mlp in (block.mlp, block.mlp_first, block.mlp_second)] == [128, 256, 256]
    model(images()).square().mean().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # What the last block makes of patches is not looked at when the class token alone is pooled.
    assert all(name.startswith(("vit.blocks.2.mlp_first", "vit.blocks.2.mlp_second")) for name in still)


def test_an_odd_number_of_patches_gives_the_second_half_one_more() -> None:
    model = vit3ffn(img_size=24, depth=1).eval()
    seen = {}
    for name in ("mlp_first", "mlp_second"):
        getattr(model.vit.blocks[0], name).register_forward_hook(
            lambda _, inputs, __, name=name: seen.update({name: inputs[0].shape[1]})
        )
    model(images(2, (24, 24)))
    assert seen == {"mlp_first": 4, "mlp_second": 5}


@pytest.mark.parametrize("build", [plainvit, vit3ffn])
def test_output_is_what_the_plain_call_gives(build) -> None:
    model = build().eval()
    torch.nn.init.normal_(model.vit.head.weight)
    output = model(images(), output=True)
    assert isinstance(output, Output)
    assert torch.equal(output.logits, model(images()))
    assert torch.equal(output.logits, model.vit(images()))
    assert torch.equal(model.forward_head(model.forward_features(images())), output.logits)
    assert output.features.shape == (6, 64)
    assert not output.ponder.any()
    assert output.tape is None
    assert output.steps is None


@pytest.mark.parametrize("name", ["plainvit_tiny_patch16_224", "vit3ffn_base_patch28_224", "vit_tiny_patch32_224"])
def test_features_only_gives_the_patch_grid(name: str) -> None:
    features = timm.create_model(name, features_only=True, out_indices=(0, 2), **SMALL).eval()
    assert [m.shape for m in features(images())] == [(6, 64, 4, 4)] * 2


@pytest.mark.parametrize("build", [plainvit, vit3ffn])
def test_compiles_checkpoints_and_runs_in_bfloat16(build) -> None:
    model = build().train()
    torch.nn.init.normal_(model.vit.head.weight)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()))
    expected = model(images())
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(images()), expected)
    with torch.autocast("cpu", torch.bfloat16):
        model(images()).float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plainvit(class_token=True), "class_token is True; PlainViT has patch positions only"),
        (lambda: plainvit(reg_tokens=2), "reg_tokens is 2; PlainViT has patch positions only"),
        (lambda: plainvit(pos_embed="learn"), "pos_embed is 'learn'; PlainViT's positions are sincos2d"),
        (lambda: plainvit(dynamic_img_size=True), "dynamic_img_size is True; .* call set_input_size"),
        (lambda: plainvit(embed_dim=66), "embed_dim is 66; .* a multiple of 4"),
        (lambda: vit3ffn(class_token=False, global_pool="avg"), "class_token is False .* needs class_token=True"),
        (lambda: vit3ffn(reg_tokens=3), "reg_tokens is 3; ViT-3FFN needs class_token=True"),
        (lambda: vit3ffn(patch_drop_rate=0.5), "patch_drop_rate is 0.5; it must be 0"),
        (lambda: vit3ffn(class_mlp_ratio=0.0), "class_mlp_ratio is 0.0; it must be above 0"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
