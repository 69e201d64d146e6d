"""Reading windows of a large image: where the scan looks, what is encoded, and what the answer is made of."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from test_cost import counted
from timm.models.vision_transformer import VisionTransformer

import adatape
from adatape import export
from adatape.config import ImageModel
from adatape.data import haystack as haystack_data
from adatape.data import images as image_data
from adatape.data.haystack import DIGIT, make_haystack
from adatape.data.images import haystack_of, open_images
from adatape.data.loaders import Labelled
from adatape.data_config import Images
from adatape.evaluate.accuracy import score
from adatape.macs import total
from adatape.models.build import WrapWindowsOptions, image_size_options
from adatape.models.windows import WindowTape
from adatape.recipes.haystack import haystack
from adatape.train.release import release
from adatape.train.task import build_image_model
from adatape.train.trainer import Trainer
from adatape.windows import sources
from adatape.windows.answers import OneLabel, SeveralLabels
from adatape.windows.checks import most_apart
from adatape.windows.options import WindowOptions
from adatape.windows.scan import Scan, cut_windows, highest_apart, scan_shape
from adatape.windows.teaching import scan_loss

ROOT = Path(__file__).parents[1]
IMAGE = (96, 128)


def small_vit(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    return VisionTransformer(**{**shape, "num_classes": 5, **options}).eval()


def small(**options: Any) -> WindowTape:
    shape: dict[str, Any] = {"image": IMAGE, "window": 16, "cell": 8, "steps": 4}
    model = adatape.wrap(small_vit(), "windows", **{**shape, **options})
    torch.manual_seed(1)
    for layer in model.scan.modules():  # running statistics of an untrained scan would make all cells alike
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
    return model.eval()


def images(count: int = 3, seed: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, *IMAGE, generator=torch.Generator().manual_seed(seed))


def read(model: WindowTape, x: torch.Tensor, key: torch.Tensor | None = None) -> Any:
    return model(x, output=True, key=key)


@pytest.mark.parametrize(("scale", "fold", "size"), [(2, 2, (97, 163)), (1, 4, (90, 130)), (4, 1, (98, 163))])
@torch.no_grad()
def test_a_scan_sees_zeros_up_to_the_next_cell(scale: int, fold: int, size: tuple[int, int]) -> None:
    scan = Scan(3, scan_shape(16, scale, fold)).eval()
    x = torch.randn(2, 3, *size)
    filled = torch.nn.functional.pad(x, (0, -size[1] % 16, 0, -size[0] % 16))
    assert torch.equal(scan(x).scores, scan(filled).scores)


def test_a_window_is_what_lies_around_its_centre_and_zero_outside() -> None:
    x = images(2)
    centres = torch.tensor([[[48, 60], [0, 0]], [[95, 127], [20, 8]]])
    windows = cut_windows(x, centres, 16)
    assert torch.equal(windows[0, 0], x[0, :, 40:56, 52:68])
    assert torch.equal(windows[0, 1][:, 8:, 8:], x[0, :, :8, :8])
    assert not windows[0, 1][:, :8].any()
    assert torch.equal(windows[1, 0][:, :9, :9], x[1, :, 87:, 119:])


def test_no_two_neighbouring_cells_are_chosen_and_the_highest_comes_first() -> None:
    scores = torch.randn(4, 12, 9, generator=torch.Generator().manual_seed(0))
    index, top = highest_apart(scores, 6)
    assert torch.equal(top, top.sort(1, descending=True).values)
    assert torch.equal(index[:, 0], scores.flatten(1).argmax(1))
    at = torch.stack([index // 9, index % 9], -1)
    apart = (at[:, :, None] - at[:, None]).abs().amax(-1) + 9 * torch.eye(6, dtype=torch.int64)
    assert apart.min() >= 2


def test_a_cell_sees_its_own_place() -> None:
    """A bright spot moves the score of the cell whose middle is nearest, whatever the shape of the scan."""
    for cell, scale, fold in ((16, 2, 2), (8, 1, 2), (16, 2, 4)):
        torch.manual_seed(0)
        scan = Scan(1, scan_shape(cell, scale, fold, 4)).eval()
        for p in scan.parameters():
            p.data.abs_()
        blank = torch.zeros(1, 1, 100, 130)
        spot = blank.clone()
        index = torch.tensor(3 * scan.grid(100, 130)[1] + 5)
        row, column = scan.centres(index, scan.grid(100, 130)[1]).tolist()
        spot[..., row - 1 : row + 1, column - 1 : column + 1] = 50
        with torch.no_grad():
            moved = (scan(spot).scores - scan(blank).scores).abs()[0]
        assert moved.shape == scan.grid(100, 130)
        assert moved.flatten()[index] >= 0.5 * moved.max() > 0


@pytest.mark.parametrize(("cell", "scale", "fold", "wide"), [(16, 2, 2, True), (8, 1, 2, False), (16, 2, 4, True)])
def test_a_window_stands_around_what_its_score_sees(cell: int, scale: int, fold: int, wide: bool) -> None:
    scan = Scan(1, scan_shape(cell, scale, fold, 4, wide)).eval()
    x = torch.randn(1, 1, 20 * cell, 24 * cell, requires_grad=True)
    index = torch.tensor(9 * 24 + 11)
    scan(x).scores.flatten(1)[0, index].backward()
    assert x.grad is not None
    seen = x.grad[0, 0].nonzero()
    middle = (seen.amin(0) + seen.amax(0) + 1) / 2
    assert torch.equal(middle, scan.centres(index, 24).float())
    assert ((seen.amax(0) - seen.amin(0) + 1) == (4 if wide else 2) * cell).all()


def test_a_budget_of_nothing_is_the_vit_on_the_view() -> None:
    model, x = small(view=32, layer=2), images()
    model.set_budget(0)
    seen = torch.nn.functional.interpolate(x, (32, 32), mode="bilinear", antialias=True)
    assert torch.equal(model(x), model.vit(seen))


@pytest.mark.parametrize(
    "options",
    [{}, {"view": 32, "layer": 2}, {"encoder": "convolutions"}, {"encoder": "test_resnet"}, {"labels": "several"}],
)
def test_an_image_is_read_alone_as_in_a_batch(options: dict[str, Any]) -> None:
    model, x = small(**options), images()
    together = read(model, x)
    for n in range(len(x)):
        alone = read(model, x[n : n + 1])
        assert torch.equal(alone.tape.index[0], together.tape.index[n])
        torch.testing.assert_close(alone.logits[0], together.logits[n], rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_scanned_in_parts_has_the_scores_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, scanned = small(labels="several").eval(), images(5), []
    scan = model.scan.forward
    monkeypatch.setattr(model.scan, "forward", lambda part: scanned.append(len(part)) or scan(part))
    whole = read(model, x)
    monkeypatch.setattr(sources, "SCANNED_AT_ONCE", 2 * x[:1].numel())
    parts = read(model, x)
    assert scanned == [5, 2, 2, 1]
    assert torch.equal(parts.tape.index, whole.tape.index)
    torch.testing.assert_close(parts.places.scores, whole.places.scores, rtol=0, atol=1e-5)
    torch.testing.assert_close(parts.logits, whole.logits, rtol=0, atol=1e-4)


def test_a_smaller_budget_reads_the_first_windows_of_a_larger_one() -> None:
    model, x = small(), images()
    four = read(model, x).tape.index
    model.set_budget(2)
    assert torch.equal(read(model, x).tape.index, four[:, :2])


def test_a_budget_may_be_all_windows_and_only_what_is_read_is_encoded() -> None:
    model, x, seen = small(view=32, layer=2), images(2), []
    four = read(model, x).tape.index
    encode = model.encode
    model.encode = lambda windows: seen.append(len(windows)) or encode(windows)  # type: ignore[method-assign]
    room = most_apart(IMAGE, model.options.cell)
    with pytest.warns(UserWarning, match=f"steps is {room}; the model was built, and perhaps trained, for at most 4"):
        model.set_budget(room)
    out = read(model, x)
    length = out.tape.length
    assert torch.equal(out.tape.index[:, :4], four)
    assert 4 < int(length.min()) < room  # a scan has fewer peaks than there is room for
    assert seen == [int(length.sum())]
    assert model.actual_macs(out).tolist() == [total(model.cost(tape)).macs for tape in length.tolist()]
    with pytest.raises(ValueError, match=f"steps is {room + 1}; of images of this size, this model reads 0 to {room}"):
        model.set_budget(room + 1)
    with pytest.raises(ValueError, match=f"steps is {room}; an image of 64 × 64 has room for 16"):
        model(x[..., :64, :64])


def test_windows_below_the_floor_are_hidden_and_change_nothing() -> None:
    model, x = small(view=32, layer=2), images(8)
    weight = read(model, x).tape.weight[..., 0]
    model.floor = float(weight.median())
    out = read(model, x)
    assert torch.equal(out.tape.mask, weight > model.floor)
    assert 0 < out.tape.length.float().mean() < model.most
    for n, length in enumerate(out.tape.length.tolist()):
        model.set_budget(length)
        alone = model(x[n : n + 1])[0].softmax(0)  # a budget of 0 gives the ViT's logits, a mixture log-probabilities
        torch.testing.assert_close(alone, out.logits[n].softmax(0), rtol=1e-4, atol=1e-5)
        model.set_budget()


def test_only_windows_that_are_read_are_encoded() -> None:
    model, x = small(encoder="convolutions"), images(2)
    seen = []
    assert model.encoder is not None
    model.encoder.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    model(x)
    model.set_budget(1)
    model(x)
    assert seen == [2 * 4, 2 * 1]


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"view": 32, "layer": 2}, {"encoder": "convolutions", "view": (24, 32), "layer": 1}),
        *({"encoder": "test_mambaout"}, {"encoder": "test_vit", "window": 32, "view": 32, "layer": 3}),
    ],
)
def test_the_cost_is_what_pytorch_counts(options: dict[str, Any]) -> None:
    model = small(**options)
    assert total(model.cost()).parameters == sum(p.numel() for p in model.parameters())
    for steps in (0, 1, 4) if model.view else (1, 4):
        model.set_budget(steps)
        assert total(model.cost()).macs == counted(model, images(1))


@torch.no_grad()
def test_an_image_of_a_list_costs_what_pytorch_counts_at_its_own_size() -> None:
    model = small(view=32, layer=1)
    sides = [(128, 128), (96, 160), (224, 192)]
    several = [torch.randn(3, *size) for size in sides]
    spent = model.actual_macs(model(several, output=True)).tolist()
    assert spent == [counted(model, [image]) for image in several]  # type: ignore[arg-type]
    assert len(set(spent)) == 3
    model.set_budget(4, 1 - 1e-6)
    unread = model(several, output=True)
    assert unread.tape.length.tolist() == [0, 0, 0]
    scans = [model.scan.macs(*size) for size in sides]
    rest = [macs - scan for macs, scan in zip(model.actual_macs(unread).tolist(), scans, strict=True)]
    assert len(set(rest)) == 1


@torch.no_grad()
def test_only_tokens_that_a_model_has_are_counted() -> None:
    for options, tokens in (({"view": 32}, 1 + 16), ({}, 1)):
        model, seen = small(layer=1, **options), []
        model.vit.blocks[1].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape[1]))
        batch = Labelled(images(), torch.tensor([0, 1, 2]))
        found = score(model, [batch])
        assert model.input_tokens() == tokens
        assert found.sequence_mean == found.sequence_max == tokens + model.steps == seen[-1]


def test_one_label_is_a_mixture_of_what_windows_say() -> None:
    gate, evidence = (
        torch.tensor([[0.0, math.log(3.0), 5.0]]),
        torch.log(torch.tensor([[[0.9, 0.1], [0.2, 0.8], [1, 1]]])),
    )
    logits = OneLabel().combined(None, gate, evidence, torch.tensor([[True, True, False]]))
    torch.testing.assert_close(logits.exp(), torch.tensor([[0.25 * 0.9 + 0.75 * 0.2, 0.25 * 0.1 + 0.75 * 0.8]]))


def test_several_labels_are_a_noisy_or_of_what_windows_say() -> None:
    gate, evidence = torch.tensor([[0.0, 1.0]]), torch.tensor([[[2.0, -1.0], [0.5, 0.3]]])
    view = torch.tensor([[-1.0, 0.5]])
    each = gate.sigmoid()[..., None] * evidence.sigmoid()
    expected = 1 - (1 - view.sigmoid()) * (1 - each[:, 0]) * (1 - each[:, 1])
    logits = SeveralLabels().combined(view, gate, evidence, torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(logits.sigmoid(), expected)
    none = SeveralLabels().combined(view, gate, evidence, torch.zeros(1, 2, dtype=torch.bool))
    torch.testing.assert_close(none, view)


@pytest.mark.parametrize("search", [0, 12])
@pytest.mark.parametrize("labels", ["one", "several"])
def test_every_part_learns(labels: str, search: int) -> None:
    model = small(labels=labels, search=search, view=32, layer=2).train()
    target = torch.tensor([0, 3, 2]) if labels == "one" else torch.tensor([[1.0, 0, 0, 1, 0], [0] * 5, [0, 1, 0, 0, 0]])
    kind: Any = "softmax" if labels == "one" else "sigmoid"
    loss = model.loss(read(model, images(), torch.arange(3)), target, 0.0, kind)
    loss.backward()
    assert loss.isfinite()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert idle == []


def test_what_teaches_the_scan_does_not_change_windows() -> None:
    model = small().train()
    out = read(model, images(), torch.arange(3))
    shares = torch.eye(5)[:3]
    scan_loss(model.answer, out.places.scores, out.places.gate, out.places.evidence, shares, out.tape.mask).backward()
    assert all(p.grad is None for p in model.head.parameters())
    assert model.scan.score.weight.grad is not None


def test_random_places_of_training_belong_to_a_samples_key() -> None:
    model = small(search=12).train()
    x, key = images(), torch.tensor([5, 6, 7])
    with torch.no_grad():
        model.scan.eval()  # whose batch norms would see another batch
        index = read(model, x, key).places.searched.index
        assert torch.equal(read(model, x[1:2], key[1:2]).places.searched.index[0], index[1])
        assert not torch.equal(read(model, x, key + 1).places.searched.index, index)


@pytest.mark.parametrize(("training_steps", "count"), [(None, 12), (8, 8), (3, 3)])
def test_training_reads_as_many_windows_as_it_is_told(training_steps: int | None, count: int) -> None:
    model = small(training_steps=training_steps)
    with torch.no_grad():
        assert read(model.train(), images(), torch.arange(3)).tape.mask.shape == (3, count)
        assert read(model.eval(), images()).tape.mask.shape == (3, 4)


def test_it_compiles_in_one_graph() -> None:
    model, x = small(view=32, layer=2), images()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("to", "options"),
    [("torch", {"labels": "several", "encoder": "convolutions"}), ("onnx", {"view": 32, "floor": 0.05})],
)
@torch.no_grad()
def test_an_exported_reader_of_windows_answers_as_the_model_at_any_batch(
    to: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """The floor of the graph is a mask: it encodes all windows, and hides those below it."""
    model, path = small(layer=1, **options), tmp_path / f"model{export.SUFFIX[to]}"
    export.export_model(model, images(1), to, path, {})
    answer = export.open_export(path)
    for count in (1, 2, 5):
        x = images(count, seed=4)
        torch.testing.assert_close(answer({"images": x}).logits, model(x), rtol=1e-4, atol=1e-5)
    if model.floor:
        assert len(set(read(model, images(24)).tape.length.tolist())) > 1


@pytest.mark.parametrize("size", [(97, 163), (100, 150), (96, 131)])
@torch.no_grad()
def test_images_that_are_no_multiple_of_a_cell_are_exported_to_onnx(size: tuple[int, int], tmp_path: Path) -> None:
    """ONNX Runtime takes padding into the pooling that shrinks the image, and refuses more than the pooling's size."""
    model, path = small(image=size, cell=16), tmp_path / "model.onnx"
    x = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(4)) + 1  # so that padding with 0 is seen
    export.export_model(model, x[:1], "onnx", path, {})
    torch.testing.assert_close(export.open_export(path)({"images": x}).logits, model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_budget_far_beyond_the_trained_one_is_exported_to_onnx(tmp_path: Path) -> None:
    model, path, x = small(), tmp_path / "model.onnx", images(5, seed=9)
    with pytest.warns(UserWarning, match="steps is 40"):
        model.set_budget(40)
    export.export_model(model, x[:1], "onnx", path, {})
    torch.testing.assert_close(export.open_export(path)({"images": x}).logits, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 200}, "window is 200; it must fit the image, 96 × 128"),
        ({"layer": 9}, "layer is 9"),
        ({"cell": 12}, "cell is 12"),
        ({"steps": 60}, "steps is 60"),
        ({"training_steps": 0}, "training_steps is 0; it must be between 1 and 48"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"steps": 2.5}, r"steps is 2\.5; it must be a whole number"),
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"search": -1}, "search is -1; it must be at least 0"),
        ({"scan_width": 0}, "scan_width is 0; it must be at least 1"),
        ({"layer": 1.5}, r"layer is 1\.5; it must be a whole number"),
        ({"floor": 1.5}, r"floor is 1\.5; it must be a probability from 0 to 1"),
        ({"floor": float("nan")}, "floor is nan; it must be a probability from 0 to 1"),
        ({"view": 33}, "view is 33; it must be a side, or height and width, in patches of 8 pixels"),
        ({"view": 0}, "view is 0; it must be"),
        ({"view": (32,)}, r"view is \(32,\); it must be a side, or height and width"),
        ({"labels": "many"}, "labels is 'many'"),
        ({"encoder": "resnet"}, "encoder is 'resnet'; it must be 'vit', 'convolutions' or a name of timm.list_models"),
        ({"encoder": "hf-hub:someone/model"}, "encoder is 'hf-hub:someone/model'; it must be"),
        ({"encoder": timm.create_model("test_resnet", features_only=True)}, "a FeatureListNet that returns list"),
        ({"encoder": timm.create_model("test_resnet", in_chans=1)}, "does not take windows of 16 pixels"),
        ({"encoder": "test_vit", "window": 24}, "window is 24; patches of 16 pixels encode it, which must divide it"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small(**options)


def test_windows_need_the_size_of_images_and_know_their_options() -> None:
    with pytest.raises(ValueError, match="image is None"):
        adatape.wrap(small_vit(), "windows")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="bankk is not an option"):
        adatape.wrap(small_vit(), "windows", image=IMAGE, bankk=1)  # type: ignore[call-overload]


def test_an_encoder_of_timm_is_trained_saved_and_built_again(tmp_path: Path) -> None:
    vit = timm.create_model("test_vit", num_classes=5)
    encoder = timm.create_model("test_resnet")
    weights = {name: value.clone() for name, value in encoder.state_dict().items() if "fc" not in name}
    options: dict[str, Any] = {"image": IMAGE, "window": 16, "cell": 8, "steps": 4}
    model = adatape.wrap(vit, "windows", encoder=encoder, **options)
    assert all(torch.equal(model.encoder.model.state_dict()[name], value) for name, value in weights.items())
    output = model.train()(images(2), output=True)
    model.loss(output, torch.tensor([0, 1])).backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.encoder.parameters())
    timm.models.save_for_hf(model.eval(), str(tmp_path), **adatape.hub_settings(model), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images(2)), model(images(2)))
    changed = timm.create_model("test_resnet", layers=(2, 1, 1, 1))
    with pytest.raises(ValueError, match=r"the encoder is not test_resnet\.r160_in1k with its defaults"):
        adatape.hub_settings(adatape.wrap(vit, "windows", encoder=changed, **options))


def test_type_checkers_know_the_options_of_windows() -> None:
    assert set(WrapWindowsOptions.__annotations__) == {field.name for field in dataclasses.fields(WindowOptions)}


def test_a_canvas_is_a_function_of_seed_and_number() -> None:
    digits = np.random.default_rng(0).integers(1, 255, (40, DIGIT, DIGIT)).astype(np.uint8)
    labels = np.arange(40) % 10
    few, more = (make_haystack(digits, labels, count, seed=3) for count in (3, 6))
    assert all(np.array_equal(a, b[:3]) for a, b in zip(few, more, strict=True))
    assert not np.array_equal(few.images, make_haystack(digits, labels, 3, seed=4).images)
    for image, label, count, corners in zip(*more, strict=True):
        for top, left in corners[:count]:
            stamp = image[top : top + DIGIT, left : left + DIGIT, 0]
            assert any(np.array_equal(stamp, digit) for digit in digits[labels == label])


def test_test_canvases_show_digits_that_no_training_canvas_has() -> None:
    train, test = (open_images(Images("digits"), split).pixels for split in ("train", "test"))
    assert train is not None
    assert test is not None
    seen = {digit.tobytes() for digit in train}
    canvases = haystack_of(False)
    for image, count, corners in zip(canvases.images[:50], canvases.digits[:50], canvases.corners[:50], strict=True):
        for top, left in corners[:count]:
            assert np.ascontiguousarray(image[top : top + DIGIT, left : left + DIGIT]).tobytes() not in seen


def test_a_small_haystack_is_learnt_from_labels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a quarter of the canvas and without distractors, 200 steps suffice: 33 to 53 % by one window, chance 10 %."""
    monkeypatch.setitem(haystack_data.COUNTS, "train", 3000)
    monkeypatch.setitem(haystack_data.COUNTS, "test", 300)
    monkeypatch.setattr(haystack_data, "DISTRACTORS", 0)
    for module in (haystack_data, image_data, sys.modules["adatape.recipes.haystack"]):
        monkeypatch.setattr(module, "SIDE", 64)
    haystack_of.cache_clear()
    try:
        trainer = Trainer(haystack(steps=800, seed=2))
        for _ in trainer.train(200):
            pass
        trainer.model.set_budget(1)
        assert trainer.evaluate("test").accuracy > 0.22
    finally:
        haystack_of.cache_clear()


def test_the_examples_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block, lists = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "large_images.md").read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(block, "large_images.md", "exec"), scope)
    out, model = scope["out"], scope["model"]
    assert out.logits.shape == (1, 4)
    assert out.tape.index.shape == (1, 8, 1)
    assert model.scan.grid(800, 1360) == (50, 85)
    assert round(total(model.cost(8)).macs / 1e9, 2) == 1.03
    exec(compile(lists, "large_images.md", "exec"), scope)
    assert scope["out"].logits.shape == (2, 4)


def test_a_released_model_of_windows_answers_as_it_did(tmp_path: Path) -> None:
    wrapping: dict[str, Any] = {"bank": "windows", "window": 16, "cell": 8, "steps": 3, "view": 32, "layer": 1}
    shape: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    settings = ImageModel("vit_tiny_patch16_224", shape, wrap=wrapping)
    model = build_image_model(settings, 96, 3, 5, weights=False).eval()
    options = {"backbone": settings.name, **shape, **wrapping, **image_size_options(wrapping, 96)[1], "num_classes": 5}
    release(model, "adatape", options, tmp_path / "to", result={"accuracy": 0.5, "loss": 1.0}, command="")
    again = timm.create_model(f"local-dir:{tmp_path / 'to'}", pretrained=True).eval()
    x = images(2)[..., :96]
    assert torch.equal(again(x), model(x))
