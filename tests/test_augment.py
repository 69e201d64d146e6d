"""Augmentation: batched and single-image versions agree, the paper's RandAugment, Mixup and CutMix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from adatape.counter_rng import keys_of, uniform
from adatape.data import augment as varying
from adatape.data import randaug
from adatape.data.augment import (
    augment_image,
    augment_images,
    center_crop,
    center_crop_image,
    scale_and_erase,
    uncropped,
)
from adatape.data.mixing import Mixing, draw_mixing, mixed, targets
from adatape.data_config import Augment

FULL = Augment(crop="inception", flip=True, randaug=2, jitter=1.0, erase=0.5)
EXACT = ("equalize", "invert", "posterize", "solarize", "solarize_add", "cutout")  # whole numbers all through
MAGNITUDES = (0.0, 3.0, 10.0, 15.0)


def smooth_images(count: int, channels: int = 3, size: int = 32, width: int | None = None) -> Tensor:
    """Smooth random images of narrow range, so that every operation has an effect."""
    coarse = torch.rand(count, channels, 6, 6) * 200 + 25
    fine = torch.nn.functional.interpolate(coarse, (size, width or size), mode="bicubic")
    return (fine + torch.randn_like(fine) * 3).clamp(8, 240).to(torch.uint8)


def keys(count: int, key: int = 7) -> Tensor:
    return keys_of(key, torch.arange(count))


def as_bytes(x: Tensor) -> Tensor:
    return ((x + 1) * 127.5).round().to(torch.uint8)


def levels_apart(a: Tensor, b: Tensor) -> Tensor:
    return (a.int() - b.int()).abs()


def picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy())


def pixels(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def draws_for(name: str, count: int) -> Tensor:
    draws = uniform(keys(count, 3), randaug.DRAWS).double()
    draws[:, 0] = (randaug.NUMBER[name] + 0.5) / len(randaug.OPERATIONS)
    return draws


def both_ways(images: Tensor, name: str, magnitude: float) -> tuple[Tensor, Tensor]:
    draws, size = draws_for(name, len(images)), images.shape[-1]
    amount = torch.full((len(images),), magnitude, dtype=torch.float64)
    batched = randaug.apply(images, randaug.operation(draws.unbind(1), amount, size))
    single = [
        pixels(randaug.apply_one(picture(image), randaug.operation(row, magnitude, size)))
        for image, row in zip(images, draws.tolist(), strict=True)
    ]
    return batched, torch.stack(single)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", randaug.OPERATIONS)
def test_an_operation_is_the_same_in_a_batch_and_alone(name: str, channels: int) -> None:
    images = smooth_images(6, channels)
    for magnitude in MAGNITUDES:
        apart = levels_apart(*both_ways(images, name, magnitude))
        if name in randaug.MOVES:  # a point on the very edge may be filled on one side only
            assert (apart > 1).float().mean() < 2e-3, magnitude
        else:
            assert apart.max() <= (name not in EXACT), magnitude


def reference(name: str, image: Image.Image, far: randaug.Strength) -> Image.Image:
    """The operation by PIL's functions where they exist, else by its definition in numpy."""
    level = np.asarray(image).astype(int)
    match name:
        case "autocontrast" | "equalize" | "invert":
            return getattr(ImageOps, name)(image)
        case "posterize":
            return ImageOps.posterize(image, int(far.bits))
        case "solarize":
            return ImageOps.solarize(image, int(far.threshold))
        case "solarize_add":
            return Image.fromarray(np.where(level < 128, (level + far.added).clip(0, 255), level).astype(np.uint8))
    return getattr(ImageEnhance, name.capitalize())(image).enhance(far.factor)


@pytest.mark.parametrize("magnitude", [3.0, 10.0, 15.0])
@pytest.mark.parametrize("name", sorted(set(randaug.OPERATIONS) - set(randaug.MOVES) - {"cutout"}))
def test_a_colour_operation_is_pils(name: str, magnitude: float) -> None:
    noise = torch.randint(20, 230, (3, 3, 20, 20), dtype=torch.uint8)
    for images in (smooth_images(5), noise, torch.full((1, 3, 8, 8), 77, dtype=torch.uint8)):
        batched, _ = both_ways(images, name, magnitude)
        far = randaug.strength(magnitude, images.shape[-1])
        expected = torch.stack([pixels(reference(name, picture(image), far)) for image in images])
        assert levels_apart(batched, expected).max() <= (name not in EXACT)


def test_smoothing_keeps_the_border_and_is_pils_inside() -> None:
    images = smooth_images(3)
    ours = randaug._smooth(images.float()).to(torch.uint8)
    expected = torch.stack([pixels(picture(image).filter(ImageFilter.SMOOTH)) for image in images])
    torch.testing.assert_close(ours, expected)


def test_a_rotation_turns_by_its_degrees_about_the_middle() -> None:
    image = smooth_images(1, size=64)
    draws = draws_for("rotate", 1)
    turned = randaug.apply(image, randaug.operation(draws.unbind(1), torch.tensor([10.0]).double(), 64))[0]
    either = [picture(image[0]).rotate(angle, Image.Resampling.BILINEAR, fillcolor=(128,) * 3) for angle in (30, -30)]
    assert min(levels_apart(turned, pixels(other)).float().mean().item() for other in either) < 1


@pytest.mark.parametrize("name", ["translate_x", "translate_y"])
def test_a_translation_moves_whole_pixels_and_fills_with_grey(name: str) -> None:
    images = smooth_images(8, size=56)  # 100 px of 224 are 25 of 56
    moved, _ = both_ways(images, name, 10.0)
    axis = 3 if name == "translate_x" else 2
    grey = torch.full_like(images, randaug.FILL)
    forth = torch.cat([images.narrow(axis, 25, 31), grey.narrow(axis, 0, 25)], axis)
    back = torch.cat([grey.narrow(axis, 0, 25), images.narrow(axis, 0, 31)], axis)
    seen = {("forth" if torch.equal(m, f) else "back" if torch.equal(m, b) else "neither")
            for m, f, b in zip(moved, forth, back, strict=True)}  # fmt: skip
    assert seen == {"forth", "back"}


@pytest.mark.parametrize("name", ["shear_x", "shear_y"])
def test_a_shear_keeps_its_first_line_and_moves_the_last_by_its_share(name: str) -> None:
    ramp = (torch.arange(64) * 3).to(torch.uint8)[:, None].expand(3, 64, 64)
    image = ramp.mT if name == "shear_x" else ramp
    moved = randaug.apply(
        image[None].contiguous(), randaug.operation(draws_for(name, 1).unbind(1), torch.tensor([10.0]).double(), 64)
    )[0]
    moved, image = (x if name == "shear_x" else x.mT for x in (moved, image))
    middle = slice(24, 40)
    assert levels_apart(moved[:, 0, middle], image[:, 0, middle]).max() <= 1
    assert levels_apart(moved[:, 32, middle], image[:, 32, middle]).float().mean() == pytest.approx(
        32.5 * 0.3 * 3, abs=1
    )


def test_a_cutout_is_a_grey_square_about_a_point_of_the_image() -> None:
    images = torch.zeros(200, 3, 56, 56, dtype=torch.uint8)
    cut, _ = both_ways(images, "cutout", 10.0)  # a pad of 40 at 224 is 10 at 56
    areas = (cut[:, 0] == randaug.FILL).sum((1, 2))
    assert set(cut.unique().tolist()) == {0, randaug.FILL}
    assert areas.max() == 20 * 20
    assert areas.min() >= 10 * 10


@pytest.mark.parametrize(
    ("magnitude", "expected"),
    [(10, (30, 0.3, 100, 1.9, 4, 256, 110, 40)), (15, (45, 0.45, 150, 2.8, 6, 384, 165, 60))],
)
def test_strengths_are_the_papers(magnitude: float, expected: tuple[float, ...]) -> None:
    assert tuple(randaug.strength(magnitude, 224)) == pytest.approx(expected)
    small = randaug.strength(magnitude, 56)
    assert (small.translate, small.cutout) == pytest.approx((expected[2] / 4, expected[7] / 4))
    assert small[:2] + small[3:7] == pytest.approx(expected[:2] + expected[3:7])


@pytest.mark.parametrize("magnitude", [10.0, 15.0, 20.0])
def test_solarize_changes_nothing_from_magnitude_ten(magnitude: float) -> None:
    images = smooth_images(2)
    assert torch.equal(both_ways(images, "solarize", magnitude)[0], images)


def test_colour_leaves_a_grey_image_as_it_is() -> None:
    images = smooth_images(4, channels=1)
    assert torch.equal(both_ways(images, "color", 15.0)[0], images)


def test_operations_are_drawn_evenly_and_apart() -> None:
    augment = Augment(randaug=2)
    draws = uniform(keys(20_000), varying._draws(augment)).double()
    numbers = [
        randaug.operation(draws[:, varying._span(layer)].unbind(1), torch.tensor(10.0), 32).number.long()
        for layer in range(2)
    ]
    pairs = torch.bincount(numbers[0] * 16 + numbers[1], minlength=256).double()
    assert len(pairs) == 256
    chi = ((pairs - 20_000 / 256) ** 2 / (20_000 / 256)).sum()
    assert chi < 255 + 4 * (2 * 255) ** 0.5


@pytest.mark.parametrize("shape", [(375, 500), (32, 32), (100, 900)])
def test_crops_keep_their_share_of_the_image_and_stay_inside(shape: tuple[int, int]) -> None:
    draws = uniform(keys(4000), 4).double()
    height, width = shape
    top, left, tall, wide = varying.box_of(draws.unbind(1), *shape, (0.05, 1.0), 3 / 4)
    assert bool(((top >= 0) & (left >= 0) & (top + tall <= height) & (left + wide <= width)).all())
    shares = tall * wide / (height * width)
    assert (shares - (0.05 + 0.95 * draws[:, 0])).abs().max() < 0.04
    assert shares.mean() == pytest.approx(0.525, abs=0.02)
    if max(shape) < 2 * min(shape):  # where a small box of any aspect fits
        aspects = (wide / tall)[shares < 0.3]
        assert bool(((aspects > 0.6) & (aspects < 1.6)).all())
    for row, box in zip(draws[:50].tolist(), zip(top, left, tall, wide, strict=False), strict=False):
        assert varying.box_of(row, *shape, (0.05, 1.0), 3 / 4) == tuple(float(value) for value in box)


def test_a_crop_of_the_whole_image_is_the_image() -> None:
    images = smooth_images(5)
    assert torch.equal(as_bytes(augment_images(images, keys(5), Augment(crop="inception", area=(1, 1)), 32)), images)


@pytest.mark.parametrize("shape", [(32, 32), (45, 60)])
def test_crop_and_flip_are_the_same_in_a_batch_and_alone(shape: tuple[int, int]) -> None:
    images = smooth_images(12, 3, *shape)
    for crop in ("inception", "pad", "none"):
        augment = Augment(crop=crop, flip=True)
        alone = torch.stack([augment_image(x, int(k), augment, 24) for x, k in zip(images, keys(12), strict=True)])
        assert levels_apart(as_bytes(augment_images(images, keys(12), augment, 24)), alone).max() <= 1, crop


def test_whole_pipelines_agree_on_nearly_every_pixel() -> None:
    """Not all pixels: later contrast operations amplify rounding differences."""
    images = smooth_images(64)
    batched = augment_images(images, keys(64), FULL, 32)
    alone = torch.stack([augment_image(x, int(k), FULL, 32) for x, k in zip(images, keys(64), strict=True)])
    apart = (batched - scale_and_erase(alone, keys(64), FULL)).abs()
    assert (apart > 0.05).float().mean() < 0.01


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_picture_is_varied_as_its_tensor(mode: str) -> None:
    image = smooth_images(1, len(Image.new(mode, (1, 1)).getbands()), 40, 50)[0]
    before = picture(image).tobytes()
    shown = picture(image)
    for key in range(20):
        assert torch.equal(augment_image(shown, key, FULL, 32), augment_image(image, key, FULL, 32))
        assert shown.tobytes() == before


def test_a_padded_crop_shifts_by_whole_pixels_over_grey() -> None:
    images = smooth_images(300, 1, 12)
    varied = as_bytes(augment_images(images, keys(300), Augment(crop="pad", pad=2), 12))
    bordered = torch.nn.functional.pad(images, (2,) * 4, value=randaug.FILL)
    frames = torch.stack([bordered[..., r : r + 12, c : c + 12] for r in range(5) for c in range(5)])
    matches = (frames == varied).flatten(2).all(-1)
    assert bool(matches.any(0).all())
    assert bool(matches.any(1).all())


def test_half_of_the_images_are_mirrored() -> None:
    images = smooth_images(1, 1, 8).expand(4000, -1, -1, -1)
    varied = as_bytes(augment_images(images, keys(4000), Augment(flip=True), 8))
    mirrored = (varied == images.flip(-1)).flatten(1).all(1)
    assert bool(((varied == images).flatten(1).all(1) ^ mirrored).all())
    assert mirrored.float().mean() == pytest.approx(0.5, abs=0.03)


def test_a_sample_depends_on_its_key_alone() -> None:
    images = smooth_images(16)
    together = augment_images(images, keys(16), FULL, 32)
    order = torch.randperm(16)
    assert torch.equal(augment_images(images[order], keys(16)[order], FULL, 32), together[order])
    for index in range(0, 16, 5):
        alone = augment_images(images[index : index + 1], keys(16)[index : index + 1], FULL, 32)
        assert torch.equal(alone[0], together[index])


def test_other_keys_vary_otherwise() -> None:
    image = smooth_images(1).expand(64, -1, -1, -1)
    varied = augment_images(image, keys(64), FULL, 32)
    assert len(varied.flatten(1).unique(dim=0)) == 64


@pytest.mark.parametrize("channels", [1, 3])
def test_results_are_finite_float32_within_one(channels: int) -> None:
    varied = augment_images(smooth_images(64, channels), keys(64), FULL, 24)
    assert varied.shape == (64, channels, 24, 24)
    assert varied.dtype == torch.float32
    assert varied.min() >= -1
    assert varied.max() <= 1


def test_without_settings_an_image_stays_as_it_is() -> None:
    images = smooth_images(4)
    torch.testing.assert_close(
        augment_images(images, keys(4), Augment(), 32), images.float() / 127.5 - 1, rtol=0, atol=0
    )
    assert torch.equal(augment_image(images[0], 5, Augment(), 32), images[0])
    assert torch.equal(scale_and_erase(images, keys(4), Augment()), augment_images(images, keys(4), Augment(), 32))


def test_magnitudes_scatter_about_the_set_one_and_never_below_zero() -> None:
    first, second = varying._magnitudes(keys(4000), Augment(randaug=2, magnitude=10, jitter=0.5))
    assert first.mean().item() == pytest.approx(10, abs=0.05)
    assert first.std().item() == pytest.approx(0.5, abs=0.02)
    assert ((first - 10) * (second - 10)).mean().abs() < 0.02
    assert min(varying._magnitudes(keys(4000), Augment(randaug=1, magnitude=0.1, jitter=1))[0]) == 0


@pytest.mark.parametrize("name", randaug.OPERATIONS)
def test_one_strength_for_all_is_each_ones_strength(name: str) -> None:
    images, draws = smooth_images(4), draws_for(name, 4).unbind(1)
    each = torch.full((4,), 7.0, dtype=torch.float64)
    fixed, spread = (randaug.apply(images, randaug.operation(draws, far, 32)) for far in (7.0, each))
    assert levels_apart(fixed, spread).max() <= 1


def test_erasing_fills_boxes_with_noise_at_its_rate() -> None:
    images = torch.full((2000, 3, 32, 32), 200, dtype=torch.uint8)
    erased = scale_and_erase(images, keys(2000), Augment(erase=0.25))
    gone = (erased - (200 / 127.5 - 1)).abs().amax(1) > 1e-6
    shares = gone.float().mean((1, 2))
    hit = shares > 0
    assert hit.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert shares[hit].min() > 0.015
    assert shares[hit].max() < 0.36
    rows, columns = gone.any(2).sum(1), gone.any(1).sum(1)
    assert (shares * 1024 - rows * columns).abs().max() < 0.01 * 1024  # full boxes, but for noise at the old level
    noise = erased.transpose(0, 1)[:, gone]
    assert noise.mean().abs() < 0.01
    assert noise.std().item() == pytest.approx(0.48, abs=0.02)


def test_an_unknown_mode_or_crop_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="image has mode P; it must be L or RGB"):
        augment_image(Image.new("P", (8, 8)), 0, Augment(), 8)
    with pytest.raises(ValueError, match="crop is 'square'; it must be none, inception or pad"):
        augment_images(smooth_images(1), keys(1), Augment(crop="square"), 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "size"), [((32, 32), 32), ((48, 64), 32), ((64, 48), 32), ((8, 8), 32), ((32, 40), 32)]
)
def test_centres_agree_in_a_batch_and_alone(shape: tuple[int, int], size: int) -> None:
    images = smooth_images(3, 3, *shape)
    together = center_crop(images, size)
    assert together.shape == (3, 3, size, size)
    assert levels_apart(together, torch.stack([center_crop_image(image, size) for image in images])).max() <= 1
    assert torch.equal(center_crop_image(picture(images[0]), size), center_crop_image(images[0], size))


def test_a_centre_of_the_right_size_is_untouched_and_a_larger_one_shows_seven_eighths() -> None:
    images = smooth_images(2)
    assert torch.equal(center_crop(images, 32), images)
    ramp = torch.linspace(0, 255, 256).to(torch.uint8).expand(1, 1, 256, 256)
    assert center_crop(ramp, 224)[0, 0, 0].tolist() == list(range(16, 240))


def test_a_mixed_sample_takes_from_the_next() -> None:
    x, y = torch.rand(5, 3, 8, 8), targets(torch.tensor([0, 1, 2, 3, 0]), 4)
    blended, soft = mixed(x, y, Mixing(torch.tensor(0.7), torch.zeros(4, dtype=torch.int64)))
    torch.testing.assert_close(blended, 0.7 * x[:4] + 0.3 * x[1:])
    torch.testing.assert_close(soft, 0.7 * y[:4] + 0.3 * y[1:])
    patched, soft = mixed(x, y, Mixing(torch.tensor(0.75), torch.tensor([0, 4, 4, 8])))
    expected = x[:4].clone()
    expected[..., 0:4, 4:8] = x[1:, :, 0:4, 4:8]
    assert torch.equal(patched, expected)
    torch.testing.assert_close(soft, 0.75 * y[:4] + 0.25 * y[1:])


@pytest.mark.parametrize("augment", [Augment(mixup=0.2), Augment(cutmix=1.0), Augment(mixup=0.8, cutmix=1.0)])
def test_two_processes_mix_as_one(augment: Augment) -> None:
    x, labels = torch.rand(8, 3, 16, 16), torch.randint(10, (8,))
    y, ring = targets(labels, 10, 0.1), [*range(8), 0]
    for key in range(-3, 6):
        mixing = draw_mixing(augment, 16, key)
        whole = mixed(x[ring], y[ring], mixing)
        parts = [mixed(x[ring[start : start + 5]], y[ring[start : start + 5]], mixing) for start in (0, 4)]
        for one, two in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(two))
        torch.testing.assert_close(whole[1].sum(1), torch.ones(8))


def test_without_mixing_nothing_changes() -> None:
    x, y = torch.rand(4, 1, 6, 6), targets(torch.tensor([0, 1, 2, 2]), 3)
    mixing = draw_mixing(Augment(), 6, 11)
    assert mixing.share == 1
    assert all(torch.equal(a, b[:3]) for a, b in zip(mixed(x, y, mixing), (x, y), strict=True))


def test_smoothed_targets_sum_to_one_and_spread_their_share() -> None:
    soft = targets(torch.tensor([1, 0]), 4, 0.2)
    torch.testing.assert_close(soft, torch.tensor([[0.05, 0.85, 0.05, 0.05], [0.85, 0.05, 0.05, 0.05]]))


def test_shares_follow_their_distributions() -> None:
    def draws(augment: Augment) -> list[Mixing]:
        return [draw_mixing(augment, 64, key) for key in range(2000)]

    blends = torch.stack([mixing.share for mixing in draws(Augment(mixup=1.0))])
    assert blends.min() >= 0.5
    assert blends.mean().item() == pytest.approx(0.75, abs=0.02)
    patches = draws(Augment(cutmix=1.0))
    for share, (top, left, bottom, right) in patches:
        assert share.item() == pytest.approx(1 - float((bottom - top) * (right - left)) / 64**2)
    mean = sum(share.item() for share, _ in patches) / len(patches)
    rng = np.random.default_rng(0)
    half, middle = (1 - rng.random(100_000)) ** 0.5 / 2, rng.random((2, 100_000))
    sides = (middle + half).clip(max=1) - (middle - half).clip(min=0)
    assert mean == pytest.approx(1 - sides.prod(0).mean(), abs=0.02)
    either = [bool(mixing.box.any()) for mixing in draws(Augment(mixup=1.0, cutmix=1.0))]
    assert sum(either) / len(either) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("crop", ["inception", "pad", "none"])
def test_a_gpu_never_waits_for_a_value(crop: str) -> None:
    """Run on fake CUDA tensors, for which reading a value or mixing devices is an error."""
    augment = Augment(crop=crop, flip=True, randaug=2, jitter=1.0, erase=0.5)  # type: ignore[arg-type]
    with FakeTensorMode():
        images = torch.empty(8, 3, 40, 48, dtype=torch.uint8, device="cuda")
        ids = torch.empty(8, dtype=torch.int64, device="cuda")
        x, y = augment_images(images, ids, augment, 32), targets(ids, 10, 0.1)
        mixing = Mixing(torch.empty((), device="cuda"), torch.empty(4, dtype=torch.int64, device="cuda"))
        x, y = mixed(x, y, mixing)
        assert x.shape == (7, 3, 32, 32)
        assert {x.device.type, y.device.type, center_crop(images, 32).device.type} == {"cuda"}


@pytest.mark.parametrize("shape", [(64, 64), (128, 128), (300, 200), (96, 400), (40, 32)])
def test_a_box_on_the_centre_square_is_found_again_in_the_image(shape: tuple[int, int]) -> None:
    top, left, side = shape[0] // 2 - 4, shape[1] // 2 + 2, min(shape) // 4
    image = torch.zeros(1, *shape, dtype=torch.uint8)
    image[:, top : top + side, left : left + side] = 255
    rows, columns = (center_crop_image(image, 64)[0] > 127).nonzero(as_tuple=True)
    box = [
        int(rows.min()),
        int(columns.min()),
        int(rows.max() - rows.min()) + 1,
        int(columns.max() - columns.min()) + 1,
    ]
    pixel = max(1.0, min(shape) / 64)
    assert uncropped(box, *shape, 64) == pytest.approx([top, left, side, side], abs=1.5 * pixel)
