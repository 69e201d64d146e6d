"""Decoding, paid for by pixels: small images at once, large ones one after another, each client in its turn."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image
from starlette.exceptions import HTTPException

from adatape.serve.fair import Client, Turns
from adatape.serve.pictures import Picture, open_upload, picture
from adatape.serve.uploads import File

SMALL = 1_000_000  # pixels that are decoded as soon as the header is read
SMALL_THREADS = max(2, (os.cpu_count() or 1) // 2)  # no network has more than half of them
LARGE_THREADS = max(1, (os.cpu_count() or 1) // 4)
NICE = 10  # of threads that decode large images: the model and the event loop come first

Gone = Callable[[], Awaitable[bool]]  # whether nobody waits for the answer any more


class Lane:
    """Threads that are shared among clients by cost."""

    def __init__(self, threads: int, name: str, nice: int = 0) -> None:
        self._turns, self._threads = Turns(threads), ThreadPoolExecutor(threads, name, _set_nice, (nice,))

    async def run(
        self, client: Client, cost: float, function: Callable[..., Any], *arguments: Any, gone: Gone | None = None
    ) -> Any:
        async with self._turns.turn(client, cost):
            if gone is not None and await gone():
                raise HTTPException(400, "the client has gone")
            work = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # a thread cannot be stopped, and its turn lasts as long as it does
                raise

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class Decoders:
    """From files to what the model sees; what the headers announce is added up before a large image is touched."""

    def __init__(self, channels: int, size: int | tuple[int, int], exif_orientation: bool, most_pixels: int) -> None:
        self.channels, self.size, self.exif_orientation = channels, size, exif_orientation
        self.most_pixels = most_pixels
        self._small, self._large = Lane(SMALL_THREADS, "decode"), Lane(LARGE_THREADS, "decode large", NICE)

    async def pictures(self, files: Sequence[File], client: Client, gone: Gone) -> list[Picture]:
        found: list[Picture | Image.Image] = []
        while len(found) < len(files):
            found += await self._small.run(client, 1, self._first, files[len(found) :], _pixels(found))
        return [await self._finished(file, each, client, gone) for file, each in zip(files, found, strict=True)]

    async def aside(self, client: Client, function: Callable[..., Any], *arguments: Any) -> Any:
        """Short work on pictures, in the client's turn."""
        return await self._small.run(client, 1, function, *arguments)

    async def _finished(self, file: File, found: Picture | Image.Image, client: Client, gone: Gone) -> Picture:
        if isinstance(found, Picture):
            return found
        done: Picture = await self._large.run(client, _pixels([found]), self._decoded, found, file.name, gone=gone)
        return done

    def _first(self, files: Sequence[File], before: int) -> list[Picture | Image.Image]:
        """The first files, as many as make up a short piece of work: decoded if small, else only opened."""
        found: list[Picture | Image.Image] = []
        decoded = 0
        for file in files:
            opened = open_upload(file.content, file.name)
            pixels = _pixels([opened])
            together = before + _pixels(found) + pixels
            if together > self.most_pixels:
                most = f"at most {self.most_pixels:,} are decoded for a request"
                raise HTTPException(422, f"the images have {together:,} pixels or more together; {most}")
            small = pixels <= SMALL
            found.append(self._decoded(opened, file.name) if small else opened)
            decoded += pixels if small else 0
            if decoded > SMALL:
                break
        return found

    def _decoded(self, opened: Image.Image, name: str) -> Picture:
        return picture(opened, name, self.channels, self.size, self.exif_orientation)

    def close(self) -> None:
        self._small.close()
        self._large.close()


def _pixels(found: Sequence[Picture | Image.Image]) -> int:
    return sum(each.width * each.height for each in found)


def _set_nice(nice: int) -> None:
    """Of this thread alone, as Linux has it; elsewhere all are alike."""
    if nice and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
