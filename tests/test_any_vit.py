"""ViTs of every kind behind one tape: rotary positions, attention pooling, two heads, all pretrained tags of timm."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from scripts import script
from small_runs import in_the_long_suite
from test_wrap import DRAWN, READS, SMALL, VITS, images, loss_of, pretrained, wrapped
from timm.data import resolve_model_data_config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import adatape
from adatape.banks import LearnedBank
from adatape.encoder import TapeGate
from adatape.evaluate.cost import cost, total
from adatape.models import AdaTape
from adatape.models.backbone import embed
from adatape.models.leak import gate_leaks
from adatape.models.rope import rotations, row_rope, tape_places
from adatape.models.vit import Plain

ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "EVA-02, another reference shape": ("eva02_tiny_patch14_224", {}),
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "DINOv3, drawn": ("vit_small_patch16_dinov3", DRAWN),
    "Perception Encoder, columns first": ("vit_pe_spatial_tiny_patch16_512", {}),
    "axial, columns first": ("vit_small_patch16_rope_224", {}),
    "mixed": ("vit_small_patch16_rope_mixed_224", {}),
}
NEW = list(VITS)[list(VITS).index("SigLIP, attention pooling") :]


def opened(kind: str, bank: str = "input", **options: Any) -> AdaTape:
    """A wrapper whose gates are half open, so that its tape counts."""
    name, own = VITS[kind]
    model = wrapped(pretrained(name, **own), bank, **options)
    if model.gate is not None:
        torch.nn.init.constant_(model.gate.open, 0.05)
    return model


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ROPES)
@torch.no_grad()
def test_at_a_grid_cell_a_tape_row_rotates_as_the_cell_does(kind: str, dynamic: bool) -> None:
    """Also where training draws coordinates anew: the tape shares the draw of the grid."""
    name, options = ROPES[kind]
    shape = {"img_size": (40, 64), "dynamic_img_size": dynamic}
    vit = timm.create_model(name, **{**SMALL, **options, **shape}).train(kind.endswith("drawn"))
    rope = embed(vit, torch.randn(2, 3, 40, 64))[1]
    assert rope is not None
    assert rope.grid == (5, 8)
    cells = torch.cartesian_prod(torch.arange(5.0), torch.arange(8.0)).expand(2, -1, -1)
    for layer in (0, 2):
        expected = rope.at(layer).expand(2, vit.blocks[0].attn.num_heads if rope.per_block else 1, -1, -1)
        torch.testing.assert_close(rotations(rope, cells, layer), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ROPES)
@torch.no_grad()
def test_between_two_cells_a_tape_row_rotates_by_the_mean_angle(kind: str) -> None:
    name, options = ROPES[kind]
    vit = timm.create_model(name, **{**SMALL, **options}).train(kind.endswith("drawn"))
    rope = embed(vit, images(1))[1]
    assert rope is not None
    places = torch.tensor([[[1.0, 1.0], [1.0, 1.5], [1.0, 2.0], [0.75, 1.0], [0.5, 1.0]]])
    sin, cos = rotations(rope, places, 1).chunk(2, -1)
    turned = torch.complex(cos, sin)
    for start, middle, end in ((0, 1, 2), (0, 3, 4)):
        step = turned[:, :, middle] / turned[:, :, start]
        torch.testing.assert_close(turned[:, :, end], turned[:, :, middle] * step, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_tape_tokens_lie_where_their_patches_lie_and_learned_ones_nowhere() -> None:
    model = wrapped(pretrained("vit_small_patch16_dinov3"), merge=1, threshold=6.0)
    tape = model(images(), output=True).tape
    places = tape_places(model.bank.boxes(tape.index, (4, 4)), tape)
    index = tape.index[..., 0]
    torch.testing.assert_close(places[..., 0], (index // 8 + 0.5) / 2 - 0.5)
    torch.testing.assert_close(places[..., 1], (index % 8 + 0.5) / 2 - 0.5)
    rope = embed(model.vit, images())[1]
    still = row_rope(rope, tape, LearnedBank(80, 64), 5).table(0)
    assert still.shape == (4, 1, 5 + 16 + 6, 64)
    for rows in (still[:, :, :5], still[:, :, -6:]):
        assert torch.equal(rows, torch.cat([torch.zeros(32), torch.ones(32)]).expand_as(rows))


@pytest.mark.parametrize("bank", ["input", "learn"])
@pytest.mark.parametrize("kind", NEW)
@torch.no_grad()
def test_a_sample_does_not_depend_on_its_batch_nor_on_hidden_rows(kind: str, bank: str) -> None:
    model, x = opened(kind, bank), images(8)
    together = model(x, output=True)
    assert together.tape.length.min() < together.tape.length.max()
    for row in range(8):
        alone = model(x[row : row + 1])[0]
        torch.testing.assert_close(alone, together.logits[row], rtol=1e-5, atol=1e-5)
        model.set_budget(int(together.tape.length[row]), model.reader.reading.threshold)
        trimmed = model(x[row : row + 1])[0]
        torch.testing.assert_close(trimmed, together.logits[row], rtol=1e-5, atol=1e-5)
        model.set_budget()


@pytest.mark.parametrize("kind", [kind for kind in VITS if "attention pooling" not in kind])
@torch.no_grad()
def test_packed_and_bucketed_rows_are_the_padded_ones(kind: str) -> None:
    model, x = opened(kind, gate=False), images(8)
    padded = model(x, output=True)
    assert padded.tape.length.min() < padded.tape.length.max()
    for layout in ({}, {"buckets": 3}):
        model.set_packed(**layout)
        torch.testing.assert_close(model(x), padded.logits, rtol=1e-5, atol=1e-5)


def test_two_heads_in_distilled_training_have_two_logits_and_no_single_loss() -> None:
    model = opened("DeiT, distilled").train()
    model.vit.set_distilled_training(True)
    output = model(images(), output=True)
    assert [each.shape for each in output.logits] == [(4, 5), (4, 5)]
    with pytest.raises(TypeError, match="logits of two heads, so compute a loss of each"):
        model.loss(output, torch.arange(4))
    assert model.eval()(images()).shape == (4, 5)


def test_places_on_the_image_matter_to_a_rotating_vit() -> None:
    model, x = opened("DINOv3"), images()
    seen = model(x)
    model.bank.boxes = lambda *_: None
    assert (model(x) - seen).abs().max() > 1e-3


@pytest.mark.parametrize("kind", NEW)
@torch.no_grad()
def test_plain_is_the_vit_itself(kind: str) -> None:
    name, options = VITS[kind]
    vit, x = pretrained(name, **options), images()
    assert torch.equal(Plain(vit)(x), vit(x))
    assert cost(Plain(vit)) == cost(vit)


@pytest.mark.parametrize("kind", NEW)
def test_costs_are_those_that_pytorch_counts(kind: str) -> None:
    model = opened(kind, threshold=99.0)
    assert total(cost(model)).parameters == sum(p.numel() for p in model.parameters())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model.requires_grad_(False)(images(1))
    # timm computes angles of mixed positions by a matmul; they do not depend on the image.
    angles = 2 * model.vit.rope.freqs[0].numel() * 16 if "mixed" in kind else 0
    assert total(cost(model)).macs == counter.get_total_flops() // 2 - angles


@torch.no_grad()
def with_larger_blocks(scale: float) -> Any:
    """A ViT whose blocks have `scale` times as large matrices, so that attention scores are its square as large."""
    vit = pretrained()
    with torch.no_grad():
        for parameter in vit.blocks.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return vit


@pytest.mark.filterwarnings("ignore:attention scores of block:UserWarning")
@pytest.mark.parametrize("scale", [6, 60])
@torch.no_grad()
def test_without_gradients_a_shut_gate_hides_the_tape_whatever_the_weights(scale: float) -> None:
    model, x = wrapped(with_larger_blocks(scale)), images()
    shut = model(x)
    torch.testing.assert_close(shut, model.vit(x), rtol=1e-4, atol=1e-4)
    torch.nn.init.normal_(model.bank.h2.weight)
    assert torch.equal(model(x), shut), "a shut gate let the tape through"


@pytest.mark.parametrize("scale", [1, 6, 60])
def test_a_vit_whose_shut_tape_leaks_in_training_is_warned_of_when_wrapped(scale: float) -> None:
    """The warning comes from random tokens, block by block; images then show the leak too, and only then."""
    vit, x = with_larger_blocks(scale), images()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = wrapped(vit)
    with torch.no_grad():
        shut = model(x)
    leak = float((model(x).detach() - shut).abs().max() / shut.abs().max())
    if scale == 1:
        assert not said
        assert max(gate_leaks(vit, 1)) == 0
        assert leak < 1e-6
    else:
        assert re.search(r"block 1.* so large that .* by up to \d+% while gradients", str(said[0].message))
        assert leak > 1e-2


def test_measuring_a_leak_leaves_the_vit_and_random_numbers_alone() -> None:
    vit = pretrained().train()
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in vit.state_dict().items()}
    gate_leaks(vit, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in vit.modules())
    assert all(torch.equal(value, state[name]) for name, value in vit.state_dict().items())


def test_with_gradients_a_shut_gate_hides_keys_that_score_far_above_all_inputs() -> None:
    bias = TapeGate(1, 1)()
    scores = torch.tensor([0.0, 0.0, 30.0]) + torch.cat([torch.zeros(2), bias[0].detach()])
    assert scores.softmax(0)[2] < 1e-8


def test_gates_still_learn_from_the_small_gradients_of_a_large_batch() -> None:
    gradients = []
    for scale in (1.0, 1e-8):
        model = wrapped()
        (scale * loss_of(model, images())).backward()
        gradients.append(model.gate.open.grad / scale)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=0.0)


def test_every_pretrained_vit_and_eva_of_timm_is_wrapped_without_options() -> None:
    tags = script("research/wrap_tags.py")
    refused = {tag: why for tag, _, why in tags.verdicts() if why is not None}
    assert not refused
    assert len(tags.tags()) >= 438


@pytest.mark.parametrize("kind", NEW)
@torch.no_grad()
def test_every_kind_is_saved_and_loaded_by_timm_to_the_bit(kind: str, tmp_path: Path) -> None:
    model, x = opened(kind), images()
    timm.models.save_for_hf(model, tmp_path, **adatape.hub_settings(model))
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), model(x))


@in_the_long_suite
def test_every_pretrained_vit_and_eva_of_timm_is_wrapped_at_full_depth() -> None:
    assert not [tag for tag, _, why in script("research/wrap_tags.py").verdicts(deep=True) if why is not None]


@in_the_long_suite
@pytest.mark.parametrize("kind", ["DINOv3", "RoPE, mixed", "DeiT, distilled", "SigLIP, attention pooling"])
def test_every_kind_compiles_without_a_graph_break_and_exports(kind: str) -> None:
    model, x = opened(kind, steps=1, threshold=0.5), images()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    torch.testing.assert_close(program.module()(images(2)), model(images(2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("image", "own", "bank"), [(32, 16, 8), (518, 14, 7), (378, 14, 7), (224, 8, 8), (196, 14, 7), (36, 12, 6)]
)
def test_the_banks_patch_is_8_where_it_divides_the_image_else_half_the_vits(image: int, own: int, bank: int) -> None:
    with torch.device("meta"):
        vit = timm.create_model("vit_tiny_patch16_224", img_size=image, patch_size=own, depth=2)
        assert adatape.wrap(vit, steps=2, merge=2).bank.patch == bank


@pytest.mark.parametrize("name", ["vit_base_patch16_384.augreg_in21k_ft_in1k", "vit_base_patch32_clip_224.openai"])
def test_a_wrapper_says_the_vits_data_configuration(name: str) -> None:
    with torch.device("meta"):
        vit = timm.create_model(name, depth=2)
        model = adatape.wrap(vit)
    assert resolve_model_data_config(model) == resolve_model_data_config(vit)
    assert model.pretrained_cfg["classifier"] == "vit.head"
    assert vit.pretrained_cfg["classifier"] == "head"


@pytest.mark.parametrize("steps", [2.5, "3", 17, True, float("nan"), torch.tensor(2.5)])
def test_a_budget_that_cannot_be_given_is_refused_at_once(steps: Any) -> None:
    model = wrapped(**{**READS, "patch": 4})  # a bank of 64, of which 4 are merged
    before = model.budget()
    with pytest.raises(
        ValueError,
        match=rf"steps is {re.escape(repr(steps))}; it (must be a whole number|needs 68 bank tokens, and .* 64)",
    ):
        model.set_budget(steps)
    assert model.budget() == before


@pytest.mark.parametrize("threshold", ["1", True, float("nan"), 0.0])
def test_a_threshold_that_is_no_positive_number_is_refused_at_once(threshold: Any) -> None:
    model = wrapped()
    before = model.budget()
    with pytest.raises(ValueError, match=rf"threshold is {threshold!r}; it must be (a number|positive)"):
        model.set_budget(threshold=threshold)
    assert model.budget() == before


def test_drawn_coordinates_and_dropped_patches_are_refused_together() -> None:
    vit = pretrained("vit_small_patch16_dinov3", patch_drop_rate=0.5, **DRAWN)
    with pytest.raises(ValueError, match="patch_drop_rate must be 0"):
        wrapped(vit)


def test_patches_may_be_dropped_in_training_of_a_rotating_vit() -> None:
    x: Tensor = images()
    for name in ("vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"):
        model = wrapped(pretrained(name, patch_drop_rate=0.5)).train()
        model(x).square().sum().backward()
        assert model.gate.open.grad.abs().min() > 1e-6
