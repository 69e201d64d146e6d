from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from PIL import Image
from small_runs import QUIET, tiny, wait_until

from adatape.config import Budget, to_dict
from adatape.data.augment import scaled
from adatape.serve.app import create_app
from adatape.serve.batcher import Batcher, Draining, Full, Waiting
from adatape.serve.budgets import asked_budget, within_latency
from adatape.serve.pictures import open_upload, picture
from adatape.serve.served import ServedModel, load_served
from adatape.serve.server import Server, run_server
from adatape.serve.service import Limits
from adatape.train.folder import WEIGHTS, load_config, with_budget, write
from adatape.train.task import build_for
from adatape.train.weights import write_weights

pytestmark = pytest.mark.filterwarnings("ignore:threshold is 3.5; the model was built")

T = TypeVar("T")
BUDGETS = [{}, {"steps": 0}, {"steps": 1}, {"steps": 3}, {"steps": 4, "threshold": 0.4}, {"threshold": 3.5}]


def write_run(folder: Path, family: str = "adatape", **fields: Any) -> Path:
    """A finished run whose weights were never trained; large ones, so that images differ in what they read."""
    torch.manual_seed(1)
    experiment = tiny(family, **fields)
    model = build_for(experiment)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", to_dict(experiment))
    write_weights(folder / WEIGHTS, model.state_dict())
    write(folder / "result.json", {"accuracy": 0.5})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture
def served(folder: Path) -> ServedModel:
    return load_served(folder)


@pytest.fixture(autouse=True)
def _few_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adatape.serve.engine.REPEATS", 3)


def drawn(seed: int, size: tuple[int, int] = (8, 8), mode: str = "L") -> Image.Image:
    shape = (*size[::-1], *((len(mode),) if len(mode) > 1 else ()))
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8), mode)


def png(image: Image.Image, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


def files(*contents: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("image", (f"{n}.png", content)) for n, content in enumerate(contents)]


def direct(served: ServedModel, content: bytes, budget: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Probabilities and tape of the model called by itself."""
    reader = served.model.reader
    reader.steps, reader.threshold = setting_of_model(served, budget)
    pixels = picture(open_upload(content, "x"), "x", served.channels, 8).pixels
    with torch.inference_mode():
        output = served.model.eval()(scaled(pixels[None]), output=True)
    return output.logits.softmax(-1)[0], output.tape


def setting_of_model(served: ServedModel, budget: dict[str, Any]) -> tuple[int, float]:
    reading = served.model.reader.reading
    steps = budget.get("steps", reading.steps)
    return steps, budget.get("threshold", reading.threshold * steps / reading.steps)


def assert_same(answer: dict[str, Any], expected: tuple[torch.Tensor, Any]) -> None:
    chances, tape = expected
    told = {each["class"]: each["probability"] for each in answer["top"]}
    assert torch.tensor([told[label] for label in range(len(chances))]).allclose(chances, atol=1e-5)
    length = 0 if tape is None else int(tape.length[0])
    assert answer["tape_length"] == length == answer["tokens"] - 4
    if length:
        assert [step["index"] for step in answer["tape"]] == tape.index[0, :length].tolist()
        weights = torch.tensor([step["weight"] for step in answer["tape"]])
        assert weights.allclose(tape.weight[0, :length], atol=1e-5)


def inside(app: FastAPI, work: Callable[[httpx.AsyncClient], Any]) -> Any:
    """Runs a coroutine with a client whose requests reach the application without a network."""

    async def run() -> Any:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client,
        ):
            return await work(client)

    return finished(run())


def finished(work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: the browser's tests may have left a loop running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    return await asyncio.wait_for(work, seconds)


def one(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    return inside(app, lambda client: client.request(method, path, **options))


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[tuple[str, Server, threading.Thread]]:
    """The application behind uvicorn, in a thread."""
    place = socket.create_server(("127.0.0.1", 0))
    server = Server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}", server, thread
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(120)
        place.close()
    assert not thread.is_alive()


def slowed(app: FastAPI, seconds: float) -> list[int]:
    """Makes the model slow; gives a list that collects the queue's depth at each batch."""
    batcher, depths = app.state.service.batcher, []
    quick = batcher.run

    def slow(*arguments: Any) -> Any:
        depths.append(batcher.depth)
        time.sleep(seconds)
        return quick(*arguments)

    batcher.run = slow
    return depths


def test_answers_equal_the_model_called_directly_at_every_budget_and_in_any_mix(
    folder: Path, served: ServedModel
) -> None:
    contents = [png(drawn(seed)) for seed in range(12)]
    draws = random.Random(0)
    asked = [(draws.sample(contents, draws.randint(1, 5)), draws.choice(BUDGETS)) for _ in range(60)]

    async def ask_all(client: httpx.AsyncClient) -> list[httpx.Response]:
        form = {"top": "10", "tape": "1"}
        calls = (client.post("/v1/classify", files=files(*some), data={**form, **budget}) for some, budget in asked)
        return await asyncio.gather(*calls)

    replies = inside(create_app(load_served(folder), limits=Limits(queue=600)), ask_all)
    lengths = set()
    for (some, budget), reply in zip(asked, replies, strict=True):
        assert reply.status_code == 200, reply.text
        body = reply.json()
        assert (body["budget"]["steps"], body["budget"]["threshold"] or 0.0) == setting_of_model(served, budget)
        for content, answer in zip(some, body["results"], strict=True):
            assert_same(answer, direct(served, content, budget))
            assert answer["halted"] == (answer["tape_length"] < body["budget"]["steps"])
            lengths.add(answer["tape_length"])
    assert len(lengths) >= 4


def test_only_equal_budgets_share_a_batch_and_the_oldest_goes_first() -> None:
    ran: list[tuple[Budget, int]] = []

    def run(samples: Any, setting: Budget) -> Any:
        ran.append((setting, len(samples)))
        return list(samples)

    async def work() -> list[Any]:
        batcher = Batcher(run, queue=100, batch=4, window=0.02)
        await batcher.start()
        short, long = Budget(1, 0.5), Budget(4, 2.0)
        order = [long, short, short, long, long, short, long, long]
        with batcher.admitted(len(order)):
            calls = [batcher.ask([torch.tensor([n])], setting) for n, setting in enumerate(order)]
            answers = await asyncio.gather(*calls)
        await batcher.drain()
        return answers

    answers = finished(work())
    assert [int(answer[0]) for answer in answers] == list(range(8))
    assert ran == [(Budget(4, 2.0), 4), (Budget(1, 0.5), 3), (Budget(4, 2.0), 1)]


def test_draining_waits_for_what_was_admitted_and_not_yet_asked() -> None:
    async def work() -> Any:
        batcher = Batcher(lambda samples, _: list(samples))
        await batcher.start()
        with batcher.admitted(1):
            draining = asyncio.create_task(batcher.drain())
            await asyncio.sleep(0.05)
            with pytest.raises(Draining), batcher.admitted(1):
                pass
            answer = await asyncio.wait_for(batcher.ask([torch.ones(1)], None), 5)
        await asyncio.wait_for(draining, 5)
        return answer

    assert finished(work()) == [torch.ones(1)]


def test_a_failing_batch_fails_those_who_asked_and_nobody_else() -> None:
    def run(samples: Any, setting: Budget) -> Any:
        if setting.steps == 1:
            raise RuntimeError("out of memory")
        return list(samples)

    async def work() -> list[Any]:
        batcher = Batcher(run, queue=2)
        await batcher.start()
        with batcher.admitted(2), pytest.raises(Full), batcher.admitted(1):
            pass
        calls = (batcher.ask([torch.zeros(1)], Budget(steps)) for steps in (1, 2))
        found = await asyncio.gather(*calls, return_exceptions=True)
        await batcher.drain()
        return found

    failed, answered = finished(work())
    assert isinstance(failed, RuntimeError)
    assert len(answered) == 1


def test_the_event_loop_is_free_while_the_model_runs(served: ServedModel) -> None:
    app = create_app(served)
    batcher, running, free = app.state.service.batcher, threading.Event(), threading.Event()
    answer = batcher.run

    def held(*arguments: Any) -> Any:
        running.set()
        assert free.wait(60), "nobody else was answered meanwhile"
        return answer(*arguments)

    batcher.run = held

    async def work(client: httpx.AsyncClient) -> None:
        slow = asyncio.create_task(client.post("/v1/classify", files=files(png(drawn(0)))))
        while not running.is_set():
            await asyncio.sleep(0.005)
        assert (await client.get("/healthz")).status_code == 200
        assert not slow.done()
        free.set()
        assert (await slow).status_code == 200

    inside(app, work)


def fuzzed(draws: random.Random) -> bytes:
    whole = png(drawn(draws.randrange(50), (16, 12), draws.choice(["L", "RGB"])), draws.choice(["PNG", "JPEG", "GIF"]))
    match draws.randrange(4):
        case 0:
            return draws.randbytes(draws.randrange(300))
        case 1:
            return whole[: draws.randrange(len(whole))]
        case 2:
            return whole[:8] + draws.randbytes(draws.randrange(200))
    torn = bytearray(whole)
    for _ in range(draws.randint(1, 20)):
        torn[draws.randrange(len(torn))] = draws.randrange(256)
    return bytes(torn)


def test_a_thousand_fuzzed_files_get_an_answer_or_a_reason(served: ServedModel) -> None:
    app, draws = create_app(served), random.Random(0)

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.post("/v1/classify", files=files(fuzzed(draws))) for _ in range(1000)]

    replies = inside(app, work)
    statuses = {reply.status_code for reply in replies}
    assert statuses <= {200, 415, 422}
    assert {415, 422} <= statuses
    assert all(isinstance(reply.json()["detail"], str) for reply in replies if reply.status_code != 200)


def test_fuzzed_forms_get_a_reason(served: ServedModel) -> None:
    draws = random.Random(1)
    request = httpx.Request("POST", "http://test", files=files(png(drawn(0))), data={"steps": "1", "tape": "1"})
    whole, kind = request.read(), request.headers["content-type"]

    async def work(client: httpx.AsyncClient) -> set[int]:
        statuses = set()
        for _ in range(200):
            torn = bytearray(whole)
            for _ in range(draws.randint(1, 6)):
                torn[draws.randrange(len(torn))] = draws.randrange(256)
            body = bytes(torn[: draws.randrange(len(torn))] if draws.random() < 0.3 else torn)
            reply = await client.post("/v1/classify", content=body, headers={"content-type": kind})
            statuses.add(reply.status_code)
        return statuses

    assert inside(create_app(served), work) <= {200, 415, 422}


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (b"", 422, "empty"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415, "not an image"),
        (b"plain text", 415, "not an image; known are PNG, JPEG"),
        (png(drawn(0))[:60], 422, "0.png"),
        (png(Image.new("1", (20_000, 20_000))), 422, "pixels"),
        (png(Image.new("1", (7_000, 7_000))), 422, "at most 40,000,000 are decoded"),
        (png(Image.new("1", (1, 5_000))), 422, "a side may be 100 times the other"),
        (png(Image.new("I;16", (8, 8))), 422, "more than 8 bits"),
    ],
    ids=["empty", "postscript", "text", "cut", "bomb", "large", "thread", "deep"],
)
def test_what_is_no_image_is_refused_with_the_reason(
    served: ServedModel, content: bytes, status: int, reason: str
) -> None:
    reply = one(create_app(served), "POST", "/v1/classify", files=files(content))
    assert (reply.status_code, reason in reply.json()["detail"]) == (status, True), reply.text


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "CMYK"])
def test_any_colours_become_the_models(served: ServedModel, mode: str) -> None:
    image = drawn(3, (40, 30)).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    reply = one(create_app(served), "POST", "/v1/classify", files=files(png(image, kind)))
    assert reply.status_code == 200
    assert reply.json()["results"][0]["image"] == {"width": 40, "height": 30}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"steps": "5"}, "steps is 5; this model takes 0 to 4"),
        ({"steps": "-1"}, "steps is -1; this model takes 0 to 4"),
        ({"steps": "two"}, "steps is 'two'; it must be a whole number"),
        ({"threshold": "nan"}, "threshold is nan; it must be a finite number above 0"),
        ({"threshold": "inf"}, "threshold is inf"),
        ({"threshold": "0"}, "threshold is 0.0"),
        ({"latency_ms": "0.000001"}, "the least possible here is"),
        ({"latency_ms": "nan"}, "latency_ms is nan"),
        ({"latency_ms": "5", "steps": "1"}, "give it without steps and threshold"),
        ({"top": "0"}, "top is 0; it must be 1 to 100"),
        ({"tape": "yes"}, "tape is 'yes'; it must be 0 or 1"),
        ({"stepz": "1"}, "'stepz' is no field; known are image, steps"),
        ({"steps": ["1", "2"]}, "steps is given twice"),
    ],
)
def test_an_impossible_wish_is_refused_with_the_range(served: ServedModel, form: dict[str, Any], reason: str) -> None:
    reply = one(create_app(served), "POST", "/v1/classify", files=files(png(drawn(0))), data=form)
    assert reply.status_code == 422
    assert reason in reply.json()["detail"]


def test_requests_without_images_or_with_too_many_are_refused(served: ServedModel) -> None:
    app = create_app(served, limits=Limits(images=3))

    async def work(client: httpx.AsyncClient) -> list[tuple[int, str]]:
        replies = [
            await client.post("/v1/classify", files={"steps": (None, "1")}),
            await client.post("/v1/classify", files={"image": (None, "text")}),
            await client.post("/v1/classify", json={}),
            await client.post("/v1/classify", files=files(*[png(drawn(0))] * 4)),
        ]
        return [(reply.status_code, reply.json()["detail"]) for reply in replies]

    none, text, kind, many = inside(app, work)
    assert none == (422, "image is missing; send one file or more")
    assert text == (422, "image is text; it must be a file")
    assert kind[0] == 415
    assert many[0] == 422
    assert "at most 3 images" in many[1]


def test_bodies_over_the_limit_are_refused_whether_announced_or_chunked(served: ServedModel) -> None:
    app = create_app(served, limits=Limits(body=100_000))
    large = os.urandom(600_000)

    def chunks() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        for start in range(0, len(large), 10_000):
            yield large[start : start + 10_000]
        yield b"\r\n--x--\r\n"

    kind = {"content-type": "multipart/form-data; boundary=x"}
    with listening(app) as (address, _, _), httpx.Client(base_url=address, timeout=120) as client:
        replies = [
            client.post("/v1/classify", files=files(large)),
            client.post("/v1/classify", content=chunks(), headers=kind),
            client.post("/v1/parity", content=chunks()),
        ]
        assert client.post("/v1/classify", files=files(png(drawn(0)))).status_code == 200
    assert [reply.status_code for reply in replies[:2]] == [413, 413]
    assert replies[0].json() == {"detail": "the body is over 100,000 bytes, which is the limit"}
    assert replies[2].status_code == 404  # a path of other models never reads its body


def test_a_body_that_crosses_the_limit_with_its_last_bytes_is_refused_at_once(served: ServedModel) -> None:
    app, told = create_app(served, limits=Limits(body=100)), []
    messages = [{"type": "http.request", "body": b"x" * 200, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=x")]
    scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": headers, "query_string": b""}
    finished(within(app(scope, receive, send), 5))
    assert told[0]["status"] == 413


def test_uploads_together_are_bounded(served: ServedModel) -> None:
    app = create_app(served, limits=Limits(bodies=1000))
    reply = one(app, "POST", "/v1/classify", files=files(os.urandom(2000)))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


def test_nothing_is_written(folder: Path, served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def rollover(_: Any) -> None:
        raise AssertionError("an upload went to disk")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", rollover)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    large = png(drawn(0, (1500, 1500), "RGB"))
    assert len(large) > 5_000_000
    assert one(create_app(served), "POST", "/v1/classify", files=files(large)).status_code == 200
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_at_twice_its_capacity_the_queue_is_bounded_and_every_accepted_answer_is_right(
    folder: Path, served: ServedModel
) -> None:
    app = create_app(load_served(folder), limits=Limits(queue=16, batch=4))
    depths = slowed(app, 0.01)
    contents = [png(drawn(seed)) for seed in range(6)]
    expected = [[direct(served, content, budget) for budget in BUDGETS] for content in contents]

    async def keep_asking(client: httpx.AsyncClient, seed: int, kept: list[int]) -> None:
        draws = random.Random(seed)
        for _ in range(6):
            i, j = draws.randrange(len(contents)), draws.randrange(len(BUDGETS))
            form = {"top": "10", "tape": "1", **BUDGETS[j]}
            reply = await client.post("/v1/classify", files=files(contents[i]), data=form)
            kept.append(reply.status_code)
            if reply.status_code == 200:
                assert_same(reply.json()["results"][0], expected[i][j])
            else:
                assert reply.headers["retry-after"] == "1"

    async def wave(address: str) -> list[int]:
        kept: list[int] = []
        async with httpx.AsyncClient(base_url=address, timeout=120, verify=False) as client:
            await asyncio.gather(*(keep_asking(client, seed, kept) for seed in range(32)))
        return kept

    with listening(app) as (address, _, _):
        finished(wave(address))
        memory = resident()
        statuses = finished(wave(address))
        assert resident() - memory < 30e6
        batcher = app.state.service.batcher
        assert (batcher.depth, batcher._groups) == (0, {})
        text = httpx.get(f"{address}/metrics").text
    assert set(statuses) == {200, 429}
    assert max(depths) <= 16
    assert 'adatape_rejected_total{reason="queue"}' in text
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Waiting]


def resident() -> int:
    gc.collect()
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def test_shutting_down_answers_what_was_accepted_and_nothing_else(served: ServedModel) -> None:
    app = create_app(served, limits=Limits(batch=2))
    slowed(app, 0.05)
    replies: list[int] = []

    def ask(address: str) -> None:
        with contextlib.suppress(httpx.ConnectError):  # who comes after the door is shut was never accepted
            replies.append(httpx.post(f"{address}/v1/classify", files=files(png(drawn(0))), timeout=120).status_code)

    with listening(app) as (address, server, thread):
        asking = [threading.Thread(target=ask, args=(address,)) for _ in range(12)]
        for each in asking:
            each.start()
        batcher = app.state.service.batcher
        wait_until(lambda: batcher.depth >= 8)
        accepted = batcher.depth
        server.handle_exit(signal.SIGTERM, None)
        for each in asking:
            each.join(120)
        thread.join(120)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{address}/healthz", timeout=2)
    assert replies.count(200) >= accepted
    assert set(replies) <= {200, 503}
    assert batcher.depth == 0


def test_while_draining_a_server_lives_but_is_not_ready(served: ServedModel) -> None:
    app = create_app(served)

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        before = await client.get("/readyz")
        app.state.service.batcher.refuse()
        asked = await client.post("/v1/classify", files=files(png(drawn(0))))
        return [before, await client.get("/healthz"), await client.get("/readyz"), asked]

    before, health, ready, refused = inside(app, work)
    assert (before.status_code, before.json()) == (200, {"status": "ready"})
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()) == (503, {"status": "the server is shutting down"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("stored", [None, Budget(0), Budget(1), Budget(2, 0.3), Budget(4, 0.4)])
def test_the_budget_that_is_described_is_the_one_that_is_used(stored: Budget | None, tmp_path: Path) -> None:
    """Also once requests with other budgets have been answered."""
    run = write_run(tmp_path / "run")
    write(run / "config.json", to_dict(with_budget(load_config(run / "config.json"), stored)))
    app = create_app(load_served(run))
    content = png(drawn(3))

    async def work(client: httpx.AsyncClient) -> list[Any]:
        model = (await client.get("/v1/model")).json()
        told = model["default"]
        assert model["gflops"] == model["stops"][told["steps"]]["gflops"]
        plain = (await client.post("/v1/classify", files=files(content))).json()
        named = {name: value for name, value in told.items() if value is not None}
        other = await client.post("/v1/classify", files=files(content), data={"steps": 3})
        asked = (await client.post("/v1/classify", files=files(content), data=named)).json()
        assert other.json()["budget"]["steps"] == 3
        return [told, (await client.get("/v1/model")).json()["default"], plain, asked]

    told, again, plain, asked = inside(app, work)
    assert told == again == plain["budget"] == asked["budget"]
    assert told["steps"] == (4 if stored is None else stored.steps)
    assert stored is None or stored.threshold in (None, told["threshold"])
    assert plain["results"][0]["top"] == asked["results"][0]["top"]
    assert plain["results"][0]["tape_length"] <= told["steps"]


def test_a_token_is_asked_for_everywhere_but_health_and_page(served: ServedModel) -> None:
    app = create_app(served, token="s3cret")

    async def work(client: httpx.AsyncClient) -> dict[str, int]:
        right, wrong = {"authorization": "Bearer s3cret"}, {"authorization": "Bearer s3cre"}
        found = {path: (await client.get(path)).status_code for path in ("/healthz", "/", "/v1/model", "/metrics")}
        found["wrong"] = (await client.get("/v1/model", headers=wrong)).status_code
        found["post"] = (await client.post("/v1/classify", files=files(b"x"))).status_code
        found["right"] = (await client.get("/v1/model", headers=right)).status_code
        return found

    expected = {"/healthz": 200, "/": 200, "/v1/model": 401, "/metrics": 401, "wrong": 401, "post": 401, "right": 200}
    assert inside(app, work) == expected


def test_metrics_tell_what_happened(served: ServedModel) -> None:
    app = create_app(served)

    async def work(client: httpx.AsyncClient) -> str:
        await client.post("/v1/classify", files=files(png(drawn(0)), png(drawn(1))))
        await client.post("/v1/classify", files=files(b"x"))
        await client.get("/made-up/1")
        return (await client.get("/metrics")).text

    text = inside(app, work)
    for line in (
        'adatape_requests_total{path="/v1/classify",status="200"} 1.0',
        'adatape_requests_total{path="/v1/classify",status="415"} 1.0',
        'adatape_requests_total{path="other",status="404"} 1.0',
        "adatape_batch_size_sum 2.0",
        "adatape_tape_length_count 2.0",
        'adatape_request_seconds_count{path="/v1/classify"} 2.0',
        "adatape_queue_depth 0.0",
    ):
        assert line in text


def test_the_model_is_described_and_its_data_shown(served: ServedModel) -> None:
    async def work(client: httpx.AsyncClient) -> tuple[Any, Any, Any, Any]:
        model, shown = (await client.get("/v1/model")).json(), (await client.get("/v1/examples?count=10")).json()
        heat = [(await client.get("/v1/heatmap", params={"steps": steps})).json() for steps in (2, 2, 0)]
        bad = await client.get("/v1/heatmap?steps=9"), await client.get("/v1/examples?count=x")
        return model, shown["examples"], heat, [(each.status_code, each.json()["detail"]) for each in bad]

    model, shown, heat, bad = inside(create_app(served), work)
    assert (model["kind"], model["input"], model["tokens"]) == ("image", {"size": 8, "channels": 1}, 4)
    assert model["bank"] == {"kind": "input", "patch": 2, "grid": [4, 4], "size": 16}
    assert model["budget"] == {"least": 0, "steps": 4, "threshold": 1.0, "merge": 3}
    assert model["accuracy"] == 0.5
    assert sorted(each["name"] for each in shown) == model["classes"]
    assert all(each["image"].startswith("data:image/png;base64,") for each in shown)
    assert heat[0] == heat[1]
    assert (heat[0]["grid"], heat[0]["images"], len(heat[0]["per_step"])) == ([4, 4], 360, 2)
    assert sum(heat[0]["per_step"][0]) == 360 * 3
    assert sum(heat[0]["weights"]) == pytest.approx(sum(heat[0]["counts"]) / 3)
    assert sum(heat[2]["counts"]) == 0
    assert [status for status, _ in bad] == [422, 422]


def test_a_server_needs_no_data_set(tmp_path: Path, served: ServedModel) -> None:
    moved = write_run(tmp_path / "run")
    config = json.loads((moved / "config.json").read_text())
    config["data"] |= {"source": "folder", "path": "/nowhere"}
    (moved / "config.json").write_text(json.dumps(config))
    away, content = load_served(moved), png(drawn(0))

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        paths = ("/v1/examples", "/v1/heatmap")
        asked = await client.post("/v1/classify", files=files(content), data={"top": "10", "tape": "1"})
        return [asked, *[await client.get(path) for path in paths]]

    asked, *missing = inside(create_app(away), work)
    assert_same(asked.json()["results"][0], direct(served, content, {}))
    assert [each.status_code for each in missing] == [404, 404]
    assert all("/nowhere" in each.json()["detail"] for each in missing)


@pytest.mark.parametrize("family", ["plainvit", "ut", "ponder", "adatape-learn"])
def test_every_family_is_served(tmp_path: Path, family: str) -> None:
    app = create_app(load_served(write_run(tmp_path / "run", family)))

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        calls = [client.post("/v1/classify", files=files(png(drawn(0))), data=form) for form in ({}, {"steps": 1})]
        return [*await asyncio.gather(*calls), await client.get("/v1/heatmap"), await client.get("/v1/model")]

    plain, budgeted, heat, model = inside(app, work)
    assert plain.status_code == 200
    assert plain.json()["results"][0]["gflops"] > 0
    assert budgeted.status_code == (422 if family == "plainvit" else 200)
    assert (heat.status_code, "no bank" in heat.json()["detail"]) == (404, True)
    assert model.json()["bank"]["kind"] == ("learn" if family == "adatape-learn" else None)


def test_parity_tells_its_pairs_and_takes_short_sequences(tmp_path: Path) -> None:
    served = load_served(write_run(tmp_path / "run", "parity adatape"))
    app, whole = create_app(served), [1, 0, -1, 1, 1, 0, -1, 0]

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies: list[Any] = [
            {"symbols": whole},
            {"symbols": whole[:5], "steps": 4},
            {"symbols": [1]},
            {"symbols": whole, "steps": 99},
            {"symbols": [2] * 8},
            {"symbols": whole * 2},
            {"symbols": whole, "more": 1},
            {"symbols": whole, "threshold": "x"},
            [],
        ]
        asked = await asyncio.gather(*(client.post("/v1/parity", json=body) for body in bodies))
        huge = await client.post("/v1/parity", content=json.dumps({"symbols": whole})[:-1] + ', "threshold": 1e999}')
        return [*asked, huge, await client.post("/v1/parity", content=b"{"), await client.post("/v1/classify")]

    full, short, single, *bad = inside(app, work)
    answer = full.json()
    assert (answer["truth"], answer["prediction"] in (0, 1), answer["probability"] >= 0.5) == (1, True, True)
    read = [place for pair in answer["pairs"] for place in pair["index"]]
    assert len(read) == len({*read}) == 2 * answer["tape_length"]
    assert short.json()["budget"]["steps"] == 2
    assert all(place < 5 for pair in short.json()["pairs"] for place in pair["index"])
    assert (single.json()["tape_length"], single.json()["truth"]) == (0, 1)
    assert [reply.status_code for reply in bad] == [422] * 8 + [404]


def test_a_model_set_to_no_steps_is_served_at_none_and_returns_to_them(served: ServedModel) -> None:
    served.model.set_budget(0)
    app, image = create_app(served), files(png(drawn(0)))

    async def work(client: httpx.AsyncClient) -> list[Any]:
        asked = ({}, {"steps": "2"}, {})
        return [(await client.post("/v1/classify", files=image, data=each)).json()["budget"] for each in asked]

    none = {"steps": 0, "threshold": None}
    assert inside(app, work) == [none, {"steps": 2, "threshold": 0.5}, none]


def test_a_latency_buys_the_most_steps_that_fit(served: ServedModel) -> None:
    table: dict[int | None, float] = {0: 1.0, 1: 2.0, 2: 3.0, 4: 5.004}
    assert [within_latency(served.model, table, ms).steps for ms in (1.0, 2.9, 5.0, 99)] == [0, 1, 2, 4]
    assert within_latency(served.model, table, 3) == asked_budget(served.model, None, 2, None) == Budget(2, 0.5)
    with pytest.raises(ValueError, match=r"latency_ms is 0.5; the least possible here is 1.0"):
        within_latency(served.model, table, 0.5)


def damaged(folder: Path, how: str) -> Path:
    match how:
        case "missing":
            (folder / WEIGHTS).unlink()
        case "cut":
            (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])
        case "config":
            (folder / "config.json").write_text("{")
        case "list":
            (folder / "config.json").write_text("[1]")
        case "nan":
            model = load_served(folder).model
            write_weights(folder / WEIGHTS, {name: value * float("nan") for name, value in model.state_dict().items()})
    return folder / "elsewhere" if how == "folder" else folder


@pytest.mark.parametrize("how", ["missing", "cut", "config", "list", "nan", "folder"])
def test_a_damaged_run_is_one_line(tmp_path: Path, how: str) -> None:
    with pytest.raises((ValueError, OSError)) as caught:
        run_server(damaged(write_run(tmp_path / "run"), how), port=0, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_port_that_is_taken_is_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 cannot be had"):
            run_server(folder, port=port, device="cpu")
    with pytest.raises(ValueError, match="port is 70000"):
        run_server(folder, port=70000)


def test_an_answer_is_sent_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio turns off Nagle's algorithm where a socket names its protocol; else each answer could wait 40 ms."""
    protocols: list[int] = []
    monkeypatch.setattr(Server, "run", lambda _, sockets: protocols.extend(each.proto for each in sockets))
    run_server(folder, port=0, device="cpu")
    assert protocols == [socket.IPPROTO_TCP]


def test_the_command_listens_asks_for_its_token_and_ends_on_sigterm(folder: Path) -> None:
    code = "import sys; from pathlib import Path; from adatape.serve.server import run_server;"
    code += "from adatape.report.tables import started_table; from adatape.report.terminal import print_table;"
    code += "told = {'device': 'cpu', 'on_start': lambda started: print_table(started_table(started))};"
    code += "print(run_server(Path(sys.argv[1]), '0.0.0.0', 0, 's3cret', **told).as_dict())"
    command = [sys.executable, "-u", "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=QUIET) as process:
        try:
            assert process.stdout is not None
            said = []
            while not said or "listening on" not in said[-1]:
                said.append(process.stdout.readline())
                assert said[-1], said
            port = said[-1].split("(")[0].strip().rpartition(":")[2]
            address, token = f"http://127.0.0.1:{port}/v1/classify", {"authorization": "Bearer s3cret"}
            asked = [httpx.post(address, files=files(png(drawn(0))), headers=headers, timeout=120)
                     for headers in ({}, token)]  # fmt: skip
            assert [reply.status_code for reply in asked] == [401, 200]
            process.terminate()
            rest = process.communicate(timeout=120)[0]
        finally:
            process.kill()
    assert process.returncode == 0
    assert "'samples': 1" in rest
