"""What the paths of one server share: the model behind its batcher, decoders, and figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from torch import Tensor

from adatape.config import Budget
from adatape.data.augment import as_image
from adatape.serve.batcher import Batcher, Draining, Full
from adatape.serve.bodies import Bodies
from adatape.serve.budgets import asked_budget, within_latency
from adatape.serve.decoding import Decoders, Gone
from adatape.serve.engine import Answer, Engine
from adatape.serve.fair import Client, Turns
from adatape.serve.gallery import Gallery, data_url
from adatape.serve.likeness import KnownImages, Reference
from adatape.serve.metrics import Metrics
from adatape.serve.pictures import Picture
from adatape.serve.served import ServedModel
from adatape.serve.uploads import File

T = TypeVar("T")

RETRY = {"Retry-After": "1"}
BATCH_BYTES = 64_000_000  # of float32 inputs that run together, or one that is larger
MOST_SHOWN = 512  # side of an input up to which the pixels themselves are sent back
STUCK = 30  # seconds of one batch after which the model counts as hung


@dataclass(frozen=True)
class Limits:
    """How much a server takes on."""

    queue: int = 256
    """samples accepted and not yet answered"""
    batch: int = 32
    """samples that run together, fewer where they are large"""
    window: float = 0.002
    """seconds that a sample waits for company"""
    requests: int = 64
    """requests that are worked on at once; others wait for their turn"""
    body: int = 10_000_000
    """bytes of a request"""
    bodies: int = 256_000_000
    """bytes of all requests together"""
    least_rate: float = 16_000
    """bytes a second that a body must bring"""
    grace: float = 5
    """seconds that a body may bring less"""
    images: int = 32
    """files in a request"""
    pixels: int = 100_000_000
    """pixels of a request's images together"""
    top: int = 100
    """classes that are told of an image"""


class Service:
    """One served model and all that its paths share."""

    def __init__(self, served: ServedModel, device: str, limits: Limits) -> None:
        self.served, self.limits = served, limits
        self.batches = self.samples = 0
        self.engine = Engine(served.model, device, sigmoid=served.experiment.loss == "sigmoid")
        self.engine.check(served.sample)
        self.latency = self.engine.latency(served.sample)
        together = max(1, min(limits.batch, BATCH_BYTES // (4 * served.sample.numel())))
        self.batcher = Batcher(self._run, limits.queue, together, limits.window)
        self.metrics = Metrics(lambda: self.batcher.depth)
        self.gallery = Gallery(served, self.engine, self.batcher)
        self.known_images = KnownImages(served.likeness, served.images, served.channels, served.size)
        self.bodies = Bodies(limits.body, limits.bodies, limits.least_rate, limits.grace)
        self.turns = Turns(limits.requests)
        self.decoders = Decoders(served.channels, served.size, served.exif_orientation, limits.pixels)

    async def classify(
        self, files: Sequence[File], budget: Budget | None, client: Client, gone: Gone
    ) -> list[tuple[Picture, Answer]]:
        """Room first, then decoding, then the model: a full queue costs nothing more than the body."""

        async def decoded_and_answered() -> list[tuple[Picture, Answer]]:
            pictures = await self.decoders.pictures(files, client, gone)
            answers = await self.batcher.ask([each.pixels for each in pictures], budget, client)
            return list(zip(pictures, answers, strict=True))

        return await self._with_room(len(files), client, decoded_and_answered)

    async def looks(self, pictures: Sequence[Picture], client: Client) -> list[dict[str, Any]]:
        """What the model saw of each, and whether that looks like its own images."""
        reference = await self.known_images.reference()
        found: list[dict[str, Any]] = await self.decoders.aside(client, _looks, pictures, reference)
        return found

    async def parity(self, symbols: Tensor, budget: Budget | None, client: Client) -> Answer:
        return (await self._with_room(1, client, lambda: self.batcher.ask([symbols], budget, client)))[0]

    async def _with_room(self, count: int, client: Client, work: Callable[[], Awaitable[T]]) -> T:
        try:
            await self._make_room(count, client)
            with self.batcher.admitted(count, client):
                async with self.turns.turn(client, count):
                    return await work()
        except Full as error:
            full = f"the queue of {self.limits.queue} has no room for {count} more of yours; try again"
            raise HTTPException(429, full, headers=RETRY) from error
        except Draining as error:
            raise HTTPException(503, "the server is shutting down", headers=RETRY) from error

    async def _make_room(self, count: int, client: Client) -> None:
        """Where the queue is full, requests that wait give way to those of a client who has fewer of them."""
        room = self.batcher.room
        while not self.batcher.draining and not room.fits(client, count):
            greediest = room.greediest()
            if room.held(client) + count >= room.held(greediest) or not self.turns.drop(greediest, Full(greediest)):
                return
            await asyncio.sleep(0)  # the dropped request gives its room back

    def _run(self, samples: Sequence[Tensor], budget: Budget | None) -> list[Answer]:
        answers = self.engine.answers(samples, budget)
        self.metrics.batch.observe(len(answers))
        self.batches, self.samples = self.batches + 1, self.samples + len(answers)
        for answer in answers:
            self.metrics.length.observe(answer.tape_length)
        return answers

    def budget(self, steps: int | None, threshold: float | None, latency: float | None = None) -> Budget | None:
        try:
            if latency is None:
                return asked_budget(self.served.model, self.engine.default, steps, threshold)
            if steps is not None or threshold is not None:
                raise ValueError("latency_ms chooses the steps; give it without steps and threshold")
            return within_latency(self.served.model, self.latency, latency, self.engine.default)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    def unready(self) -> str:
        """Why a new client's upload would not be answered now; empty where it would."""
        batcher, began = self.batcher, self.batcher.running_since
        if batcher.draining:
            return "the server is shutting down"
        if began is not None and time.monotonic() - began > STUCK:
            return f"the model has not answered for {STUCK} s"
        if batcher.room.free < 1:
            return f"the queue of {self.limits.queue} is full"
        if self.bodies.room.free < self.limits.body:
            return f"uploads hold {self.bodies.room.used:,} of {self.limits.bodies:,} bytes"
        return ""

    def stop(self) -> None:
        """Takes nothing new, and waits for no body that is still on its way."""
        self.batcher.refuse()
        self.bodies.stop()

    async def close(self) -> None:
        await self.batcher.drain()
        self.decoders.close()


def _looks(pictures: Sequence[Picture], reference: Reference | None) -> list[dict[str, Any]]:
    return [
        {
            "seen": data_url(as_image(each.pixels)) if max(each.pixels.shape) <= MOST_SHOWN else None,
            "likeness": None if reference is None else reference.judge(each.pixels)._asdict(),
        }
        for each in pictures
    ]
