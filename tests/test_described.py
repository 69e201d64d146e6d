"""What the server says of a model: its name, its budgets, and whether an image looks like those that it knows."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import tiny

from adatape.config import Budget
from adatape.data_config import Scenes
from adatape.serve.likeness import FEWEST, STORED, load_reference, reference_of, statistics_of
from adatape.serve.pictures import seen
from adatape.serve.served import PACKAGED, ServedModel, description, display_name, load_served
from adatape.serve.stops import FILE, stops_of
from adatape.train.task import build_for

NAMES = {
    "adatape": "AdaTape for digits, 8 × 8 pixels: patches of 4, bank of 16 patches of 2",
    "adatape-learn": "AdaTape for digits, 8 × 8 pixels: patches of 4, bank of 100 learned tokens",
    "plainvit": "PlainViT for digits, 8 × 8 pixels: patches of 4, no bank",
    "parity transformer": "Transformer for parity, 8 symbols: no bank",
    "parity adatape": "AdaTape for parity, 8 symbols: bank of the symbols",
}


@pytest.fixture(scope="module")
def digits() -> ServedModel:
    return load_served(PACKAGED["digits"])


@pytest.mark.parametrize("family", NAMES)
def test_a_name_says_data_input_patches_and_bank(family: str) -> None:
    experiment = tiny(family)
    assert display_name(experiment, build_for(experiment)) == NAMES[family]


def test_trained_tape_tokens_without_a_bank_are_not_called_one() -> None:
    experiment = tiny("adatape", model__options__reader="fixed")
    assert display_name(experiment, build_for(experiment)).endswith("patches of 4, no bank")


def test_a_set_of_ones_own_is_named_by_its_folder() -> None:
    street = load_served(PACKAGED["street"])
    assert isinstance(street.experiment.data, Scenes)
    assert street.name == "AdaTape for gtsdb, 1360 × 800 pixels: patches of 16, bank of 4250 windows of 64"
    assert description(street, None)["architecture"] == street.experiment.model.name  # type: ignore[union-attr]


def test_every_budget_has_its_cost_and_measured_ones_their_figures(tmp_path: Path, digits: ServedModel) -> None:
    before = digits.model.budget()
    (tmp_path / "figures").mkdir()
    row = {"steps": 2, "accuracy": 0.9, "gflops_mean": 0.001, "length_mean": 1.5, "threshold": 0.5}
    (tmp_path / FILE).write_text(json.dumps({"rows": [row]}))
    stops = stops_of(tmp_path, digits.model)
    assert [stop["steps"] for stop in stops] == [0, 1, 2, 3, 4]
    assert [stop["accuracy"] for stop in stops] == [None, None, 0.9, None, None]
    costs = [stop["gflops"] or 0 for stop in stops]
    assert costs == sorted(costs)
    assert len(set(costs)) == 5
    assert digits.model.budget() == before
    (tmp_path / FILE).write_text("{")
    assert all(stop["accuracy"] is None for stop in stops_of(tmp_path, digits.model))


@pytest.mark.parametrize(("steps", "accuracy"), [(0, 0.7), (2, 0.9), (3, None)])
def test_the_accuracy_is_that_of_the_budget_which_requests_get(
    steps: int, accuracy: float | None, digits: ServedModel
) -> None:
    rows = [(0, None, 0.7), (1, 0.25, 0.8), (2, 0.5, 0.9), (3, 0.75, None)]
    stops = [{"steps": at, "threshold": threshold, "accuracy": right} for at, threshold, right in rows]
    model = dataclasses.replace(digits.experiment.model, budget=Budget(steps))  # type: ignore[type-var]
    stored = digits._replace(experiment=dataclasses.replace(digits.experiment, model=model), accuracy=0.99, stops=stops)
    assert description(stored, Budget(steps, steps / 4 or None))["accuracy"] == accuracy
    assert description(digits._replace(accuracy=0.99, stops=stops), Budget(4, 1.0))["accuracy"] == 0.99


def test_figures_at_another_floor_are_not_those_of_a_stop(tmp_path: Path) -> None:
    model = load_served(PACKAGED["street"]).model
    (tmp_path / "figures").mkdir()
    rows = [{"steps": 1, "mean_ap": 0.8, "threshold": None}, {"steps": 2, "mean_ap": 0.9, "threshold": 0.629}]
    (tmp_path / FILE).write_text(json.dumps({"rows": rows}))
    assert [stop["mean_ap"] for stop in stops_of(tmp_path, model)[:3]] == [None, 0.9, None]
    model.set_budget(8)
    assert [stop["mean_ap"] for stop in stops_of(tmp_path, model)[:3]] == [0.8, None, None]


def test_a_model_of_one_cost_has_no_stops(tmp_path: Path) -> None:
    assert stops_of(tmp_path, build_for(tiny("plainvit"))) == []


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_models_have_figures_at_every_budget(name: str) -> None:
    stops = load_served(PACKAGED[name]).stops
    assert len(stops) > 4
    for stop in stops:
        assert stop["mean_ap"] or stop["accuracy"]
        assert (stop["gflops_mean"] or 0) <= (stop["gflops"] or 0) + 1e-9


def foreign(size: int) -> dict[str, np.ndarray]:
    """Images of a side that no set of ours holds."""
    draws = np.random.default_rng(0)
    ramp = np.linspace(60, 200, size, dtype=np.uint8)
    return {
        "noise": draws.integers(0, 256, (size, size, 3), dtype=np.uint8),
        "grey": np.full((size, size, 3), 128, np.uint8),
        "white": np.full((size, size, 3), 255, np.uint8),
        "ramp": np.broadcast_to(ramp[None, :, None], (size, size, 3)).copy(),
    }


def test_few_test_digits_are_called_far_and_other_pictures_are(digits: ServedModel) -> None:
    assert digits.images is not None
    every = [seen(digits.images.read(row), 1, 8) for row in range(len(digits.images))]
    reference = reference_of(every[::2])
    assert reference is not None
    assert sum(reference.judge(each).far for each in every[1::2]) <= 0.05 * len(every[1::2])
    for size in (8, 200):
        for pixels in foreign(size).values():
            assert reference.judge(seen(Image.fromarray(pixels), 1, 8)).far
    assert all(reference.judge(255 - each).far for each in every)  # dark on white


def test_the_street_model_knows_its_examples_and_no_other_picture() -> None:
    reference, examples = load_reference(PACKAGED["street"]), sorted((PACKAGED["street"] / "examples").glob("*.webp"))
    assert reference is not None
    assert len(examples) == 12
    far = [path.stem for path in examples if reference.judge(seen(Image.open(path), 3, (800, 1360))).far]
    assert far == []
    for pixels in foreign(300).values():
        assert reference.judge(seen(Image.fromarray(pixels), 3, (800, 1360))).far


def test_what_differs_most_is_named(digits: ServedModel) -> None:
    assert digits.images is not None
    reference = reference_of(seen(digits.images.read(row), 1, 8) for row in range(200))
    assert reference is not None
    assert reference.judge(torch.full((1, 8, 8), 90, dtype=torch.uint8)).most == "contrast"
    assert reference.judge(torch.full((1, 8, 8), 90, dtype=torch.uint8)).images == 200


def test_too_few_images_say_nothing_and_a_stored_reference_is_read_as_it_was(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, 16, 20), generator=draws, dtype=torch.uint8) for _ in range(FEWEST)]
    assert reference_of(images[:-1]) is None
    made = reference_of(images)
    assert made is not None
    made.save(tmp_path / STORED)
    kept = load_reference(tmp_path)
    assert kept is not None
    assert [kept.judge(each) for each in images] == [made.judge(each) for each in images]
    for damage in ("{", "[]", json.dumps({"mean": [1], "covariance": [[-1]], "limit": 1, "images": 9})):
        (tmp_path / STORED).write_text(damage)
        assert load_reference(tmp_path) is None


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 5), (1, 300, 2), (3, 800, 1360)])
def test_statistics_are_finite_for_any_shape(shape: tuple[int, int, int]) -> None:
    assert statistics_of(torch.full(shape, 7, dtype=torch.uint8)).isfinite().all()


def test_the_pixels_that_are_sent_back_are_those_that_the_model_got(digits: ServedModel) -> None:
    client = pytest.importorskip("starlette.testclient").TestClient
    create_app = pytest.importorskip("adatape.serve.app").create_app
    photo = Image.fromarray(foreign(60)["ramp"])
    content = io.BytesIO()
    photo.save(content, "PNG")
    with client(create_app(digits), base_url="http://localhost") as http:
        asked = http.post("/v1/classify", files={"image": content.getvalue()}, data={"seen": "1"}).json()["results"][0]
        plain = http.post("/v1/classify", files={"image": content.getvalue()}).json()["results"][0]
    shown = Image.open(io.BytesIO(base64.b64decode(asked["seen"].partition(",")[2])))
    assert np.array_equal(np.asarray(shown), seen(photo, 1, 8)[0].numpy())
    assert asked["likeness"]["far"] is True
    assert not {"seen", "likeness"} & set(plain)
