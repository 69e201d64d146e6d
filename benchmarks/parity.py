"""Runs a grid of parity experiments, several processes at a time, and tabulates them.

    python benchmarks/parity.py results/parity.json --jobs 6 -- "--length 16,32 --seed 0,1,2" "--system transformer …"

Each quoted argument is one grid: options of `adatape train parity`, comma-separated values multiplied out.
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


def runs_of(grid: str) -> list[list[str]]:
    words = shlex.split(grid)
    names, values = words[::2], [word.split(",") for word in words[1::2]]
    return [list(itertools.chain(*zip(names, row, strict=True))) for row in itertools.product(*values)]


def carry_out(options: list[str], folder: Path, device: str, deadline: float, also: list[str]) -> dict:
    if time.time() > deadline:
        return {"options": " ".join(options), "error": "not started: the time was up"}
    command = [sys.executable, "-m", "adatape.cli", "train", "parity", *options, "--out", str(folder), "--device", device]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        limit = deadline + 5 - time.time()
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=limit)
    except subprocess.TimeoutExpired:
        last = (folder / "metrics.jsonl").read_text().splitlines()[-1:] if (folder / "metrics.jsonl").exists() else []
        return {"options": " ".join(options), "error": "stopped: the time was up", "last": [json.loads(x) for x in last]}
    except subprocess.CalledProcessError as error:
        return {"options": " ".join(options), "error": error.stderr.strip().splitlines()[-1:]}
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "options": " ".join(options),
        "result": json.loads((folder / "result.json").read_text()),
        "curve": [[point["step"], round(point["accuracy"], 4)] for point in curve],
        "environment": json.loads((folder / "env.json").read_text()),
        "elsewhere": [evaluate(folder, length, device) for length in also],
    }


def evaluate(folder: Path, length: str, device: str) -> list:
    command = [sys.executable, "-m", "adatape.cli", "eval", str(folder), "--length", length, "--device", device, "--json"]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(length), json.loads(asked.stdout.splitlines()[-1])["accuracy"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("grids", nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--also", default="", help="lengths at which each trained model is evaluated, too")
    chosen = parser.parse_args()
    also = [length for length in chosen.also.split(",") if length]
    runs = [options for grid in chosen.grids for options in runs_of(grid)]
    deadline = time.time() + 60 * chosen.minutes
    done = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        started = [
            pool.submit(carry_out, options, Path(folder) / str(n), chosen.device, deadline, also)
            for n, options in enumerate(runs)
        ]
        for future in started:
            row = future.result()
            done.append(row)
            result = row.get("result")
            shown = row.get("error") if result is None else f"{result['accuracy']:.4f}  step {result['steps']}  {result['seconds']:.0f} s"
            shown = f"{shown} {row.get('last', [{}])[-1:] and [(x.get('step'), x.get('accuracy')) for x in row.get('last', [])]} {row.get('elsewhere', '')}"
            print(f"{row['options']:60s} {shown}", flush=True)
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in done) + "\n]\n")


if __name__ == "__main__":
    main()
