"""Latency and answers of normal clients of a server while hostile clients attack it.

    python benchmarks/serve_hostile.py results/serve_hostile.jsonl

A server of the packaged digits model; good clients at 127.0.0.1 that ask one image at a time and pause before the
next; and, kind after kind and then all together, 200 hostile connections of each kind from addresses of its own
(127.0.1.x, 127.0.2.x, …), in another process. What the server closes is opened again at once.

Each kind is followed by its control: good clients beside a process that is as busy as the hostile clients were and
talks to nobody, since on few cores their own work delays everyone. Both stand between two quiet measurements. Figures
are medians over rounds; a row has its p99 over that of all quiet measurements (`ratio`) and over that of its control
(`over_control`). Takes six minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from hostile_clients import KINDS
from record import add_rows, parser_of, settings_of
from serve import bodies, load, middle, serving

from adatape.serve.served import PACKAGED

QUIET, TOGETHER, AFTERWARDS, CONTROL = "quiet", "all together", "afterwards", "control: "
SETTLED = 1.5  # seconds of an attack before the good clients are measured


@contextmanager
def attacked(kinds: str, port: int, connections: int, addresses: int, told: dict[str, Any]) -> Iterator[None]:
    script = Path(__file__).with_name("hostile_clients.py")
    command = [sys.executable, str(script), kinds, str(port), str(connections), str(addresses)]
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=200, help="hostile ones of each kind")
    parser.add_argument("--addresses", type=int, default=4, help="of each kind")
    parser.add_argument("--threads", type=int, default=1, help="of the server's model")
    chosen = parser.parse_args(given)
    forms, found = bodies(PACKAGED["digits"], {}), defaultdict(list)
    cases = {kind: kind for kind in chosen.kinds.split(",")}
    if len(cases) > 1:
        cases[TOGETHER] = chosen.kinds
    with serving(PACKAGED["digits"], chosen.threads) as address:
        port = int(address.rpartition(":")[2])

        def measure(name: str, hostile: str = "") -> dict[str, Any]:
            told: dict[str, Any] = {}
            with ExitStack() as stack:
                if hostile:
                    attacking = attacked(hostile, port, chosen.connections, chosen.addresses, told)
                    stack.enter_context(attacking)
                    time.sleep(SETTLED)
                row = asyncio.run(load(address, forms, chosen.clients, chosen.seconds, chosen.pause))
                row["ready"] = ready(address)
            found[name].append({**row, "hostile": told})
            return told

        for _ in range(chosen.rounds):
            for name, hostile in cases.items():
                measure(QUIET)
                cores = measure(name, hostile).get("cores", 0.0)
                if name == TOGETHER:
                    measure(AFTERWARDS)
                measure(CONTROL + name, f"busy={min(cores, 1.0)}")
    settings = settings_of(chosen)
    rows = [{"case": name, **row, "settings": settings} for name, row in compared(found).items()]
    for row in rows:
        print_row(row)
    add_rows(chosen.out, rows, "cpu", cores=os.cpu_count(), load_average=os.getloadavg())


def compared(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians over rounds, each with its p99 over the quiet one and over that of its control."""
    rows = {name: middle(rounds) for name, rounds in found.items()}
    for name, row in rows.items():
        row["ratio"] = row["p99_ms"] / rows[QUIET]["p99_ms"]
        row["ready"] = sorted({each["ready"] for each in row["rounds"]})
        if control := rows.get(CONTROL + name):
            row["over_control"] = row["p99_ms"] / control["p99_ms"]
    return rows


def print_row(row: dict[str, Any]) -> None:
    over = f"×{row['over_control']:5.2f} control" if "over_control" in row else " " * 14
    each = " ".join(f"{one['p99_ms']:.0f}" for one in row["rounds"])
    told = sum((Counter(one["statuses"]) for one in row["rounds"]), Counter())
    print(
        f"{row['case']:36} p50 {row['p50_ms']:6.1f} ms  p99 {row['p99_ms']:7.1f} ms  ×{row['ratio']:5.2f} quiet  "
        f"{over}  ({each})  {dict(told)}  {', '.join(row['ready'])}"
    )


if __name__ == "__main__":
    main()
