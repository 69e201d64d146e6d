"""Runs grids of parity experiments, several processes at a time, and writes one JSON row per run.

    python benchmarks/parity.py results/x.json --jobs 2 "--length 16,32 --seed 0,1,2" "--length 16 --system order"

Each quoted argument is one grid: options of `adatape train parity`, comma-separated values multiplied out. `--also`
evaluates each trained model at other lengths. A run that is not done after `--minutes` is stopped and says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ADATAPE = [sys.executable, "-m", "adatape.cli"]


def runs_of(grid: str) -> list[list[str]]:
    words = shlex.split(grid)
    names, values = words[::2], [word.split(",") for word in words[1::2]]
    return [list(itertools.chain(*zip(names, row, strict=True))) for row in itertools.product(*values)]


def carry_out(options: list[str], folder: Path, device: str, also: list[str], deadline: float) -> dict[str, Any]:
    row: dict[str, Any] = {"options": " ".join(options)}
    if time.time() > deadline:
        return {**row, "unfinished": "not started: the time was up"}
    command = [*ADATAPE, "train", "parity", *options, "--out", str(folder), "--device", device]
    try:
        ask(command, limit=deadline + 5 - time.time())
    except subprocess.TimeoutExpired:
        return {**row, "unfinished": "stopped: the time was up", "curve": curve_of(folder)}
    except subprocess.CalledProcessError as error:
        return {**row, "unfinished": error.stderr.strip().splitlines()[-1]}
    return {
        **row,
        "result": json.loads((folder / "result.json").read_text()),
        "curve": curve_of(folder),
        "elsewhere": [evaluate(folder, length, device) for length in also],
        "environment": json.loads((folder / "env.json").read_text()),
    }


def evaluate(folder: Path, length: str, device: str) -> list[Any]:
    said = ask([*ADATAPE, "eval", str(folder), "--length", length, "--device", device, "--json"])
    return [int(length), json.loads(said.splitlines()[-1])["accuracy"]]


def ask(command: list[str], limit: float | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=limit)
    return done.stdout


def curve_of(folder: Path) -> list[list[float]]:
    """[step, validation accuracy] pairs, as far as the run got."""
    path = folder / "metrics.jsonl"
    points = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [[point["step"], round(point["accuracy"], 4)] for point in points]


def describe(row: dict[str, Any]) -> str:
    if "result" not in row:
        return f"{row['unfinished']} {row.get('curve', [])[-1:]}"
    result = row["result"]
    return f"{result['accuracy']:.4f}  step {result['steps']}  {result['seconds']:.0f} s  {row['elsewhere'] or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("grids", nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--also", default="", help="comma-separated lengths")
    chosen = parser.parse_args()
    also = [length for length in chosen.also.split(",") if length]
    deadline = time.time() + 60 * chosen.minutes
    runs = [options for grid in chosen.grids for options in runs_of(grid)]
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    done = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        arguments = ((options, Path(folder) / str(n), chosen.device, also, deadline) for n, options in enumerate(runs))
        for row in pool.map(lambda each: carry_out(*each), arguments):
            done.append(row)
            print(f"{row['options']:60s} {describe(row)}", flush=True)
            chosen.out.write_text("[\n" + ",\n".join(json.dumps(each) for each in done) + "\n]\n")


if __name__ == "__main__":
    main()
