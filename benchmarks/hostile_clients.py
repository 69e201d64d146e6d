"""Clients that attack a server on this machine in several ways, until they are stopped.

`serve_hostile.py` imports and starts this; it does not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import httpx
from PIL import Image

Kind = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Counter[str]], Awaitable[None]]
HEAD = "POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=x\r\n"
LARGE = 9_700_000
SLICE = 0.005  # seconds of work and rest of what is only busy
PART = b'--x\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n'


async def slow_headers(_: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Counter[str]) -> None:
    writer.write(b"GET /v1/model HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
    while True:
        await asyncio.sleep(0.1)
        writer.write(b"a")
        await writer.drain()
        told["byte"] += 1


async def slow_bodies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Counter[str]) -> None:
    writer.write(f"{HEAD}content-length: {LARGE}\r\n\r\n".encode() + PART)
    answered = asyncio.create_task(status_of(reader))
    answered.add_done_callback(lambda done: done.cancelled() or done.exception())
    while not answered.done():
        await asyncio.sleep(0.1)
        writer.write(b"a" * 100)
        await writer.drain()
    told[await answered] += 1


async def unfinished_bodies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Counter[str]) -> None:
    writer.write(f"{HEAD}content-length: {LARGE}\r\n\r\n".encode())
    answered = asyncio.create_task(status_of(reader))
    answered.add_done_callback(lambda done: done.cancelled() or done.exception())  # which drain may raise first
    part = PART.ljust(1 << 16, b"a")
    for _ in range(LARGE // len(part)):
        if answered.done():
            break
        writer.write(part)
        await writer.drain()
    told[await answered] += 1


async def large_images(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Counter[str]) -> None:
    await keep_posting(reader, writer, told, form([LARGE_PNG] * 32))


async def two_large_images(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Counter[str]) -> None:
    await keep_posting(reader, writer, told, form([LARGE_PNG] * 2))


async def small_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Counter[str]) -> None:
    await keep_posting(reader, writer, told, form([SMALL_PNG]))


async def never_reading(_: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Counter[str]) -> None:
    assert isinstance(writer.transport, asyncio.Transport)
    writer.transport.pause_reading()
    while True:
        writer.write(b"GET /v1/examples?count=100 HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10)
        told["asked"] += 10
        await writer.drain()
        await asyncio.sleep(0.05)


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter, told: Counter[str]) -> None:
    await reader.read()
    told["closed"] += 1


KINDS: dict[str, Kind] = {
    "slow headers": slow_headers,
    "slow bodies": slow_bodies,
    "unfinished bodies": unfinished_bodies,
    "32 images of 40 megapixels": large_images,
    "2 images of 40 megapixels": two_large_images,
    "small valid requests": small_requests,
    "never reading": never_reading,
    "silent": silent,
}


def png(size: int) -> bytes:
    content = io.BytesIO()
    Image.new("1", (size, size)).save(content, "PNG")
    return content.getvalue()


LARGE_PNG, SMALL_PNG = png(6320), png(8)


def form(images: list[bytes]) -> bytes:
    request = httpx.Request("POST", "http://x", files=[("image", ("a.png", each)) for each in images])
    content, kind = request.read(), request.headers["content-type"]
    head = f"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}"
    return f"{head}\r\n\r\n".encode() + content


async def keep_posting(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: Counter[str], request: bytes
) -> None:
    while True:
        writer.write(request)
        await writer.drain()
        told[await status_of(reader)] += 1


async def status_of(reader: asyncio.StreamReader) -> str:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), b"0")
    await reader.readexactly(int(length))
    return head[9:12].decode()


async def attack(kinds: list[str], port: int, connections: int, addresses: int) -> None:
    """Attacks until the process is ended; prints counts of the answers twice a second."""
    told: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}

    async def keep_at_it(kind: str, number: int) -> None:
        source = (f"127.0.{1 + list(KINDS).index(kind)}.{1 + number % addresses}", 0)
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source)
                told[kind]["connected"] += 1
                await KINDS[kind](reader, writer, told[kind])
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                told[kind]["cut off"] += 1
            finally:
                if writer is not None:
                    writer.transport.abort()

    working = [asyncio.create_task(keep_at_it(kind, number)) for number in range(connections) for kind in kinds]
    began, spent = time.perf_counter(), time.process_time()
    while working:
        await asyncio.sleep(0.5)
        cores = (time.process_time() - spent) / (time.perf_counter() - began)
        print(json.dumps({"told": told, "cores": cores}), flush=True)


async def only_busy(cores: float) -> None:
    """As much work as hostile clients have, and no word to the server."""
    print(flush=True)
    while True:
        until = time.thread_time() + cores * SLICE
        while time.thread_time() < until:
            pass
        await asyncio.sleep((1 - cores) * SLICE)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", help=f"with commas between: {', '.join(KINDS)}; or busy=CORES, which talks to nobody")
    parser.add_argument("port", type=int, help="of 127.0.0.1")
    parser.add_argument("connections", type=int, help="of each kind")
    parser.add_argument("addresses", type=int, help="of each kind")
    chosen = parser.parse_args(given)
    if chosen.kinds.startswith("busy="):
        asyncio.run(only_busy(float(chosen.kinds.removeprefix("busy="))))
    asyncio.run(attack(chosen.kinds.split(","), chosen.port, chosen.connections, chosen.addresses))


if __name__ == "__main__":
    main()
