"""AdaTape around timm's ViT: properties of the tape, and timm's conventions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay

import adatape
import adatape.models
from adatape.config import ReaderConfig
from adatape.encoder import TapeBlocksFrom
from adatape.models import AdaTape, wrap
from adatape.models.avit import AViT
from adatape.models.prefix import filter_checkpoint
from adatape.packing import fill_hidden
from adatape.records import Output

NAMES = [f"adatape_{size}_patch{patch}_224" for size in ("tiny", "small", "base", "large") for patch in (16, 32)]
VARIANTS = [(bank, ffn) for bank in ("input", "learn") for ffn in ("none", "append", "blocks", "append+blocks")]
SMALL = {"img_size": 32, "depth": 3, "num_classes": 5, "patch_size": 8, "bank_patch": 4, "bank_size": 80}


def small(**options) -> AdaTape:
    """A shallow model on 32-pixel images whose tapes end at different lengths."""
    settings = {**SMALL, "steps": 6, "threshold": 1.5, "merge": 4, "norm_scale": 1.5, **options}
    return timm.create_model("adatape_tiny_patch16_224", **settings)


def images(n: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "options", "millions"),
    [
        ("adatape_tiny_patch16_224", {}, 6.386),
        ("adatape_small_patch16_224", {}, 24.347),
        ("adatape_base_patch16_224", {}, 94.993),
        ("adatape_base_patch16_224", {"bank": "learn", "tape_ffn": "append+blocks", "num_classes": 18291}, 192.564),
    ],
)
def test_parameter_counts_are_the_papers(name: str, options: dict, millions: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 3) == millions


def test_every_name_is_in_timms_registry() -> None:
    assert sorted(NAMES) == timm.list_models("adatape_*")


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_defaults_are_the_papers(bank: str) -> None:
    with torch.device("meta"):
        base, large = (timm.create_model(f"adatape_{size}_patch32_224", bank=bank) for size in ("base", "large"))
    reading = base.reader.reading
    assert (reading.steps, reading.threshold, reading.merged, reading.query_width) == (10, 2.0, 5, 64)
    assert large.reader.reading.threshold == (1.0 if bank == "input" else 2.0)
    assert base.bank.size == (784 if bank == "input" else 10_000)
    assert (base.vit.cls_token is None) == (bank == "input")
    assert (reading.query_noise, reading.bank_dropout) == ((0.0, 0.0) if bank == "input" else (0.01, 0.1))
    assert (base.join.layer, base.query, base.global_pool) == (
        1,
        *(("mean", "avg") if bank == "input" else ("token", "token")),
    )


@pytest.mark.parametrize(("bank", "tape_ffn"), VARIANTS)
def test_budget_zero_is_the_wrapped_vit_bit_for_bit(bank: str, tape_ffn: str) -> None:
    model = small(bank=bank, tape_ffn=tape_ffn).eval()
    plain = model.vit(images())
    assert not torch.allclose(model(images()), plain)
    model.set_budget(steps=0)
    assert torch.equal(model(images()), plain)
    output = model(images(), output=True)
    assert output.tape is None
    assert not output.ponder.any()


@pytest.mark.parametrize(("bank", "tape_ffn"), VARIANTS)
def test_a_sample_alone_equals_the_same_sample_in_a_batch(bank: str, tape_ffn: str) -> None:
    model = small(bank=bank, tape_ffn=tape_ffn).eval()
    together = model(images(), output=True)
    for row in range(6):
        alone = model(images()[row : row + 1], output=True)
        assert torch.equal(alone.tape.index[0], together.tape.index[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bank", "tape_ffn"), VARIANTS)
@pytest.mark.parametrize("pool", ["avg", "token", "max"])
def test_trimming_hidden_tape_leaves_logits_unchanged(bank: str, tape_ffn: str, pool: str) -> None:
    """A row whose tape ends early does not depend on longer tapes in its batch."""
    model = small(bank=bank, tape_ffn=tape_ffn, class_token=True, global_pool=pool, fc_norm=False).eval()
    output = model(images(24), output=True)
    lengths = output.tape.length
    assert lengths.min() < lengths.max()
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().flatten()
        model.set_budget(steps=length, threshold=1.5)
        trimmed = model(images(24)[rows], output=True)
        assert trimmed.tape.tokens.shape[1] == length
        torch.testing.assert_close(trimmed.logits, output.logits[rows], rtol=1e-5, atol=1e-5)


def test_hidden_rows_take_the_mean_of_the_visible_ones() -> None:
    tokens, visible = torch.randn(3, 5, 4), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    filled = fill_hidden(tokens, visible, 1)
    for row, count in enumerate((4, 3, 5)):
        torch.testing.assert_close(filled[row, 1:].mean(0), tokens[row, 1:count].mean(0))
        torch.testing.assert_close(filled[row, 1:].amax(0), tokens[row, 1:count].amax(0))
        assert torch.equal(filled[row, :count], tokens[row, :count])


def test_every_parameter_learns() -> None:
    for bank, tape_ffn in VARIANTS:
        model = small(bank=bank, tape_ffn=tape_ffn).train()
        output = model(images(), output=True)
        (output.logits.square().mean() + 0.01 * output.ponder.mean()).backward()
        still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        # What the last block makes of tape rows is not looked at when the class token alone is pooled.
        unseen = "vit.blocks.2.tape_mlp" if bank == "learn" else "nothing"
        assert not [name for name in still if not name.startswith(unseen)], (bank, tape_ffn)
        assert all(p.grad is not None for p in model.parameters())


def test_ponder_alone_shortens_tapes() -> None:
    model = small().train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    before = model(images(24), output=True).tape.length.float().mean()
    for _ in range(20):
        optimizer.zero_grad()
        model(images(24), output=True).ponder.mean().backward()
        optimizer.step()
    assert model(images(24), output=True).tape.length.float().mean() < before


def test_output_is_what_the_plain_call_gives() -> None:
    model = small().eval()
    output = model(images(), output=True)
    assert isinstance(output, Output)
    assert torch.equal(output.logits, model(images()))
    assert torch.equal(output.logits, model.get_classifier()(output.features))
    assert output.ponder.shape == output.tape.length.shape == (6,)


@pytest.mark.parametrize(("bank", "tape_ffn"), VARIANTS)
def test_head_of_features_is_forward(bank: str, tape_ffn: str) -> None:
    model = small(bank=bank, tape_ffn=tape_ffn).eval()
    features = model.forward_features(images())
    assert features.shape == (6, 16 + (bank == "learn") + 6, 192)
    assert torch.equal(model.forward_head(features), model(images()))
    assert model.forward_head(features, pre_logits=True).shape == (6, model.num_features)


def test_reset_classifier_and_num_classes_zero() -> None:
    model = small().eval()
    model.reset_classifier(7)
    assert model(images()).shape == (6, 7)
    assert model.num_classes == 7
    model.reset_classifier(0)
    assert torch.equal(model(images()), model(images(), output=True).features)
    assert small(num_classes=0)(images()).shape == (6, 192)
    model.reset_classifier(0, "")
    assert model.forward_head(model.forward_features(images())).shape == (6, 22, 192)


def test_features_only_gives_the_patch_grid() -> None:
    features = timm.create_model("adatape_tiny_patch16_224", features_only=True, out_indices=(0, 2), **SMALL).eval()
    maps = features(images())
    assert [m.shape for m in maps] == [(6, 192, 4, 4)] * 2
    assert features.feature_info.channels() == [192, 192]
    assert features.feature_info.reduction() == [8, 8]


def test_intermediates_follow_timms() -> None:
    """Without a tape all equal timm's to the bit; with one, those of the first block do."""
    model = small(bank="learn").eval()
    model.set_budget(steps=0)
    for options in (
        {},
        {"indices": [0, -1], "norm": True},
        {"output_fmt": "NLC"},
        {"return_prefix_tokens": True},
        {"output_dict": True, "return_prefix_tokens": True},
        {"output_dict": True, "intermediates_only": True},
        {"output_dict": True},
    ):
        ours, theirs = (m.forward_intermediates(images(), **options) for m in (model, model.vit))
        flat = [torch.utils._pytree.tree_leaves(x) for x in (ours, theirs)]
        assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))
    model.set_budget()
    ours, theirs = (m.forward_intermediates(images(), intermediates_only=True) for m in (model, model.vit))
    assert torch.equal(ours[0], theirs[0])
    assert ours[2].shape == theirs[2].shape
    assert not torch.allclose(ours[2], theirs[2])


def test_the_vits_keys_are_timms_under_one_prefix() -> None:
    model = small(bank="learn")
    timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=5).load_state_dict(
        model.vit.state_dict(), strict=True
    )
    blocks = small(tape_ffn="append+blocks").vit.state_dict()
    ours = {key for key in blocks if "tape_mlp" in key}
    assert ours
    assert not any(key.startswith("blocks.0.") for key in ours)


def test_a_plain_vits_checkpoint_loads_with_positions_resized() -> None:
    plain = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=3, num_classes=5)
    model = small(bank="learn")
    before = model.bank.tokens.clone()
    model.load_state_dict(filter_checkpoint(plain.state_dict(), model), strict=True)
    assert torch.equal(model.vit.blocks[1].mlp.fc1.weight, plain.blocks[1].mlp.fc1.weight)
    assert torch.equal(model.bank.tokens, before)
    model.load_state_dict(filter_checkpoint(model.state_dict(), model), strict=True)


def test_saves_and_loads_exactly() -> None:
    model, other = small(tape_ffn="append+blocks").eval(), small(tape_ffn="append+blocks").eval()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model(images()), other(images()))


@pytest.mark.parametrize(("bank", "tape_ffn"), [("input", "append"), ("learn", "append+blocks")])
@pytest.mark.parametrize("training", [False, True])
def test_compiles_without_a_graph_break(bank: str, tape_ffn: str, training: bool) -> None:
    model = small(bank=bank, tape_ffn=tape_ffn, depth=2, steps=3, query_noise=0.0, bank_dropout=0.0).train(training)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours, theirs = compiled(images(), output=True), model(images(), output=True)
    torch.testing.assert_close(ours.logits, theirs.logits)
    assert torch.equal(ours.tape.index, theirs.tape.index)
    ours.logits.sum().backward()


@pytest.mark.parametrize(("bank", "tape_ffn"), [("input", "append"), ("learn", "append+blocks")])
def test_forward_and_backward_are_finite_in_bfloat16(bank: str, tape_ffn: str) -> None:
    model = small(bank=bank, tape_ffn=tape_ffn)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images(), output=True)
        loss = output.logits.float().square().mean() + output.ponder.mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    whole = model.bfloat16()(images().bfloat16(), output=True)
    assert whole.logits.isfinite().all()
    assert whole.ponder.dtype == torch.float32


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for enable in (False, True):
        torch.manual_seed(0)
        model = small(tape_ffn="append+blocks").train()
        model.set_grad_checkpointing(enable)
        model(images()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_wrap_takes_a_vit_as_it_is() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=5).eval()
    before = vit(images())
    model = adatape.wrap(vit, bank="input", patch=4, reading=ReaderConfig(steps=4, threshold=1.0)).eval()
    assert model.vit is vit
    assert model(images()).shape == (6, 5)
    model.set_budget(steps=0)
    assert torch.equal(model(images()), before)


def test_registers_and_layer_scale_are_wrapped_too() -> None:
    vit = VisionTransformer(32, 8, embed_dim=64, depth=2, num_heads=2, reg_tokens=3, init_values=0.1, num_classes=5)
    model = wrap(vit, "learn", bank_size=80).eval()
    output = model(images(), output=True)
    assert output.logits.shape == (6, 5)


def test_weight_decay_skips_what_timm_skips() -> None:
    assert small().no_weight_decay() == {
        *(f"vit.{name}" for name in ("pos_embed", "cls_token", "reg_token", "dist_token")),
        "bank.pos_embed",
    }


def test_layer_decay_slows_the_vits_lower_layers_and_nothing_of_the_tape() -> None:
    model = small(tape_ffn="append+blocks")
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    rates = {name: scale[id(p)] for name, p in model.named_parameters()}
    assert (
        rates["vit.patch_embed.proj.weight"]
        < rates["vit.blocks.0.attn.qkv.weight"]
        < rates["vit.blocks.2.attn.qkv.weight"]
    )
    for name in ("bank.h2.weight", "reader.norm.weight", "append_mlp.fc1.weight", "vit.head.weight"):
        assert rates[name] == 1.0
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay[id(model.bank.pos_embed)] == 0.0


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_another_image_size_keeps_what_was_learnt(bank: str) -> None:
    model = small(bank=bank).eval()
    before = model(images())
    model.set_input_size((48, 32))
    assert model(torch.randn(2, 3, 48, 32)).shape == (2, 5)
    assert model.bank.size == (96 if bank == "input" else 80)
    model.set_input_size((32, 32))
    assert (model(images()) - before).abs().mean() < before.std()


def test_exports_with_a_dynamic_batch() -> None:
    model = small().eval()
    program = torch.export.export(model, (images(3),), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    for n in (1, 2, 6):
        torch.testing.assert_close(program.module()(images(n)), model(images(n)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(bank="finer"), "bank is 'finer'; it must be 'input' or 'learn'"),
        (lambda: small(tape_ffn="all"), "tape_ffn is 'all'; it must be one of none, append"),
        (lambda: small(layer=3), "layer is 3; it must be a block index from 0 to 2"),
        (lambda: small(query="token"), "query is 'token', but the ViT has no class token; it must be 'mean'"),
        (lambda: small(steps=20, merge=4), "bank has 64 tokens; steps × merge needs 80"),
        (lambda: small(global_pool="map"), "global_pool is 'map'.*hidden tape.* gate must be True"),
        (lambda: wrap(VisionTransformer(32, 8, depth=2), patch=4, tape_ffn="blocks"), r"block_fn=TapeBlocksFrom\(1\)"),
        (lambda: AViT(timm.create_model("deit_tiny_distilled_patch16_224")), "distillation head"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_vit_is_refused() -> None:
    with pytest.raises(TypeError, match="the backbone is a ResNet; it must be a timm VisionTransformer"):
        wrap(timm.create_model("resnet18"))


def test_tape_blocks_with_a_wrapped_vit() -> None:
    vit = VisionTransformer(32, 8, embed_dim=64, depth=3, num_heads=2, block_fn=TapeBlocksFrom(2), num_classes=5)
    model = wrap(vit, patch=4, layer=2, tape_ffn="blocks").eval()
    assert model(images()).shape == (6, 5)


def test_other_blocks_of_timms_are_wrapped_too() -> None:
    for name in ("vit_small_patch16_18x2_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_rpn_224"):
        vit = timm.create_model(name, img_size=56, depth=2, num_classes=5, embed_dim=64, num_heads=2)
        model = wrap(vit, "learn", bank_size=80).eval()
        assert model(torch.randn(2, 3, 56, 56)).shape == (2, 5), name


@pytest.mark.parametrize("size", [0, -32, "32", 32.0, (32,), (32, 32, 32), (32, -32)])
@pytest.mark.parametrize("name", ["adatape_tiny_patch16_224", "ut_tiny_patch16_224", "windows"])
def test_a_size_that_no_image_has_is_refused(name: str, size: Any) -> None:
    if name == "windows":
        vit = VisionTransformer(img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2)
        model = wrap(vit, "windows", image=(48, 64), window=16, steps=2)
    else:
        model = timm.create_model(
            name,
            img_size=32,
            patch_size=8,
            embed_dim=96,
            num_heads=3,
            **({"bank_patch": 4, "steps": 3} if "adatape" in name else {}),
        )
    before = model.image_size
    with pytest.raises(ValueError, match=r"img_size is .*; it must be a side in pixels, or height and width"):
        model.set_input_size(size)
    assert model.image_size == before
    with pytest.raises(ValueError, match="patch_size is "):
        model.set_input_size(patch_size=size)
