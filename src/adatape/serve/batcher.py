"""Requests of one budget run together, oldest first, in one thread: no short reading ever waits inside a long one."""

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

from adatape.serve.budgets import Setting
from adatape.serve.engine import Answer

Kind = tuple[Setting, torch.Size]  # what may share a batch
Run = Callable[[Sequence[Tensor], Setting], list[Answer]]


class Full(Exception):  # noqa: N818
    """More samples are waiting than the queue takes."""


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
        self.run, self.queue, self.batch, self.window = run, queue, batch, window
        self.depth = 0  # samples accepted and not yet answered
        self.draining = False
        self._groups: dict[Kind, deque[Waiting]] = {}
        self._thread = ThreadPoolExecutor(1, "model")

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
    def admitted(self, count: int) -> Iterator[None]:
        """Room for so many samples, before any work is spent on them."""
        if self.draining:
            raise Draining
        if self.depth + count > self.queue:
            raise Full
        self.depth += count
        try:
            yield
        finally:
            self.depth -= count
            self._changed.set()

    async def ask(self, samples: Sequence[Tensor], setting: Setting) -> list[Answer]:
        """The answers of samples of one shape that were admitted."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        waiting = [Waiting(sample, now, loop.create_future()) for sample in samples]
        group = self._groups.setdefault((setting, samples[0].shape), deque())
        group.extend(waiting)
        self._changed.set()
        if len(group) >= self.batch:
            self._full.set()
        return await asyncio.gather(*(each.answer for each in waiting))

    async def alone(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs something else in the model's thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _work(self) -> None:
        while True:
            if self._groups:
                await self._company()
                await self._run_batch(*self._oldest())
            elif self.draining and self.depth == 0:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _company(self) -> None:
        """Waits until the oldest has waited long enough, or a batch is full."""
        self._full.clear()
        if any(len(group) >= self.batch for group in self._groups.values()):
            return
        left = min(group[0].since for group in self._groups.values()) + self.window - time.monotonic()
        if left > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), left)

    def _oldest(self) -> tuple[Setting, list[Waiting]]:
        kind = min(self._groups, key=lambda each: self._groups[each][0].since)
        group = self._groups[kind]
        taken = [group.popleft() for _ in range(min(self.batch, len(group)))]
        if not group:
            del self._groups[kind]
        return kind[0], [each for each in taken if not each.answer.done()]  # done: its client has gone

    async def _run_batch(self, setting: Setting, waiting: list[Waiting]) -> None:
        if not waiting:
            return
        try:
            answers = await self.alone(self.run, [each.sample for each in waiting], setting)
        except Exception as error:  # whatever the model raises is for those who asked; the others go on
            for each in waiting:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        for each, answer in zip(waiting, answers, strict=True):
            if not each.answer.done():
                each.answer.set_result(answer)
