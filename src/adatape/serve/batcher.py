"""Requests of one budget run together in one thread, those of the least served client first, then the oldest."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adatape.config import Budget
from adatape.serve.engine import Answer
from adatape.serve.fair import LOCAL, Client, Room, Shares

Kind = tuple[Budget | None, torch.Size]  # what may share a batch
Run = Callable[[Sequence[Tensor], Budget | None], list[Answer]]


class Full(Exception):  # noqa: N818
    """More samples are waiting than the queue takes, or than it takes of one client."""


class Draining(Exception):  # noqa: N818
    """The server is shutting down and takes nothing new."""


class Waiting(NamedTuple):
    sample: Tensor
    since: float
    answer: asyncio.Future[Answer]


class Batcher:
    """Accepts up to `queue` samples, and runs them `batch` at a time, waiting at most `window` seconds for company."""

    def __init__(self, run: Run, queue: int = 256, batch: int = 32, window: float = 0.002) -> None:
        for name, value in (("queue", queue), ("batch", batch)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.run, self.batch, self.window = run, batch, window
        self.room = Room(queue)
        self.draining = False
        self.running_since: float | None = None  # the batch that the model has now
        self._shares = Shares()
        self._groups: dict[Kind, dict[Client, deque[Waiting]]] = {}
        self._thread = ThreadPoolExecutor(1, "model")

    @property
    def depth(self) -> int:
        """Samples accepted and not yet answered."""
        return self.room.used

    async def start(self) -> None:
        self._changed, self._full = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.create_task(self._work())

    async def drain(self) -> None:
        """Answers what was accepted, then stops."""
        self.refuse()
        self._changed.set()
        await self._loop
        self._thread.shutdown()

    def refuse(self) -> None:
        """Takes nothing new from here on; safe to call from a signal handler."""
        self.draining = True

    @contextmanager
    def admitted(self, count: int, client: Client = LOCAL) -> Iterator[None]:
        """Room for so many samples, before any work is spent on them."""
        if self.draining:
            raise Draining
        if not self.room.take(client, count):
            raise Full(client)
        try:
            yield
        finally:
            self.room.give(client, count)
            self._changed.set()

    async def ask(self, samples: Sequence[Tensor], budget: Budget | None, client: Client = LOCAL) -> list[Answer]:
        """The answers of samples of one shape that were admitted."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        waiting = [Waiting(sample, now, loop.create_future()) for sample in samples]
        group = self._groups.setdefault((budget, samples[0].shape), {})
        group.setdefault(client, deque()).extend(waiting)
        self._changed.set()
        if _size(group) >= self.batch:
            self._full.set()
        return await asyncio.gather(*(each.answer for each in waiting))

    async def alone(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs something else in the model's thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _work(self) -> None:
        while True:
            if self._groups:
                await self._company()
                await self._run_batch(*self._next())
            elif self.draining and self.depth == 0:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _company(self) -> None:
        """Waits until the oldest has waited long enough, or a batch is full."""
        self._full.clear()
        if any(_size(group) >= self.batch for group in self._groups.values()):
            return
        oldest = min(queue[0].since for group in self._groups.values() for queue in group.values())
        left = oldest + self.window - time.monotonic()
        if left > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), left)

    def _next(self) -> tuple[Budget | None, list[Waiting]]:
        kind = min(self._groups, key=lambda each: self._order(self._groups[each]))
        group = self._groups[kind]
        taken: list[Waiting] = []
        while group and len(taken) < self.batch:
            client = min(group, key=lambda each: (self._shares.rank(each), group[each][0].since))
            taken.append(group[client].popleft())
            self._shares.charge(client)
            if not group[client]:
                del group[client]
        if not group:
            del self._groups[kind]
        return kind[0], [each for each in taken if not each.answer.done()]  # done: its client has gone

    def _order(self, group: dict[Client, deque[Waiting]]) -> tuple[tuple[float, float], float]:
        return min((self._shares.rank(client), queue[0].since) for client, queue in group.items())

    async def _run_batch(self, budget: Budget | None, waiting: list[Waiting]) -> None:
        if not waiting:
            return
        self.running_since = time.monotonic()
        try:
            answers = await self.alone(self.run, [each.sample for each in waiting], budget)
        except Exception as error:  # whatever the model raises is for those who asked; the others go on
            for each in waiting:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        finally:
            self.running_since = None
        for each, answer in zip(waiting, answers, strict=True):
            if not each.answer.done():
                each.answer.set_result(answer)


def _size(group: dict[Client, deque[Waiting]]) -> int:
    return sum(len(queue) for queue in group.values())
