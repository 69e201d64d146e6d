"""The packaged model of street scenes, and what a server tells of a model that reads windows."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from fastapi import FastAPI
from PIL import Image
from safetensors import safe_open
from test_serve import finished

from adatape.config import Budget
from adatape.data.letterbox import fitted_shape, unboxed
from adatape.evaluate.budget import apply_budget, budget_at
from adatape.evaluate.cost import cost, total
from adatape.serve.app import create_app
from adatape.serve.pictures import seen
from adatape.serve.served import PACKAGED, ServedModel, load_served
from adatape.train.folder import WEIGHTS, load_config

STREET = PACKAGED["street"]
SIZE = (800, 1360)
NO_SIGN, SIGNS = "00087.webp", "00197.webp"


class Serving(NamedTuple):
    served: ServedModel
    app: FastAPI


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adatape.serve.engine.REPEATS", 1)
        patch.setattr("adatape.serve.engine.measured_budgets", lambda model: [model.budget()])
        served = load_served(None)
        yield Serving(served, create_app(served))


def asked(app: FastAPI, *uploads: bytes, **fields: Any) -> list[Any]:
    """GET /v1/model, then the answer to each upload."""

    async def go() -> list[Any]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            said = [await client.get("/v1/model")]
            for upload in uploads:
                form = {"tape": "1", **{name: str(value) for name, value in fields.items()}}
                said.append(await client.post("/v1/classify", files=[("image", ("x", upload))], data=form))
            return [each.json() for each in said]

    async def alive() -> list[Any]:
        service = app.state.service
        await service.batcher.start()
        found = await go()
        service.batcher._loop.cancel()
        return found

    return finished(alive())


def example(name: str) -> Image.Image:
    return Image.open(STREET / "examples" / name).convert("RGB")


def file_of(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "BMP")
    return content.getvalue()


def test_the_package_holds_both_models_and_stays_small() -> None:
    files = [path for folder in PACKAGED.values() for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 16_000_000
    scenes = list((STREET / "examples").glob("*.webp"))
    assert len(scenes) == 12
    assert sum(path.stat().st_size for path in scenes) < 1_500_000
    assert "Houben" in (STREET / "README.md").read_text()
    with safe_open(STREET / WEIGHTS, "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} <= {torch.float16, torch.int64}  # noqa: SIM118
    said = "".join(path.read_text() for path in STREET.rglob("*.json"))
    assert not re.search(r'"/\w', said), "an absolute path of the machine that made it"


def test_it_needs_no_data_set_and_computes_in_float32(serving: Serving) -> None:
    served = serving.served
    assert served.classes == ["prohibitory", "danger", "mandatory", "other"]
    assert served.images is not None
    assert len(served.images) == 12
    assert {each.dtype for each in served.model.parameters()} == {torch.float32}
    assert load_config(STREET / "config.json").model.budget == served.model.budget()


def test_stored_figures_are_of_the_model_that_is_served(serving: Serving) -> None:
    stored, model = json.loads((STREET / "result.json").read_text()), serving.served.model
    assert stored["sequence_mean"] == pytest.approx(model.input_tokens() + stored["length_mean"])
    assert stored["sequence_max"] == model.input_tokens() + len(stored["lengths"]) - 1
    assert stored["length_mean"] == model.budget_range().most  # as of every run, without the stored floor
    whole = total(cost(model, 8))
    assert (stored["parameters"], stored["gflops"]) == (whole.parameters, pytest.approx(whole.macs / 1e9))


def test_examples_come_in_the_order_of_their_table(serving: Serving) -> None:
    async def go() -> Any:
        return json.loads(await serving.app.state.service.gallery.examples(12))["examples"]

    labels = [line.split(",")[1] for line in (STREET / "examples" / "labels.csv").read_text().splitlines()[1:]]
    shown = [each["name"] for each in finished(go())]
    assert [set(name.split(", ")) for name in shown] == [set((each or "no label").split(";")) for each in labels]


def test_the_model_is_described_as_it_reads(serving: Serving) -> None:
    [told] = asked(serving.app)
    assert told["bank"] == {"kind": "windows", "patch": None, "window": 64, "grid": [50, 85], "size": 4250}
    assert told["input"]["size"] == list(SIZE)
    stored = serving.served.experiment.model.budget
    assert stored is not None
    assert told["default"] == {"steps": stored.steps, "threshold": stored.threshold}
    assert (told["budget"]["least"], told["budget"]["steps"]) == (1, 8)
    assert [stop["steps"] for stop in told["stops"]] == list(range(1, 9))
    assert {stop["threshold"] for stop in told["stops"]} == {stored.threshold}
    assert told["stops"][-1]["mean_ap"] == pytest.approx(told["mean_ap"], abs=1e-6)


@pytest.mark.parametrize("size", [(1360, 800), (900, 300), (700, 1000), (1700, 1700)])
def test_boxes_are_the_windows_of_the_tape_in_pixels_of_the_file(serving: Serving, size: tuple[int, int]) -> None:
    image = example(SIGNS).resize(size)
    [_, answer] = asked(serving.app, file_of(image), steps=5, threshold=0.01)
    [result] = answer["results"]
    model = serving.served.model
    apply_budget(model, Budget(5, 0.01))
    with torch.inference_mode():
        output = model(seen(image, 3, SIZE)[None].float() / 127.5 - 1, output=True)
    told = {each["class"]: each["probability"] for each in result["top"]}
    chances = output.logits[0].sigmoid().tolist()
    assert [told[n] for n in range(4)] == pytest.approx(chances, abs=1e-5)
    index = output.tape.index[0, : result["tape_length"], 0]
    assert [step["index"] for step in result["tape"]] == [[cell] for cell in index.tolist()]
    ratio = max(size[1] / SIZE[0], size[0] / SIZE[1])
    height, width = round(size[1] / ratio), round(size[0] / ratio)
    corners = model.scan.centres(index, 85) - 32
    for step, (top, left) in zip(result["tape"], corners.tolist(), strict=True):
        inside = (top - (SIZE[0] - height) // 2) * size[1] / height, (left - (SIZE[1] - width) // 2) * size[0] / width
        assert step["box"] == [pytest.approx([*inside, 64 * size[1] / height, 64 * size[0] / width])]


def test_a_box_that_covers_the_fitted_image_covers_the_file() -> None:
    for height, width in ((800, 1360), (40, 900), (3000, 1), (1, 1)):
        high, wide = fitted_shape(height, width, SIZE)
        whole = [(SIZE[0] - high) // 2, (SIZE[1] - wide) // 2, high, wide]
        assert unboxed(whole, height, width, SIZE) == pytest.approx([0, 0, height, width])


def test_a_scene_without_signs_stops_below_the_floor_and_costs_little_more_than_the_scan(serving: Serving) -> None:
    none, some = ((STREET / "examples" / name).read_bytes() for name in (NO_SIGN, SIGNS))
    [told, empty, several] = asked(serving.app, none, some)
    floor = told["default"]["threshold"]
    for answer in (empty, several):
        [result] = answer["results"]
        assert answer["budget"] == told["default"]
        assert result["halted"] == (result["tape_length"] < 8)
        assert all(step["weight"][0] > floor for step in result.get("tape", []))
    assert empty["results"][0]["tape_length"] < several["results"][0]["tape_length"]
    model = serving.served.model
    scan, eight = model.scan.macs(*SIZE), total(cost(model, 8)).macs
    assert scan < 1e9 * empty["results"][0]["gflops"] < 1e9 * several["results"][0]["gflops"] <= eight


def test_a_floor_holds_at_any_number_of_windows_and_none_is_refused(serving: Serving) -> None:
    [told, answer, refused] = [
        *asked(serving.app, (STREET / "examples" / SIGNS).read_bytes(), steps=2),
        asked(serving.app, (STREET / "examples" / SIGNS).read_bytes(), steps=0)[1],
    ]
    assert answer["budget"] == {"steps": 2, "threshold": told["default"]["threshold"]}
    assert answer["results"][0]["tape_length"] == 2
    assert refused["detail"] == "steps is 0; this model takes 1 to 8"
    assert budget_at(serving.served.model, 3, Budget(8, 0.4)) == Budget(3, 0.4)
    assert budget_at(serving.served.model, 3, None) == Budget(3, None)


def test_windows_below_the_floor_are_not_encoded_and_the_answer_is_the_same(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = serving.served.model
    x = torch.stack([seen(example(name), 3, SIZE) for name in (NO_SIGN, SIGNS)]).float() / 127.5 - 1
    apply_budget(model, Budget(8, 0.629))
    encode, counts = model.encode, []
    monkeypatch.setattr(model, "encode", lambda windows: counts.append(len(windows)) or encode(windows))
    with torch.inference_mode():
        few = model(x, output=True)
        monkeypatch.setattr(model, "_encode_visible", lambda windows, _: model.encode(windows))
        every = model(x)
    assert counts == [int(few.tape.length.sum()), 16]
    assert torch.allclose(few.logits, every, atol=1e-4)


def test_a_batch_is_bounded_by_its_pixels(serving: Serving) -> None:
    batch = serving.app.state.service.batcher.batch
    assert batch * 4 * 3 * SIZE[0] * SIZE[1] <= 64_000_000
    assert batch == 4


def test_an_upload_of_12_megapixels_is_answered(serving: Serving) -> None:
    content = io.BytesIO()
    Image.new("RGB", (4000, 3000), "grey").save(content, "JPEG")
    [_, answer] = asked(serving.app, content.getvalue())
    assert answer["results"][0]["image"] == {"width": 4000, "height": 3000}
