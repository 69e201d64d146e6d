"""A wrapped ViT: its output is the ViT's before training, at any budget; the tape can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import adatape
import adatape.models
from adatape.banks import InputBank, LearnedBank
from adatape.config import ImageModel
from adatape.evaluate.cost import cost, total
from adatape.models import AdaTape
from adatape.train.release import release
from adatape.train.task import build_image_model

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "depth": 3, "num_classes": 5}
READS = {"patch": 4, "bank_size": 80, "steps": 6, "threshold": 1.5, "merge": 4, "norm_scale": 1.5}
DRAWN = {"rope_shift_coords": 0.2, "rope_jitter_coords": 1.5, "rope_rescale_coords": 2.0}
VITS: dict[str, tuple[str, dict[str, Any]]] = {
    "AugReg": ("vit_tiny_patch16_224", {}),
    "AugReg, patch 16": ("vit_tiny_patch16_224", {"patch_size": 16, "depth": 2}),
    "MAE, mean of patches and a norm": ("vit_base_patch16_224", {"global_pool": "avg"}),
    "maximum": ("vit_tiny_patch16_224", {"global_pool": "max", "class_token": False, "fc_norm": True}),
    "mean with prefix": ("vit_tiny_patch16_224", {"global_pool": "avg", "pool_include_prefix": True}),
    "CLIP": ("vit_base_patch32_clip_224", {}),
    "CLIP with QuickGELU": ("vit_base_patch32_clip_quickgelu_224", {}),
    "DINOv2": ("vit_small_patch14_dinov2", {}),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", {}),
    "DeiT-3": ("deit3_small_patch16_224", {}),
    "SigLIP, mean": ("vit_base_patch16_siglip_gap_224", {}),
    "mean with registers": ("vit_medium_patch16_reg4_gap_256", {}),
    "norm after attention": ("vit_base_patch16_rpn_224", {}),
    "parallel branches": ("vit_small_patch16_18x2_224", {}),
    "parallel scaling": ("vit_base_patch16_xp_224", {}),
    "difference of attentions": ("vit_dpwee_patch16_reg1_gap_256", {}),
    "SigLIP, attention pooling": ("vit_base_patch16_siglip_224", {}),
    "DeiT, distilled": ("deit_tiny_distilled_patch16_224", {}),
    "EVA, no rope": ("eva_giant_patch14_224", {}),
    "EVA-02": ("eva02_tiny_patch14_224", {}),
    "EVA-02 CLIP, norms inside": ("eva02_base_patch16_clip_224", {}),
    "EVA-02, norm after": ("eva02_enormous_patch14_clip_224", {}),
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "DINOv3, drawn coordinates": ("vit_small_plus_patch16_dinov3_qkvb", DRAWN),
    "Perception Encoder, attention pooling": ("vit_pe_core_tiny_patch16_384", {}),
    "Perception Encoder, spatial": ("vit_pe_spatial_tiny_patch16_512", {}),
    "RoPE, axial": ("vit_small_patch16_rope_ape_224", {}),
    "RoPE, mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "RoPE, registers and mean": ("vit_medium_patch16_rope_reg1_gap_256", {}),
    "Sapiens 2, grouped queries": ("vit_base_patch16_sapiens2", {"num_kv_heads": (2, 1, 1)}),
}
SAID = {"result": {"accuracy": 0.5}, "command": "adatape train finetune"}


def images(n: int = 4, size: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def as_if_trained(vit: VisionTransformer) -> VisionTransformer:
    """Large random weights: non-uniform attention, no layer scale near zero, a non-zero head."""
    for name, p in vit.named_parameters():
        if name.startswith("blocks") and p.ndim > 1:
            p.mul_(8)
        elif p.ndim == 1:
            p.copy_((0.0 if name.endswith("bias") else 1.0) + 0.3 * torch.randn_like(p))
        else:
            p.add_(0.1 * torch.randn_like(p))
    return vit.eval()


def pretrained(name: str = "vit_tiny_patch16_224", **options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return as_if_trained(timm.create_model(name, **{**SMALL, **options}))


def wrapped(vit: VisionTransformer | None = None, bank: str = "input", **options: Any) -> AdaTape:
    return adatape.wrap(vit or pretrained(), bank, **{**READS, **options})


def features_of(vit: VisionTransformer, x: Tensor) -> Tensor:
    return vit.forward_head(vit.forward_features(x), pre_logits=True)


def loss_of(model: AdaTape, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % model.num_classes)


@pytest.mark.parametrize("bank", ["input", "learn"])
@pytest.mark.parametrize("kind", VITS)
@torch.no_grad()
def test_a_wrapped_vit_starts_as_the_pretrained_one_at_any_budget(kind: str, bank: str) -> None:
    name, options = VITS[kind]
    vit, x = pretrained(name, **options), images()
    logits, features = vit(x), features_of(vit, x)
    assert logits.std() > 0.1
    model = wrapped(vit, bank)
    torch.nn.init.constant_(model.gate.open, 0.1)
    assert (model(x) - logits).abs().max() > 1e-3 * logits.abs().max(), "this ViT would not notice a tape"
    torch.nn.init.zeros_(model.gate.open)
    for steps, threshold in ((6, 1.5), (6, 0.6), (3, None), (1, None)):
        model.set_budget(steps, threshold)
        output = model(x, output=True)
        assert output.tape is not None
        torch.testing.assert_close(output.logits, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.features, features, rtol=1e-5, atol=1e-5)
    model.set_budget(0)
    output = model(x, output=True)
    assert torch.equal(output.logits, logits)
    assert torch.equal(output.features, features)


@torch.no_grad()
def test_beyond_its_range_a_budget_warns_and_still_computes_the_pretrained_function() -> None:
    model, x = wrapped(), images()
    with pytest.warns(UserWarning, match="steps is 9; the model was built, and perhaps trained, for at most 6"):
        model.set_budget(9)
    torch.testing.assert_close(model(x), model.vit(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_features_have_timms_shape_and_values() -> None:
    """Tape rows are not returned, so a mean over rows is unchanged."""
    model, x = wrapped(pretrained(global_pool="avg", reg_tokens=2)), images()
    torch.testing.assert_close(model.forward_features(x), model.vit.forward_features(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.forward_head(model.forward_features(x)), model(x))


@pytest.mark.parametrize("bank", ["input", "learn"])
@pytest.mark.parametrize("kind", VITS)
def test_every_gate_learns_from_the_first_step_and_all_of_the_tape_from_the_second(kind: str, bank: str) -> None:
    name, options = VITS[kind]
    model, x = wrapped(pretrained(name, **options), bank).train(), images(8)
    adamw = torch.optim.AdamW(model.parameters(), 1e-3)
    loss_of(model, x).backward()
    first = model.gate.open.grad.abs()
    assert first.shape == (model.gate.open.shape[0], 2)
    assert first.min() > 1e-6
    adamw.step()
    adamw.zero_grad()
    loss_of(model, x).backward()
    tape = {name: p.grad for name, p in model.named_parameters() if not name.startswith("vit.")}
    assert min(grad.norm() for grad in tape.values()) > 1e-6, {name: grad.norm() for name, grad in tape.items()}
    assert all(grad.isfinite().all() for grad in tape.values())


def test_a_gates_gradient_is_the_slope_of_the_loss() -> None:
    """Compared with finite differences of the loss."""
    model, x = wrapped().double(), images().double()
    loss_of(model, x).backward()
    slopes, started = model.gate.open.grad.clone(), loss_of(model, x).item()
    for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        with torch.no_grad():
            model.gate.open.zero_()
            model.gate.open[place] = 1e-7
            measured = (loss_of(model, x).item() - started) / 1e-7
        assert measured == pytest.approx(slopes[place].item(), rel=1e-3)


@torch.no_grad()
def test_open_gates_are_a_tape_without_gates() -> None:
    """With gates of 1 the model equals an ungated one, except that tape rows are not pooled."""
    model, x = wrapped(), images()
    torch.nn.init.constant_(model.gate.open, 0.1)
    free = AdaTape(model.vit, model.bank, model.reader.reading).eval()
    free.load_state_dict({name: value for name, value in model.state_dict().items() if "gate" not in name})
    torch.testing.assert_close(model(x), free(x), rtol=1e-5, atol=1e-5)
    assert (model(x) - model.vit(x)).abs().max() > 1e-2


@pytest.mark.parametrize("pool", ["token", "avg"])
@torch.no_grad()
def test_a_sample_alone_equals_the_same_sample_in_a_batch(pool: str) -> None:
    model, x = wrapped(pretrained(global_pool=pool)), images(12)
    torch.nn.init.uniform_(model.gate.open, -0.1, 0.1)
    together = model(x, output=True)
    assert together.tape.length.min() < together.tape.length.max()
    for row in range(12):
        torch.testing.assert_close(model(x[row : row + 1])[0], together.logits[row], rtol=1e-5, atol=1e-5)


def test_fused_and_plain_attention_agree_and_so_does_checkpointing() -> None:
    found = []
    for fused, checkpointed in ((True, False), (False, False), (True, True)):
        model = wrapped().train()
        model.set_grad_checkpointing(checkpointed)
        for block in model.vit.blocks:
            block.attn.fused_attn = fused
        loss_of(model, images()).backward()
        found.append(model.gate.open.grad)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-5)


def test_bfloat16_keeps_gates_shut_and_alive() -> None:
    model, x = wrapped(), images()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), model.vit(x), rtol=0.05, atol=0.1)
        loss_of(model, x).backward()
    assert model.gate.open.grad.abs().min() > 1e-6
    whole = wrapped(pretrained().bfloat16())
    assert {p.dtype for p in whole.parameters()} == {torch.bfloat16}
    loss_of(whole, x.bfloat16()).backward()
    assert all(p.grad.isfinite().all() for p in whole.parameters())
    assert whole.gate.open.grad.abs().min() > 1e-6


@pytest.mark.parametrize("fused", [True, False])
def test_float16_which_timms_scripts_use_trains_shut_gates_as_float32_does(fused: bool) -> None:
    """The weight of a shut gate's key is far below float16's smallest number."""
    slopes = []
    for enabled in (False, True):
        model, x = wrapped().train(), images()
        for block in model.vit.blocks:
            block.attn.fused_attn = fused
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            loss = loss_of(model, x)
        (1024 * loss).backward()
        slopes.append(model.gate.open.grad / 1024)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=0.05, atol=0.01)
    assert slopes[1].abs().min() > 1e-6


def test_a_vit_in_float16_has_gates_that_learn_and_compiles() -> None:
    model, x = wrapped(pretrained().half()).train(), images().half()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    slopes = []
    for each in (model, compiled):
        model.zero_grad()
        loss_of(each, x).backward()
        slopes.append(model.gate.open.grad.clone())
        assert slopes[-1].abs().min() > 1e-4
    torch.testing.assert_close(slopes[1], slopes[0], rtol=0.05, atol=0.01)


def test_compiles_without_a_graph_break_and_exports() -> None:
    model, x = wrapped(pretrained(depth=2), "learn", steps=1, threshold=0.5), images()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    torch.testing.assert_close(program.module()(images(2)), model(images(2)), rtol=1e-4, atol=1e-5)


def halves(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Task: does any 16-pixel patch have a bright and a dark half? Its mean does not tell."""
    label, place = (torch.randint(2, (n, *more), generator=generator) for more in ((), (2,)))
    half = torch.ones(16, 16)
    half[8:] = -1
    x = torch.zeros(n, 3, 32, 32)
    for image, (top, left), shown in zip(x, (16 * place).tolist(), label, strict=True):
        image[:, top : top + 16, left : left + 16] = half * shown
    return x + 0.1 * torch.randn(x.shape, generator=generator), label


def blind_vit() -> VisionTransformer:
    """A ViT whose patch embedding depends only on a patch's mean colour."""
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", **{**SMALL, "patch_size": 16, "num_classes": 2})
    with torch.no_grad():
        vit.patch_embed.proj.weight.copy_(0.02 * torch.randn(64, 3, 1, 1).expand(-1, -1, 16, 16))
        for p in vit.blocks.parameters():
            p.mul_(3 if p.ndim > 1 else 1)
    return vit


def loss_after(model: AdaTape, steps: int = 60) -> float:
    trained = [p for name, p in model.named_parameters() if not name.startswith("vit.") or "head" in name]
    adamw, generator = torch.optim.AdamW(trained, 3e-3, weight_decay=0.0), torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, label = halves(32, generator)
        adamw.zero_grad()
        F.cross_entropy(model(x), label).backward()
        adamw.step()
    x, label = halves(256, generator)
    with torch.no_grad():
        return F.cross_entropy(model.eval()(x), label).item()


def test_a_frozen_vit_learns_detail_through_its_tape_alone() -> None:
    reads = {"patch": 8, "steps": 16, "threshold": 16.0, "merge": 1, "query_width": 32, "norm_scale": 1.0}
    model = wrapped(blind_vit(), **reads)
    assert loss_after(model) < 0.3
    without = wrapped(blind_vit(), **reads)
    without.set_budget(0)
    assert loss_after(without) > 0.65


def test_training_the_tape_alone_trains_the_gates() -> None:
    settings = ImageModel("vit_tiny_patch16_224", {"depth": 2}, wrap={"patch": 4, "steps": 4}, trains="tape")
    model = build_image_model(settings, 32, 3, 5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"gate.open", "bank.h2.weight", "append_mlp.fc1.weight", "vit.head.weight"} <= trained
    assert not [name for name in trained if name.startswith("vit.") and "head" not in name]
    assert model.no_weight_decay() >= {"gate.open", "bank.pos_embed"}


def test_training_the_tape_alone_leaves_what_nothing_teaches_frozen() -> None:
    wrap = {"bank": "windows", "window": 32, "steps": 2, "search": 4}
    settings = ImageModel("vit_tiny_patch16_224", {"depth": 2}, wrap=wrap, trains="tape")
    model = build_image_model(settings, 128, 3, 5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not [name for name in trained if name.startswith(("to_token.", "place."))]
    assert any(name.startswith("scan.") for name in trained)


def test_the_vits_keys_stay_timms() -> None:
    vit = pretrained()
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    model = wrapped(vit)
    timm.create_model("vit_tiny_patch16_224", **SMALL).load_state_dict(model.vit.state_dict(), strict=True)
    assert all(torch.equal(model.state_dict()[f"vit.{name}"], value) for name, value in before.items())
    assert not any("gate" in name for name in wrapped(gate=False).state_dict())
    assert wrapped(vit.eval()).training is False
    assert wrapped(vit.train()).training is True


@torch.no_grad()
def test_an_input_bank_sees_its_patches_as_the_vit_sees_them_magnified() -> None:
    vit, x = pretrained(reg_tokens=2), images()
    bank = wrapped(vit).bank
    assert isinstance(bank, InputBank)
    cells = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    magnified = F.interpolate(cells, (8, 8), mode="bicubic", antialias=True)
    seen = vit.patch_embed.proj(magnified).flatten(1).unflatten(0, (4, 64))
    places = bank(x) - seen
    torch.testing.assert_close(places, places[:1].expand_as(places), rtol=1e-4, atol=1e-4)
    coarse = places[0].unflatten(0, (4, 2, 4, 2)).mean((1, 3)).flatten(0, 1)
    assert F.cosine_similarity(coarse, vit.pos_embed[0, 3:]).min() > 0.8


@pytest.mark.parametrize("patch", [8, 16])
@torch.no_grad()
def test_a_bank_of_the_vits_own_patches_is_its_patch_embedding(patch: int) -> None:
    vit = pretrained(patch_size=patch, pos_embed="none")
    bank = wrapped(vit, patch=patch, steps=2, merge=2).bank
    torch.testing.assert_close(bank(images()), vit.patch_embed(images()), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_learned_bank_starts_among_the_vits_own_tokens() -> None:
    vit = pretrained()
    bank = wrapped(vit, "learn", bank_size=500).bank
    assert isinstance(bank, LearnedBank)
    inputs = (vit.patch_embed(images(64)) + vit.pos_embed[:, 1:]).flatten(0, 1)
    torch.testing.assert_close(bank.tokens.std(), inputs.std(), rtol=0.05, atol=0.0)
    assert F.cosine_similarity(bank.tokens.mean(0), inputs.mean(0), dim=0) > 0.9
    assert len(bank.tokens.unique(dim=0)) == 500


def test_a_hybrid_and_other_channels_are_wrapped_too() -> None:
    hybrid = timm.create_model("vit_tiny_r_s16_p8_224", img_size=64, depth=2, num_classes=5).eval()
    x = images(2, 64)
    torch.testing.assert_close(adatape.wrap(hybrid, "input", patch=8)(x), hybrid(x), rtol=1e-5, atol=1e-5)
    grey = pretrained(in_chans=1)
    torch.testing.assert_close(wrapped(grey)(images()[:, :1]), grey(images()[:, :1]), rtol=1e-5, atol=1e-5)


def test_a_bank_that_was_given_stays_as_it_is() -> None:
    bank = LearnedBank(80, 64)
    before = bank.tokens.detach().clone()
    assert torch.equal(adatape.wrap(pretrained(), bank, steps=4).bank.tokens, before)


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_gates_are_counted_and_cost_no_multiply(bank: str) -> None:
    model = wrapped(bank=bank, threshold=99.0)
    assert total(cost(model)).parameters == sum(p.numel() for p in model.parameters())
    # Before 2.15 torch counts the CPU's fused attention as nothing.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model.requires_grad_(False)(images(1))
    assert total(cost(model)).macs == counter.get_total_flops() // 2


class OwnFeatures(VisionTransformer):
    def forward_features(self, x: Tensor, **options: Any) -> Tensor:
        return 2 * super().forward_features(x, **options)


def test_what_cannot_be_wrapped_is_refused_with_the_reason() -> None:
    beit = timm.create_model("beit_base_patch16_224", depth=1)
    for vit, message in (
        (wrapped(), r"the backbone is a AdaTape; .* it holds one as \.vit, so wrap that"),
        (torch.nn.DataParallel(pretrained()), r"is a DataParallel; .* it holds one as \.module, so wrap that"),
        (torch.compile(pretrained()), r"is a OptimizedModule; .* it holds one as \._orig_mod, so wrap that"),
        (OwnFeatures(**SMALL), "OwnFeatures with a forward_features of its own, which a wrapper would not call"),
        (beit, "is a Beit; it must be a timm VisionTransformer or Eva: .* relative positions.* try eva02_base"),
        (timm.create_model("resnet18"), "the backbone is a ResNet; it must be a timm VisionTransformer or Eva"),
    ):
        with pytest.raises(TypeError, match=message):
            adatape.wrap(vit)
    for make, message in (
        (lambda: wrapped(pretrained(global_pool="map"), gate=False), "global_pool is 'map'; .* gate must be True"),
        (lambda: wrapped(patch=5), "bank patch is 5; it must divide the image size 32 × 32"),
        (lambda: wrapped(patch=4.0), "bank patch is 4.0; it must be a whole number"),
        (lambda: wrapped(steps=2.5), "steps is 2.5; it must be a whole number"),
        (lambda: wrapped(merge=2.5), "merge is 2.5; it must be a whole number"),
        (lambda: wrapped(layer=1.0), "layer is 1.0; it must be a block index from 0 to 2"),
        (lambda: wrapped(bank="learn", bank_size=80.5), "bank_size is 80.5; it must be a whole number"),
        (lambda: wrapped(update="mean"), "update is 'mean'; it must be one of average, replace"),
        (lambda: wrapped(ponder="entropy"), "ponder is 'entropy'; it must be one of gini, max, collect"),
        (lambda: wrapped(temperature=0.0), "temperature is 0.0; it must be positive"),
        (lambda: wrapped(norm_scale=float("nan")), "norm_scale is nan; it must be positive"),
        (lambda: timm.create_model("adatape"), "backbone is None; it must be the name of a ViT"),
        (lambda: timm.create_model("adatape", backbone="vit_none"), "backbone is 'vit_none'; it must be"),
        (lambda: timm.create_model("adatape", backbone="vit_tiny_patch16_224", tape_ffn="blocks"), "keeps its blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize(
    ("backbone", "reads"),
    [
        ("vit_tiny_patch16_224.augreg_in21k", {"bank": "input", "patch": 4, "layer": 2}),
        ("vit_small_patch14_reg4_dinov2", {"bank": "learn", "bank_size": 90, "tape_ffn": "none"}),
        ("vit_base_patch32_clip_224", {"bank": "input", "patch": 8, "merge": 1, "gate": False}),
        ("vit_small_patch16_dinov3", {"bank": "input", "patch": 4, "rope_rescale_coords": 2.0}),
        ("deit_tiny_distilled_patch16_224", {"bank": "learn", "bank_size": 90}),
    ],
)
def test_a_wrapper_comes_back_from_a_folder_to_the_bit(backbone: str, reads: dict[str, Any], tmp_path: Path) -> None:
    options = {"backbone": backbone, **SMALL, **reads, "steps": 5, "threshold": 1.5}
    model = timm.create_model("adatape", **options).eval()
    as_if_trained(model.vit)
    if model.gate is not None:
        torch.nn.init.uniform_(model.gate.open, -0.1, 0.1)
    folder = release(model, "adatape", options, tmp_path / "out", **SAID)
    again, x = timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), images()
    assert torch.equal(again(x), model(x))
    assert (again(x) - again.vit(x)).abs().max() > 1e-3
    assert again.reader.reading == model.reader.reading
    assert type(again.bank) is type(model.bank)


def test_the_registered_name_is_wrap_of_the_backbone() -> None:
    model = timm.create_model("adatape", backbone="vit_tiny_patch16_224", **SMALL, **READS).eval()
    model.load_state_dict(wrapped().state_dict(), strict=True)
    torch.testing.assert_close(model(images()), pretrained()(images()), rtol=1e-5, atol=1e-5)
    clip = timm.create_model("adatape", backbone="vit_base_patch32_clip_224", depth=2, bank="learn", bank_size=80)
    assert clip.pretrained_cfg["mean"] == timm.get_pretrained_cfg("vit_base_patch32_clip_224").mean
    assert clip.pretrained_cfg["classifier"] == "vit.head"


def test_both_heads_of_a_released_distilled_vit_are_new_for_other_classes(tmp_path: Path) -> None:
    name = "deit_tiny_distilled_patch16_224"
    release(wrapped(pretrained(name)), "adatape", {"backbone": name, **SMALL, **READS}, tmp_path / "out", **SAID)
    other = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=7)
    assert other.vit.head.out_features == other.vit.head_dist.out_features == 7


@pytest.mark.parametrize("tape_ffn", ["append", "append+blocks"])
def test_behind_gates_every_parameter_has_a_gradient(tape_ffn: str) -> None:
    """DDP waits for every gradient."""
    options = {"img_size": 32, "patch_size": 8, "bank_patch": 4, "depth": 3, "num_classes": 5, "steps": 6}
    model = timm.create_model("adatape_tiny_patch16_224", gate=True, tape_ffn=tape_ffn, **options).train()
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("name", ["steps", "threshold", "norm_scale", "query_noise", "bank_dropout", "query_width"])
@pytest.mark.parametrize("value", ["4", None, True])
def test_a_setting_that_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be a number"):
        adatape.wrap(timm.create_model("vit_tiny_patch16_224", depth=2), **{name: value})


def test_noise_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="query_noise nan"):
        adatape.wrap(timm.create_model("vit_tiny_patch16_224", depth=2), query_noise=float("nan"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.zeros(3, 32, 32),
            r"images have shape \(3, 32, 32\) and dtype torch.float32; they must be \(b, 3, height, ",
        ),
        (torch.zeros(1, 2, 3, 32, 32), r"images have shape \(1, 2, 3, 32, 32\)"),
        (torch.zeros(2, 1, 32, 32), r"images have shape \(2, 1, 32, 32\)"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "dtype torch.uint8; they must be .*floating point"),
        (torch.zeros(2, 3, 32, 32).long(), "dtype torch.int64"),
    ],
)
@pytest.mark.parametrize(
    "name", ["adatape_tiny_patch16_224", "ut_tiny_patch16_224", "ponder_tiny_patch16_224", "wrapped"]
)
def test_what_is_no_batch_of_images_is_refused(name: str, given: torch.Tensor, message: str) -> None:
    shape = {"img_size": 32, "embed_dim": 96, "num_heads": 3, "depth": 1}
    bank = {"bank_patch": 4} if name.startswith("adatape") else {}
    vit = timm.create_model("vit_tiny_patch16_224", **{**shape, "depth": 2}) if name == "wrapped" else None
    model = timm.create_model(name, **{**shape, "depth": 2}, **bank) if vit is None else adatape.wrap(vit, patch=4)
    with pytest.raises(ValueError, match=message):
        model(given)


def test_an_unknown_loss_is_refused() -> None:
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2, num_classes=5)
    model = adatape.wrap(vit, patch=4, steps=2, query_width=16)
    output: Any = model(torch.randn(2, 3, 32, 32), output=True)
    with pytest.raises(ValueError, match="kind is 'bce'; it must be 'softmax' or 'sigmoid'"):
        model.loss(output, torch.tensor([0, 1]), kind="bce")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bank", ["input", "learn"])
def test_a_vit_is_wrapped_where_the_default_dtype_is_another(bank: Any, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2, num_classes=5)
        model = adatape.wrap(vit, bank, bank_size=40, steps=2, patch=4, query_width=16)
        assert model(torch.randn(2, 3, 32, 32)).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="bankk"):
        adatape.wrap(timm.create_model("vit_tiny_patch16_224", depth=2), bankk="input")


def test_weights_that_cannot_be_fetched_are_asked_for_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no\nnetwork. Please make sure your Internet connection is on.")

    monkeypatch.setattr(timm, "create_model", offline)
    model = ImageModel("vit_tiny_patch16_224.augreg_in21k", pretrained="hub")
    with pytest.raises(ValueError, match=r"augreg_in21k cannot be fetched: no network; `--pretrained FILE` takes"):
        build_image_model(model, 32, 3, 4)
