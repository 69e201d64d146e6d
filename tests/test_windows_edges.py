"""Windows where it is tight: equal scores, borders, half precision, what a CUDA graph allows, timm's interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graphable import FromHost
from test_cost import counted
from test_windows import IMAGE, images, read, small, small_vit
from timm.models.vision_transformer import VisionTransformer
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

import adatape
from adatape.macs import total
from adatape.windows.answers import OneLabel
from adatape.windows.scan import highest_apart


def apart(index: torch.Tensor, columns: int) -> torch.Tensor:
    """The largest of both distances between each two cells of (b, t), 99 for a cell and itself."""
    at = torch.stack([index // columns, index % columns], -1)
    return (at[:, :, None] - at[:, None]).abs().amax(-1) + 99 * torch.eye(index.shape[1], dtype=torch.int64)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_no_two_neighbours_are_chosen_among_equal_scores_and_the_first_of_equals_comes_first(levels: int) -> None:
    scores = torch.randint(0, levels, (6, 11, 14), generator=torch.Generator().manual_seed(levels)).float()
    index, top = highest_apart(scores, 7)
    there = (top > -torch.inf)[:, :, None] & (top > -torch.inf)[:, None]
    assert there.any()
    assert apart(index, 14)[there].min() >= 2
    for row in range(6):
        chosen = [(-score, cell) for score, cell in zip(top[row].tolist(), index[row].tolist(), strict=True)]
        assert chosen == sorted(chosen)
    assert all(len(set(row)) == 7 for row in index.tolist())
    for count in (1, 3, 6):
        assert torch.equal(highest_apart(scores, count)[0], index[:, :count])


def test_a_blank_image_is_read_without_neighbours() -> None:
    out = read(small(), torch.zeros(1, 3, *IMAGE))
    length = int(out.tape.length)
    assert 1 <= length <= 4
    assert length == 1 or apart(out.tape.index[:, :length, 0], 16).min() >= 2


def test_scores_have_more_steps_than_bfloat16_has() -> None:
    model = small()
    with torch.autocast("cpu", torch.bfloat16):
        scores = model.scan(images(1)).scores
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"view": 32, "layer": 2, "floor": 0.02}])
def test_a_model_in_half_precision_answers_about_the_same(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, pixels = small(**options), torch.randint(0, 256, (3, *IMAGE), dtype=torch.uint8)
    x = pixels[None].float() / 127.5 - 1
    with torch.no_grad():
        whole = model(x)
        half = model.to(dtype)
        torch.testing.assert_close(half(x.to(dtype)), whole, atol=0.1, rtol=0.1)
        opened = half([adatape.open_image(pixels, tile=40)])
        torch.testing.assert_close(opened, half([x[0].to(dtype)]), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("size", [IMAGE, (99, 133)])
def test_boxes_of_the_tape_are_the_pixels_that_were_encoded(
    opened: bool, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """… at borders too, where a window has zeros beyond the image."""
    model, pixels = small(steps=12), np.random.default_rng(0).integers(1, 256, (*size, 3), dtype=np.uint8)
    x = torch.from_numpy(pixels).movedim(-1, 0).float() / 127.5 - 1
    encode, seen = model.encode, []
    monkeypatch.setattr(model, "encode", lambda windows: seen.append(windows) or encode(windows))
    with torch.no_grad():
        out = model([adatape.open_image(pixels, tile=40)] if opened else x[None], output=True)
    length = int(out.tape.length)
    around = torch.nn.functional.pad(x, (16, 16, 16, 16))
    beyond = 0
    for window, box in zip(seen[0], model.tape_boxes(out.tape.index[0, :length, 0], size).tolist(), strict=False):
        top, left, height, width = box
        beyond += top < 0 or left < 0 or top + height > size[0] or left + width > size[1]
        torch.testing.assert_close(window, around[:, top + 16 : top + 16 + height, left + 16 : left + 16 + width])
    assert beyond


@pytest.mark.parametrize(
    "options", [{}, {"view": 32, "layer": 1, "search": 12}, {"labels": "several", "search": 12, "training_steps": 3}]
)
def test_a_training_step_can_be_a_cuda_graph(options: dict[str, Any]) -> None:
    model = small(**options).train()
    several = "labels" in options
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {name: torch.empty_like(each, device="cuda") for name, each in model.state_dict().items()}
        x, key = torch.empty(3, 3, *IMAGE, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
        target = torch.empty(3, 5, device="cuda") if several else key
        with FromHost() as seen:
            out = functional_call(model, weights, (x,), {"output": True, "key": key})
            model.loss(out, target, 0.0, "sigmoid" if several else "softmax")
    assert seen.found == []


@pytest.mark.parametrize("options", [{}, {"view": 32, "layer": 2}])
def test_inference_can_be_a_cuda_graph(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adatape.models.windows.is_compiling_or_capturing", lambda: True)
    model = small(**options).eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), FromHost() as seen:
        weights = {name: torch.empty_like(each, device="cuda") for name, each in model.state_dict().items()}
        seen.found.clear()
        functional_call(model, weights, (torch.empty(3, 3, *IMAGE, device="cuda"),))
    assert seen.found == []


def test_cells_that_were_found_twice_have_their_higher_rank() -> None:
    """scatter on a GPU would take either."""
    model = small(search=40).train()
    with torch.no_grad():
        scanned = model.scan(images(1))
        found = model._searched(model._sources(images(1))[0], scanned, torch.arange(1))
    twice = found._replace(index=found.index.clone())
    best = found.gate.topk(2).indices[0]
    twice.index[0, best[1]] = found.index[0, best[0]]
    for order in ([0, 1], [1, 0]):
        gate = found.gate.clone()
        gate[0, best] = torch.tensor([60.0, 59.0])[order]
        index, top = model._choose(scanned, twice._replace(gate=gate), torch.arange(1))
        place = index[0].tolist().index(int(found.index[0, best[0]]))
        assert top[0, place] in (100 + model.most, 1000)


def test_a_search_for_fewer_windows_than_are_read_reads_what_it_has() -> None:
    out = read(small(search=2).train(), images(), torch.arange(3))
    assert out.places.searched.index.shape == (3, 2)
    assert out.logits.isfinite().all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(1, 3, 8, 8), "window is 16; it must fit the image, 8 × 8"),
        (torch.zeros(1, 3, 24, 24), "steps is 4; an image of 24 × 24 has room for 2, with cells of 8 × 8 pixels"),
        (torch.zeros(3, *IMAGE), r"images have shape \(3, 96, 128\); they must have a batch, 3 channels"),
        (torch.zeros(1, 1, *IMAGE), r"images have shape \(1, 1, 96, 128\)"),
        (torch.zeros(0, 3, *IMAGE), r"images have shape \(0, 3, 96, 128\); they must have a batch"),
        ([], "the list of images is empty"),
        (torch.zeros(1, 3, *IMAGE, dtype=torch.uint8), "images have dtype torch.uint8; they must be floating point"),
        ([torch.zeros(3, *IMAGE, dtype=torch.uint8)], "image 0 has dtype torch.uint8; it must be floating point"),
    ],
)
def test_images_that_do_not_suit_are_refused_as_those_of_a_list(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small()(given)


@pytest.mark.parametrize(
    ("vit", "options", "said"),
    [
        ({}, {"window": 20}, "window is 20; the ViT encodes it, so its patches of 8 pixels must divide it"),
        ({"global_pool": "avg"}, {}, "view is None and global_pool 'avg'"),
        ({"class_token": False, "global_pool": "avg"}, {}, "view is None; the ViT has no class token"),
    ],
)
def test_a_backbone_that_does_not_suit_is_refused(vit: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        adatape.wrap(small_vit(**vit), "windows", image=IMAGE, **{"window": 16, "cell": 8, "steps": 4, **options})


@pytest.mark.parametrize(
    "vit", [{"pos_embed": "none"}, {"no_embed_class": True}, {"reg_tokens": 3}, {"pre_norm": True}]
)
@pytest.mark.parametrize("options", [{}, {"view": 32, "layer": 1}, {"layer": 1}])
def test_the_cost_is_what_pytorch_counts_for_any_prefix_and_positions(
    vit: dict[str, Any], options: dict[str, Any]
) -> None:
    shape: dict[str, Any] = {"window": 16, "cell": 8, "steps": 4, **options}
    model = adatape.wrap(small_vit(**vit), "windows", image=IMAGE, **shape).eval()
    with torch.no_grad():
        assert total(model.cost()).macs == counted(model, images(1))
        assert model(images(2)).isfinite().all()


def test_an_image_of_which_nothing_is_read_costs_its_scan_and_the_rows_that_go_on() -> None:
    for options, inputs in (({"layer": 1}, 1), ({"view": 32, "layer": 1}, 17)):
        model = small(**options)
        model.set_budget(4, 1 - 1e-6)
        out = read(model, images(1))
        assert out.tape.length.tolist() == [0]
        scan, blocks = model.scan.macs(*IMAGE), [counted(each, torch.zeros(1, inputs, 32)) for each in model.vit.blocks]
        view = 16 * 32 * 3 * 64 if "view" in options else 0
        run = sum(blocks) if "view" in options else sum(blocks[1:])
        assert model.actual_macs(out).tolist() == [scan + view + run + 32 * 5]


def test_without_a_view_a_budget_begins_with_one_window() -> None:
    model = small()
    with pytest.raises(ValueError, match="steps is 0; of images of this size, this model reads 1 to 48 windows"):
        model.set_budget(0)
    model.set_budget(1)
    assert read(model, images()).tape.length.tolist() == [1, 1, 1]


def test_the_answer_of_hidden_windows_alone_has_a_loss() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert OneLabel().combined(None, torch.randn(2, 3), torch.randn(2, 3, 5), nothing).isfinite().all()
    model = small()
    model.set_budget(4, 1 - 1e-6)
    assert model.loss(read(model, images()), torch.arange(3)).isfinite()


@pytest.mark.parametrize("search", [0, 12])
def test_another_number_of_classes_is_answered_and_learnt(search: int) -> None:
    model = small(view=32, layer=2, search=search)
    model.reset_classifier(7)
    assert model(images()).shape == (3, 7)
    model.train().loss(read(model, images(), torch.arange(3)), torch.tensor([0, 3, 6])).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval().reset_classifier(0)
    assert torch.equal(model(images()), read(model, images()).features)


def test_intermediate_maps_are_those_of_the_view() -> None:
    model = small(view=(24, 32), layer=2)
    maps = model.forward_intermediates(images(), intermediates_only=True)
    assert [tuple(each.shape) for each in maps] == [(3, 32, 3, 4)] * 3
    model.set_budget(0)
    seen = torch.nn.functional.interpolate(images(), (24, 32), mode="bilinear", antialias=True)
    plain = model.vit.forward_intermediates(seen, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(model.forward_intermediates(images(), intermediates_only=True), plain,
                                                 strict=True))  # fmt: skip
    with pytest.raises(ValueError, match="view is None"):
        small().forward_intermediates(images())


def test_another_size_of_images_keeps_the_view() -> None:
    model, x = small(view=32, layer=2), torch.randn(1, 3, 160, 96)
    expected = model(x)
    model.set_input_size((160, 96))
    assert model.image_size == (160, 96)
    assert torch.equal(model(x), expected)
    assert total(model.cost()).macs == counted(model, x)
    with pytest.raises(ValueError, match="window is 16; it must fit the image, 12 × 96"):
        model.set_input_size((12, 96))
    with pytest.raises(ValueError, match=r"patch_size is \(8, 8\); windows have the ViT's patches"):
        model.set_input_size(patch_size=(8, 8))


@pytest.mark.parametrize(
    "options", [{}, {"layer": 1, "view": 32}, {"search": 4}, {"encoder": "convolutions", "view": 32}], ids=str
)
def test_every_parameter_that_trains_has_a_finite_gradient(options: dict[str, Any]) -> None:
    """So that DDP takes a model of windows as it is."""
    model = small(**options).train()
    model.loss(model(torch.randn(2, 3, *IMAGE), output=True), torch.tensor([0, 1])).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)


def test_one_label_of_one_class_is_refused() -> None:
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2, num_classes=1)
    with pytest.raises(ValueError, match="num_classes is 1 and labels 'one'"):
        adatape.wrap(vit, "windows", image=IMAGE, window=16, steps=2)
    adatape.wrap(vit, "windows", image=IMAGE, window=16, steps=2, labels="several")
    model = small()
    with pytest.raises(ValueError, match="num_classes is 1 and labels 'one'"):
        model.reset_classifier(1)
    assert model.num_classes == model.vit.head.out_features > 1


def test_a_forward_on_the_meta_device_gives_shapes() -> None:
    model = small(view=32).to("meta")
    output = model(images().to("meta"), output=True)
    assert (output.logits.shape, output.tape.mask.shape) == ((3, 5), (3, 4))
