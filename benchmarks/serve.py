"""Requests per second and latency of the server with AdaTape and with a plain ViT.

    adatape train digits --out /tmp/digits
    adatape train digits --system plainvit --epochs 5 --out /tmp/plain
    python benchmarks/serve.py results/serve.jsonl --adatape /tmp/digits --plain /tmp/plain

Each server is a separate process. Clients send one image at a time, the next after the answer, from one httpx process,
which uses a whole core; on two cores it is often the bottleneck. Servers alternate within each round, and a figure is
the median over rounds. `mixed` draws a budget for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import ssl
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fastapi
import httpx
import uvicorn
from record import Row, add_rows, parser_of, settings_of

from adatape.data.images import open_images
from adatape.data_config import Images
from adatape.train.folder import load_config

WARM_UP, DIFFERENT = 0.5, 64
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # shared, since creating one takes longer than many requests


class Load(NamedTuple):
    """A kind of request to one of the servers."""

    name: str
    server: str
    budgets: list[dict[str, str]]


LOADS = [
    Load("plain", "plain", [{}]),
    Load("adatape, steps 0", "adatape", [{"steps": "0"}]),
    Load("adatape, steps 1", "adatape", [{"steps": "1"}]),
    Load("adatape", "adatape", [{}]),
    Load("adatape, mixed", "adatape", [{"steps": str(steps)} for steps in (0, 1, 2, 4)]),
]


@contextmanager
def serving(folder: Path, threads: int) -> Iterator[str]:
    """Runs a server in another process; yields its address."""
    quiet = {**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}
    command = [sys.executable, "-u", "-m", "adatape", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="")
                if found := re.search(r"listening on (\S+)", line):
                    yield found[1]
                    break
            else:
                raise OSError(f"the server of {folder} did not start")
        finally:
            process.terminate()
            process.wait(30)


def bodies(folder: Path, budget: dict[str, str]) -> list[tuple[bytes, dict[str, str]]]:
    """Encoded forms with test images."""
    data = load_config(folder / "config.json").data
    assert isinstance(data, Images)
    images = open_images(data, "test")
    requests = [
        httpx.Request("POST", "http://x", files={"image": ("i.png", images.file(i)[1])}, data=budget)
        for i in range(min(DIFFERENT, len(images)))
    ]
    return [(request.read(), {"content-type": request.headers["content-type"]}) for request in requests]


async def keep_asking(
    client: httpx.AsyncClient,
    forms: list[Any],
    draws: random.Random,
    end: float,
    taken: list[tuple[int, float]],
    pause: float,
) -> None:
    while (began := time.perf_counter()) < end:
        content, headers = draws.choice(forms)
        try:
            status = (await client.post("/v1/classify", content=content, headers=headers)).status_code
        except httpx.HTTPError:
            status = 0
        taken.append((status, time.perf_counter() - began))
        if pause:
            await asyncio.sleep(pause * 2 * draws.random())


async def load(address: str, forms: list[Any], clients: int, seconds: float, pause: float = 0) -> dict[str, Any]:
    """A closed loop of `clients`, each with one open request; `pause` is the mean time between requests in seconds."""
    async with AsyncExitStack() as stack:
        # One client object each, since a shared pool is searched for every request.
        own = [httpx.AsyncClient(base_url=address, timeout=30, verify=NO_TLS) for _ in range(clients)]
        for client in own:
            await stack.enter_async_context(client)
        for length in (WARM_UP, seconds):
            taken: list[tuple[int, float]] = []
            began = time.perf_counter()
            asking = (
                keep_asking(each, forms, random.Random(n), began + length, taken, pause) for n, each in enumerate(own)
            )
            await asyncio.gather(*asking)
            took = time.perf_counter() - began
    statuses = Counter(str(status) for status, _ in taken)
    times = sorted(took for status, took in taken if status == 200)
    return {
        "requests_per_second": len(times) / took,
        "p50_ms": 1000 * quantile(times, 0.5),
        "p99_ms": 1000 * quantile(times, 0.99),
        "errors": len(taken) - len(times),
        "statuses": dict(statuses),
    }


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    figures = ("requests_per_second", "p50_ms", "p99_ms")
    medians = {name: statistics.median(each[name] for each in rounds) for name in figures}
    return {**medians, "errors": sum(each["errors"] for each in rounds), "rounds": rounds}


def measure(chosen: argparse.Namespace) -> list[Row]:
    folders = {"adatape": chosen.adatape, "plain": chosen.plain}
    counts = [int(count) for count in chosen.clients.split(",")]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {(each.name, n): [] for each in LOADS for n in counts}
    with ExitStack() as stack:
        places = {name: stack.enter_context(serving(folder, chosen.threads)) for name, folder in folders.items()}
        forms = {
            each.name: [form for budget in each.budgets for form in bodies(folders[each.server], budget)]
            for each in LOADS
        }
        for _ in range(chosen.rounds):
            for each in LOADS:
                for n in counts:
                    row = asyncio.run(load(places[each.server], forms[each.name], n, chosen.seconds))
                    found[each.name, n].append(row)
        models = {name: httpx.get(f"{address}/v1/model").json() for name, address in places.items()}
    told = {name: {key: model[key] for key in ("name", "parameters", "accuracy", "latency_ms")}
            for name, model in models.items()}  # fmt: skip
    more = {"models": told, "settings": settings_of(chosen)}
    return [
        {"case": f"{name}, clients {n}", "load": name, "clients": n, **middle(rounds), **more}
        for (name, n), rounds in found.items()
    ]


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--adatape", type=Path, required=True, help="run folder")
    parser.add_argument("--plain", type=Path, required=True, help="run folder")
    parser.add_argument("--clients", default="1,16,64")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the server's model")
    chosen = parser.parse_args(given)
    rows = measure(chosen)
    versions = {"fastapi": fastapi.__version__, "uvicorn": uvicorn.__version__, "httpx": httpx.__version__}
    add_rows(chosen.out, rows, "cpu", cores=os.cpu_count(), load_average=os.getloadavg(), **versions)
    for row in rows:
        print(
            f"{row['load']:18} {row['clients']:3} clients  {row['requests_per_second']:7.1f}/s  "
            f"p50 {row['p50_ms']:6.1f} ms  p99 {row['p99_ms']:6.1f} ms  errors {row['errors']}"
        )


if __name__ == "__main__":
    main()
