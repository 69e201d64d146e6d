"""Latency and answers of normal clients of a server while hostile clients attack it.

    python benchmarks/serve_hostile.py results/serve_hostile.jsonl

The server has the packaged digits model. Normal clients at 127.0.0.1 send one image at a time, the next after the
answer. Another process opens 200 hostile connections of each kind, first one kind at a time, then all together, each
kind from its own addresses (127.0.1.x, 127.0.2.x, …); closed connections are reopened at once. The ratio is the normal
clients' p99 over the median p99 of the quiet rounds before and between. Takes under two minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from hostile_clients import KINDS
from record import add_rows, parser_of, settings_of
from serve import bodies, load, serving

from adatape.serve.served import PACKAGED

SETTLED = 1.5  # seconds of an attack before the good clients are measured


@contextmanager
def attacked(kinds: list[str], port: int, connections: int, addresses: int, told: dict[str, Any]) -> Iterator[None]:
    script = Path(__file__).with_name("hostile_clients.py")
    command = [sys.executable, str(script), ",".join(kinds), str(port), str(connections), str(addresses)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # wait until it has connected
            yield
        finally:
            process.terminate()
            lines = process.stdout.read().split("\n")
            with suppress(ValueError, IndexError):
                told.update(json.loads(lines[-2]))


def ready(address: str) -> str:
    try:
        return httpx.get(f"{address}/readyz", timeout=5).json()["status"]
    except httpx.HTTPError as error:
        return type(error).__name__


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    parser.add_argument("--clients", type=int, default=8, help="good ones")
    parser.add_argument("--pause", type=float, default=0.1, help="mean seconds between an answer and the next request")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--connections", type=int, default=200, help="hostile ones of each kind")
    parser.add_argument("--addresses", type=int, default=4, help="of each kind")
    parser.add_argument("--threads", type=int, default=1, help="of the server's model")
    chosen = parser.parse_args(given)
    kinds, forms = chosen.kinds.split(","), bodies(PACKAGED, {})
    rows: dict[str, dict[str, Any]] = {}
    with serving(PACKAGED, chosen.threads) as address:
        port = int(address.rpartition(":")[2])

        def measure(name: str, hostile: list[str]) -> None:
            told: dict[str, Any] = {}
            with ExitStack() as stack:
                if hostile:
                    attacking = attacked(hostile, port, chosen.connections, chosen.addresses, told)
                    stack.enter_context(attacking)
                    time.sleep(SETTLED)
                row = asyncio.run(load(address, forms, chosen.clients, chosen.seconds, chosen.pause))
                row["ready"] = ready(address)
            rows[name] = {**row, "hostile": told}

        measure("quiet 1", [])
        for number, kind in enumerate(kinds):
            measure(kind, [kind])
            if number % 3 == 2:  # repeated, since the machine's load varies
                measure(f"quiet {number // 3 + 2}", [])
        if len(kinds) > 1:
            measure("all together", kinds)
            measure("afterwards", [])
    quiet = statistics.median(row["p99_ms"] for name, row in rows.items() if name.startswith("quiet"))
    for name, row in rows.items():
        row["ratio"] = row["p99_ms"] / quiet
        print_row(name, row)
    settings = settings_of(chosen)
    found = [{"case": name, **row, "settings": settings} for name, row in rows.items()]
    add_rows(chosen.out, found, "cpu", cores=os.cpu_count(), load_average=os.getloadavg())


def print_row(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name:28} {row['requests_per_second']:7.1f}/s  p50 {row['p50_ms']:6.1f} ms  p99 {row['p99_ms']:7.1f} ms  "
        f"×{row['ratio']:5.2f}  {row['statuses']}  {row['ready']}  {row['hostile'] or ''}"
    )


if __name__ == "__main__":
    main()
