"""The HTTP interface: paths, what they take, and what they answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from adatape.data.augment import uncropped
from adatape.data.letterbox import unboxed
from adatape.serve.bodies import BodyLimit
from adatape.serve.budgets import as_dict, for_length
from adatape.serve.engine import Answer
from adatape.serve.fair import client_of
from adatape.serve.limits import Hosts, SafeHeaders, Token
from adatape.serve.metrics import Counted
from adatape.serve.pictures import Picture
from adatape.serve.served import ServedModel, description
from adatape.serve.service import Limits, Service
from adatape.serve.uploads import read_form

PAGE = Path(__file__).parent / "page"
JSON = "application/json"
PRESENT = 0.5  # probability above which a label is said to be there, where there may be several
BYTES_A_SYMBOL, BYTES_AROUND = 16, 1024  # of a sequence as JSON, spaces and line ends included


class App(FastAPI):
    """FastAPI's own answer to an unforeseen error comes from its outermost layer; headers go around that too."""

    def build_middleware_stack(self) -> ASGIApp:
        return SafeHeaders(super().build_middleware_stack())


def create_app(
    served: ServedModel,
    *,
    device: str = "cpu",
    token: str | None = None,
    limits: Limits | None = None,
    hosts: Collection[str] = (),
) -> FastAPI:
    """The application of one model; `app.state.service` is what its paths share."""
    service = Service(served, device, limits or Limits())

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await service.batcher.start()
        yield
        await service.close()

    app = App(title="adatape", lifespan=life, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_exception_handler(RequestValidationError, _one_line)  # type: ignore[arg-type]
    _add_model_paths(app, service)
    _add_watching_paths(app, service)
    paths = {"/", *(route.path for route in app.routes if isinstance(route, APIRoute))}
    app.mount("/", StaticFiles(directory=PAGE, html=True))
    # The last added is the outermost: what the token or the limit refuses is counted too.
    app.add_middleware(BodyLimit, bodies=service.bodies)
    if token is not None:
        # The page's own files hold no secret, and a browser cannot send a token to open them.
        static = {f"/{path.relative_to(PAGE).as_posix()}" for path in PAGE.rglob("*") if path.is_file()}
        app.add_middleware(Token, token=token, open_paths={"/", "/healthz", "/readyz", *static})
    app.add_middleware(Hosts, names=hosts)
    app.add_middleware(Counted, metrics=service.metrics, paths=paths)
    return app


def _add_model_paths(app: FastAPI, service: Service) -> None:
    @app.post("/v1/classify")
    async def classify(request: Request) -> Response:
        if service.served.experiment.data.image_size is None:
            raise HTTPException(404, "this model takes sequences: POST /v1/parity")
        form = await read_form(request, service.limits.images)
        given = form.fields
        budget = service.budget(given.get("steps"), given.get("threshold"), given.get("latency_ms"))
        several = service.served.experiment.data.several_labels
        top = given.get("top", service.limits.top if several else 5)
        if not 1 <= top <= service.limits.top:
            raise HTTPException(422, f"top is {top}; it must be 1 to {service.limits.top}")
        client = client_of(request.scope)
        answered = await service.classify(form.files, budget, client, request.is_disconnected)
        pictures = [picture for picture, _ in answered]
        looks = await service.looks(pictures, client) if given.get("seen") else [{}] * len(pictures)
        results = [
            {**_told(service, picture, answer, top, given.get("tape", False)), "image": picture.shape, **look}
            for (picture, answer), look in zip(answered, looks, strict=True)
        ]
        return JSONResponse({"results": results, "budget": as_dict(budget)})

    @app.post("/v1/parity")
    async def parity(request: Request) -> dict[str, Any]:
        length = service.served.experiment.data.sequence_length
        if length is None:
            raise HTTPException(404, "this model takes images: POST /v1/classify")
        symbols, steps, threshold = _sequence(await _short_body(request, length), length)
        if len(symbols) != length and service.served.model.tape_bank() is None:
            raise HTTPException(422, f"symbols has {len(symbols)} entries; this model has positions for {length} only")
        budget = for_length(service.budget(steps, threshold), service.served.model, len(symbols))
        answer = await service.parity(torch.tensor(symbols), budget, client_of(request.scope))
        return {
            "prediction": answer.order[0],
            "probability": answer.probability[0],
            "truth": symbols.count(1) % 2,
            "pairs": _tape(answer),
            **_spent(answer),
            "budget": as_dict(budget),
        }


def _add_watching_paths(app: FastAPI, service: Service) -> None:
    limits, latency = service.limits, service.latency
    told = {
        **description(service.served, service.engine.default),
        "latency_ms": [{"steps": steps, "ms": ms} for steps, ms in latency.items()],
        "limits": {"images": limits.images, "bytes": limits.body, "pixels": limits.pixels},
    }
    rendered = JSONResponse(told).body

    @app.get("/v1/model")
    async def model() -> Response:
        return Response(rendered, media_type=JSON)

    @app.get("/v1/heatmap")
    async def heatmap(steps: int | None = None) -> Response:
        return Response(await service.gallery.heatmap(service.budget(steps, None)), media_type=JSON)

    @app.get("/v1/examples")
    async def examples(count: int = 12) -> Response:
        return Response(await service.gallery.examples(count), media_type=JSON)

    @app.get("/healthz")
    async def healthz() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        reason = service.unready()
        return JSONResponse({"status": reason or "ready"}, 503 if reason else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _told(service: Service, picture: Picture, answer: Answer, top: int, tape: bool) -> dict[str, Any]:
    names = service.served.classes
    ranked = zip(answer.order[:top], answer.probability[:top], strict=True)
    best: list[dict[str, Any]] = [
        {"class": label, "name": names[label], "probability": chance} for label, chance in ranked
    ]
    if service.served.experiment.data.several_labels:
        best = [{**each, "present": each["probability"] > PRESENT} for each in best]
    shown = {"tape": _with_boxes(service, _tape(answer), picture)} if tape and answer.taken else {}
    return {"top": best, **_spent(answer), **shown}


def _spent(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in ("tokens", "tape_length", "gflops", "ms", "halted")}


def _tape(answer: Answer) -> list[dict[str, Any]]:
    return [{"index": i, "weight": w} for i, w in zip(answer.taken, answer.weight, strict=True)]


def _with_boxes(service: Service, tape: list[dict[str, Any]], picture: Picture) -> list[dict[str, Any]]:
    """Where each token lies in pixels of the file, if the model saw the whole of it or reads windows of it."""
    model, size = service.served.model, service.served.size
    if isinstance(size, int) and model.window_grid() is None:
        return tape
    indices = torch.tensor([step["index"] for step in tape])
    found = model.tape_boxes(indices, (size, size) if isinstance(size, int) else size)
    if found is None:
        return tape
    shape = picture.height, picture.width
    boxes = [
        [uncropped(box, *shape, size) if isinstance(size, int) else unboxed(box, *shape, size) for box in step]
        for step in found.tolist()
    ]
    return [{**step, "box": box} for step, box in zip(tape, boxes, strict=True)]


async def _short_body(request: Request, length: int) -> bytes:
    """JSON is parsed between two requests of others, so that there must not be much of it."""
    body, most = await request.body(), BYTES_AROUND + BYTES_A_SYMBOL * length
    if len(body) > most:
        raise HTTPException(413, f"the body has {len(body):,} bytes; for {length} symbols at most {most:,} are read")
    return body


def _sequence(body: bytes, length: int) -> tuple[list[int], int | None, float | None]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, "the body is not JSON") from error
    known = {"symbols", "steps", "threshold"}
    if not isinstance(given, dict) or not set(given) <= known:
        raise HTTPException(422, f"the body must be an object with {', '.join(sorted(known))} and nothing else")
    symbols = given.get("symbols")
    if not isinstance(symbols, list) or any(type(each) is not int or abs(each) > 1 for each in symbols):
        raise HTTPException(422, "symbols must be a list of -1, 0 and 1")
    if not 1 <= len(symbols) <= length:
        raise HTTPException(422, f"symbols has {len(symbols)} entries; this model takes 1 to {length}")
    return symbols, _steps(given.get("steps")), _threshold(given.get("threshold"))


def _steps(value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    raise HTTPException(422, f"steps is {str(value)[:40]!r}; it must be a whole number")


def _threshold(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise HTTPException(422, f"threshold is {str(value)[:40]!r}; it must be a number") from error


async def _one_line(_: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}"}, 422)
