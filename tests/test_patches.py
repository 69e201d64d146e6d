"""PatchRows equals timm's patch embedding with the same weights."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import PatchEmbed
from torch import nn

import adatape.models  # noqa: F401  registers the names
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
