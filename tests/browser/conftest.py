"""A stand-in for the server that answers at once and always the same, and a real browser to look at the page with."""

from __future__ import annotations

import base64
import importlib
import io
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

PAGE = Path(__file__).parents[2] / "src" / "adatape" / "serve" / "page"
STEPS, MERGE, GRID, BASE = 4, 3, 4, 4


def lacking(what: str) -> NoReturn:
    """A machine without a browser skips and says so; CI, which has one, fails instead."""
    if os.environ.get("ADATAPE_NEED_BROWSER") == "1":
        pytest.fail(f"ADATAPE_NEED_BROWSER is 1 but {what}")
    pytest.skip(what)


def needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return lacking(f"{module.split('.')[0]} is not installed")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync_playwright = needed("playwright.sync_api").sync_playwright
    binary = shutil.which("chromium")
    if binary is None:
        lacking("there is no chromium on the path")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def served(app: Any) -> Iterator[str]:
    uvicorn = needed("uvicorn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started, "the server did not start"
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture
def serving() -> Any:
    return served


@pytest.fixture
def picture() -> Any:
    return png_of


@pytest.fixture(scope="session")
def image_server() -> Iterator[str]:
    with served(stub("image")) as address:
        yield address


@pytest.fixture(scope="session")
def parity_server() -> Iterator[str]:
    with served(stub("parity")) as address:
        yield address


def stub(kind: str) -> Any:
    """The server's interface over a made-up model, whose answers depend on image and budget alone."""
    fastapi = needed("fastapi")
    static = needed("fastapi.staticfiles")
    app, reply = fastapi.FastAPI(), fastapi.responses.JSONResponse

    async def model(_: Any) -> Any:
        return reply(described(kind))

    async def classify(request: Any) -> Any:
        form = await request.form()
        steps = int(form.get("steps", STEPS))
        threshold = float(form.get("threshold", steps / STEPS))
        try:
            images = [await image.read() for image in form.getlist("image")]
            results = [{**classified(image, steps, threshold), **looked(form, image)} for image in images]
        except OSError:
            return reply({"detail": "the upload is not an image"}, 415)
        return reply({"results": results, "budget": {"steps": steps, "threshold": threshold}})

    async def heatmap(request: Any) -> Any:
        counts = [(7 * at) % 13 * int(request.query_params["steps"]) for at in range(GRID * GRID)]
        return reply({"grid": [GRID, GRID], "counts": counts, "weights": [c / MERGE for c in counts], "images": 60})

    async def examples(request: Any) -> Any:
        shown = range(int(request.query_params["count"]))
        return reply({"examples": [{"label": i, "name": str(i), "image": data_url(png_of(i))} for i in shown]})

    async def parity(request: Any) -> Any:
        asked = await request.json()
        return reply(parity_answer(asked["symbols"], asked.get("steps", STEPS)))

    for answer in (model, heatmap, examples):
        app.add_route(f"/v1/{answer.__name__}", answer, methods=["GET"])
    for answer in (classify, parity):
        app.add_route(f"/v1/{answer.__name__}", answer, methods=["POST"])
    app.mount("/", static.StaticFiles(directory=PAGE, html=True))
    return needed("adatape.serve.limits").SafeHeaders(app)


def described(kind: str) -> dict[str, Any]:
    return {
        "name": f"stub-{kind}",
        "parameters": 262_144,
        "classes": [str(i) for i in range(10)],
        "input": {"size": 8, "channels": 3},
        "tokens": BASE,
        "patch": 4,
        "bank": {"kind": "input", "patch": 2, "grid": [GRID, GRID], "size": GRID * GRID},
        "budget": {"steps": STEPS, "threshold": 1.0, "merge": MERGE},
        "accuracy": 0.9712,
        "gflops": 0.0016,
        "stops": [stop(steps) for steps in range(STEPS + 1)] if kind == "image" else [],
        "kind": kind,
        "length": 12,
    }


def stop(steps: int) -> dict[str, Any]:
    """Only some budgets were measured; what each costs at most is known of all."""
    known = {"accuracy": 0.95 + steps / 100, "gflops_mean": 0.0008 + steps / 10_000} if steps != 3 else {}
    return {"steps": steps, "gflops": 0.0008 + steps / 5_000, **known}


def looked(form: Any, image: bytes) -> dict[str, Any]:
    """As the server does it: the pixels that the model got, and whether they look like its own images."""
    from PIL import Image

    if form.get("seen") != "1":
        return {}
    opened = Image.open(io.BytesIO(image)).convert("L")
    kept = io.BytesIO()
    opened.resize((8, 8)).save(kept, "png")
    far = opened.width > 8
    return {"seen": data_url(kept.getvalue()), "likeness": {"far": far, "most": "contrast", "images": 360}}


def classified(image: bytes, steps: int, threshold: float) -> dict[str, Any]:
    from PIL import Image

    opened = Image.open(io.BytesIO(image))
    seed = sum(opened.convert("L").tobytes())
    tape = tape_of(seed, steps, threshold)
    sure = 0.35 + 0.14 * len(tape)
    ranked = [(seed + i) % 10 for i in range(5)]
    shares = [sure, *((1 - sure) / 2**i for i in range(1, 5))]
    return {
        "top": [{"class": c, "name": str(c), "probability": p} for c, p in zip(ranked, shares, strict=True)],
        "tokens": BASE + len(tape),
        "tape_length": len(tape),
        "gflops": 0.0008 + 0.0002 * len(tape),
        "ms": 1.2 + 0.35 * len(tape),
        "tape": tape,
        "halted": len(tape) < steps,
        "image": {"width": opened.width, "height": opened.height},
    }


def tape_of(seed: int, steps: int, threshold: float) -> list[dict[str, Any]]:
    """Weights grow with each token, so that a low threshold stops early."""
    order = [(5 * (seed % 16) + 7 * at) % 16 for at in range(16)]
    tape, total = [], 0.0
    for step in range(steps):
        if total >= threshold:
            break
        largest = 0.36 + 0.05 * step
        rest = 1 - largest
        tape.append({"index": order[MERGE * step : MERGE * step + MERGE], "weight": [largest, rest * 0.6, rest * 0.4]})
        total += largest
    return tape


def parity_answer(symbols: list[int], steps: int) -> dict[str, Any]:
    chosen = sorted(range(len(symbols)), key=lambda at: (-symbols[at], at))
    pairs = [chosen[2 * t : 2 * t + 2] for t in range(steps) if 2 * t + 1 < len(chosen)]
    truth = symbols.count(1) % 2
    return {
        "prediction": truth,
        "probability": 0.5 + 0.1 * steps,
        "truth": truth,
        "pairs": [{"index": pair, "weight": [0.6, 0.4]} for pair in pairs],
        "length": len(symbols),
    }


def png_of(label: int, size: int = 8) -> bytes:
    from PIL import Image, ImageDraw

    image = Image.new("L", (size, size))
    ImageDraw.Draw(image).text((size // 4, -2), str(label), fill=255)
    image.putpixel((0, 0), 10 * label)
    kept = io.BytesIO()
    image.save(kept, "png")
    return kept.getvalue()


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
