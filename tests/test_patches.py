"""PatchRows equals timm's patch embedding with the same weights."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.utils import prune

import adatape
import adatape.models
from adatape.patches import PatchRows, raw_patches


def test_raw_patches_are_what_a_convolution_sees() -> None:
    conv, images = nn.Conv2d(3, 5, (4, 2), (4, 2)), torch.randn(2, 3, 8, 12)
    seen = nn.functional.linear(raw_patches(images, (4, 2)), conv.weight.flatten(1), conv.bias)
    torch.testing.assert_close(seen, conv(images).flatten(2).transpose(1, 2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"norm_layer": nn.LayerNorm},
        {"flatten": False},
        {"output_fmt": "NHWC"},
        {"strict_img_size": False, "dynamic_img_pad": True},
    ],
    ids=str,
)
def test_patch_rows_give_and_learn_what_timm_does(options: dict[str, object]) -> None:
    ours, theirs = (kind(16, 4, 3, 8, **options) for kind in (PatchRows, PatchEmbed))
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)
    for each in (ours, theirs):
        each(images).square().sum().backward()
    torch.testing.assert_close(ours.proj.weight.grad, theirs.proj.weight.grad, rtol=1e-4, atol=1e-4)


def test_other_sizes_are_what_timm_makes_of_them() -> None:
    strict, loose = PatchRows(16, 4), PatchRows(16, 4, strict_img_size=False)
    with pytest.raises(AssertionError, match="doesn't match model"):
        strict(torch.randn(1, 3, 24, 16))
    assert loose(torch.randn(1, 3, 24, 16)).shape == (1, 24, 768)
    loose.set_input_size(24)
    assert loose(torch.randn(1, 3, 24, 24)).shape == (1, 36, 768)


def test_under_autocast_rows_are_what_a_product_takes() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert PatchRows(16, 4)(torch.randn(2, 3, 16, 16)).dtype == torch.bfloat16


def test_registered_models_take_rows_and_wrapped_ones_keep_their_own() -> None:
    model = timm.create_model("plainvit_tiny_patch16_224", img_size=32, depth=1)
    assert isinstance(model.vit.patch_embed, PatchRows)
    assert not isinstance(timm.create_model("vit_tiny_patch16_224").patch_embed, PatchRows)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("tool", ["prune", "weight_norm"])
@pytest.mark.parametrize("name", ["wrapped", "adatape_tiny_patch16_224", "windows"])
def test_weights_that_a_hook_computes_anew_are_never_stale(name: str, tool: str) -> None:
    """Pruning and the older `weight_norm` set a layer's weight before each call of the layer."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 3}
    size: tuple[int, ...] = (32, 32)
    if name == "wrapped":
        model = adatape.wrap(VisionTransformer(**shape), patch=4, steps=2, query_width=16)
    elif name == "windows":
        size = (48, 64)
        model = adatape.wrap(VisionTransformer(**shape), "windows", image=size, window=16, steps=2, view=32, layer=1)
    else:
        model = timm.create_model(name, **shape, bank_patch=4, steps=2, query_width=16)
    layers = [each for each in model.modules() if isinstance(each, (nn.Linear, nn.Conv2d))]
    for layer in layers:
        if tool == "prune":
            prune.l1_unstructured(layer, "weight", 0.3)
        else:
            nn.utils.weight_norm(layer)
    x, target = torch.randn(2, 3, *size), torch.tensor([0, 1])
    rate = torch.optim.SGD(model.train().parameters(), 0.1)
    for _ in range(2):
        rate.zero_grad()
        model.loss(model(x, output=True), target).backward()
        rate.step()
    with torch.no_grad():
        before = model.eval()(x)
        for layer in layers:
            prune.remove(layer, "weight") if tool == "prune" else nn.utils.remove_weight_norm(layer)
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)


def test_hooks_of_every_layer_are_called() -> None:
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2)
    model, called = adatape.wrap(vit, patch=4, steps=2, query_width=16), set()
    layers = {name: each for name, each in model.named_modules() if isinstance(each, (nn.Linear, nn.Conv2d))}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: called.add(name))
    model(torch.randn(2, 3, 32, 32))
    assert called == set(layers)
