"""What the paths of one server share: the model behind its batcher, decoders, and figures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.exceptions import HTTPException
from torch import Tensor

from adatape.serve.batcher import Batcher, Draining, Full
from adatape.serve.budgets import Setting, setting_of, within_latency
from adatape.serve.engine import Answer, Engine
from adatape.serve.gallery import Gallery
from adatape.serve.metrics import Metrics
from adatape.serve.pictures import Picture, picture
from adatape.serve.served import Served
from adatape.serve.uploads import File

T = TypeVar("T")

RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class Limits:
    """How much a server takes on."""

    queue: int = 256
    """samples accepted and not yet answered"""
    batch: int = 32
    """samples that run together"""
    window: float = 0.002
    """seconds that a sample waits for company"""
    body: int = 10_000_000
    """bytes of a request"""
    bodies: int = 256_000_000
    """bytes of all requests together"""
    images: int = 32
    """files in a request"""


class Service:
    """One served model and all that its paths share."""

    def __init__(self, served: Served, device: str, limits: Limits) -> None:
        self.served, self.limits = served, limits
        self.batches = self.samples = 0
        self.engine = Engine(served.model, device, sigmoid=served.experiment.loss == "sigmoid")
        self.engine.check(served.sample)
        self.latency = self.engine.latency(served.sample)
        self.batcher = Batcher(self._run, limits.queue, limits.batch, limits.window)
        self.metrics = Metrics(lambda: self.batcher.depth)
        self.gallery = Gallery(served, self.engine, self.batcher)
        self.decoders = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2), "decode")

    async def classify(self, files: Sequence[File], setting: Setting) -> list[tuple[Picture, Answer]]:
        """Room first, then decoding, then the model: a full queue costs nothing more than the body."""

        async def decoded_and_answered() -> list[tuple[Picture, Answer]]:
            pictures = await self._pictures(files)
            answers = await self.batcher.ask([each.pixels for each in pictures], setting)
            return list(zip(pictures, answers, strict=True))

        return await self._with_room(len(files), decoded_and_answered)

    async def parity(self, symbols: Tensor, setting: Setting) -> Answer:
        return (await self._with_room(1, lambda: self.batcher.ask([symbols], setting)))[0]

    async def _with_room(self, count: int, work: Callable[[], Awaitable[T]]) -> T:
        try:
            with self.batcher.admitted(count):
                return await work()
        except Full as error:
            full = f"the queue of {self.limits.queue} has no room for {count}; try again"
            raise HTTPException(429, full, headers=RETRY) from error
        except Draining as error:
            raise HTTPException(503, "the server is shutting down", headers=RETRY) from error

    async def _pictures(self, files: Sequence[File]) -> list[Picture]:
        loop, size, channels = asyncio.get_running_loop(), self.served.sample.shape[-1], self.served.channels
        settings = (channels, size, self.served.exif_orientation)
        work = (loop.run_in_executor(self.decoders, picture, each.content, each.name, *settings) for each in files)
        return await asyncio.gather(*work)

    def _run(self, samples: Sequence[Tensor], setting: Setting) -> list[Answer]:
        answers = self.engine.answers(samples, setting)
        self.metrics.batch.observe(len(answers))
        self.batches, self.samples = self.batches + 1, self.samples + len(answers)
        for answer in answers:
            self.metrics.length.observe(answer.tape_length)
        return answers

    def setting(self, steps: int | None, threshold: float | None, latency: float | None = None) -> Setting:
        try:
            if latency is None:
                return setting_of(self.engine.budgets, steps, threshold)
            if steps is not None or threshold is not None:
                raise ValueError("latency_ms chooses the steps; give it without steps and threshold")
            return within_latency(self.engine.budgets, self.latency, latency)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    async def close(self) -> None:
        await self.batcher.drain()
        self.decoders.shutdown()
