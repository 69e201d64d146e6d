"""The GPU tables of docs/performance.md: each comparison is compiled in parallel processes, then timed alone.

    python benchmarks/speed_table.py results/speed_defaults.jsonl --only b16-defaults b32-defaults      the first table
    python benchmarks/speed_table.py results/speed.jsonl                       all of it, about half an hour
    python benchmarks/speed_table.py results/speed.jsonl --only b32 large      parts of it, merged into the file

Compiling takes most of the time, so `--jobs` processes fill inductor's cache in parallel; `adatape bench` then uses it.
The file is written after every comparison, so an interrupted call loses at most one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from record import Row, add_rows

from adatape.evaluate.bench import Spec, halts, reference_of, spec_of
from adatape.evaluate.timed_models import TimingSettings, build_timed

OF_ENVIRONMENT = ("hardware", "torch", "commit", "date")  # fields of every row


class Part(NamedTuple):
    """Models that share a reference, and how they are compared."""

    models: tuple[str, ...]
    batches: tuple[int, ...]
    modes: tuple[str, ...] = ("inference", "train")
    extra: tuple[str, ...] = ()


def both(name: str) -> tuple[str, str]:
    return f"{name}:bank=learn", name


B16, LARGE = both("adatape_base_patch16_224"), both("adatape_large_patch16_224")
PLAIN = "plainvit_base_patch16_224"  # a ViT with AdaTape's patch embedding
DEFAULTS = ("--no-full-tape", "--graphs", "off")  # what a user of torch.compile(model) gets: tapes may halt, no graphs
PARTS = {
    "b16-defaults": Part((*B16, PLAIN), (256,), extra=DEFAULTS),
    "b32-defaults": Part(both("adatape_base_patch32_224"), (256,), extra=DEFAULTS),
    "one-defaults": Part((*B16, PLAIN), (1, 8), ("inference",), extra=DEFAULTS),
    "b16": Part((*B16, PLAIN), (256,)),
    "b32": Part(both("adatape_base_patch32_224"), (256,)),
    "large": Part(LARGE, (256,), ("inference",)),
    "large-train": Part(LARGE, (256,), ("train",), ("--graphs", "off")),  # three with CUDA graphs do not fit in memory
    "one": Part((*B16, PLAIN), (1,), ("inference",)),
    "batches": Part(B16, (8, 64)),
    "data": Part(B16, (256,), extra=("--data",)),
    "systems": Part(("u2t_base_patch16_224", "uvit_base_patch16_224"), (256,)),
    "tiny-systems": Part(tuple(f"{name}_tiny_patch16_224" for name in ("ut", "u2t", "uvit", "ponder")), (256,)),
    "small": Part(("avit_small_patch16_224", "plainvit_small_patch16_224"), (256,)),
}


def warm(side: tuple[str, str, int, bool]) -> None:
    """Compiles and calls one side in a separate process, which fills the compile cache."""
    name, mode, batch, full = side
    began = time.time()
    command = [sys.executable, __file__, "--side", name, mode, str(batch), str(int(full))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.strip() or f"exit status {done.returncode}"
    told = f": {said.splitlines()[-1]}" if done.returncode else ""
    print(f"{name} {mode} {batch}: {time.time() - began:.0f} s{told}", flush=True)


def build(name: str, mode: str, batch: str, full: str) -> None:
    spec = spec_of(name)
    how = TimingSettings(mode, int(batch), "cuda", "bf16", "default", full_tape=bool(int(full)))  # type: ignore[arg-type]
    build_timed(spec.name, spec.options, how)


def sides(part: Part) -> list[tuple[str, str, int, bool]]:
    """Models and references as they are built; with full tapes those that may halt."""
    models = {*part.models, *(str(reference_of(spec_of(model), None)) for model in part.models)}
    every = itertools.product(sorted(models), part.modes, part.batches, (False, True))
    return [side for side in every if not side[3] or ("--no-full-tape" not in part.extra and halts(spec_of(side[0])))]


def case_of(row: Row) -> str:
    """The key of a comparison."""
    how = [row["mode"], f"batch {row['batch']}", row["device"]]
    how += ["compiled"] * (row["compile"] != "none") + ["graphs"] * bool(row["graphs"]) + ["data"] * bool(row["data"])
    how += ["may halt"] * (row.get("full_tape") is False)
    return " ".join([str(Spec(row["model"], row["options"])), *how])


def timed(given: Sequence[str]) -> list[Row]:
    """Runs `adatape bench` with these arguments in a separate process; returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "adatape", "bench", *given, "--out", str(out)]
        subprocess.run(command, check=False)
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.is_file() else []
    done = [row for row in rows if row["error"] is None]  # a failure, which was printed, replaces no earlier row
    figures = [{name: value for name, value in row.items() if name not in OF_ENVIRONMENT} for row in done]
    return [{"case": case_of(row), **row} for row in figures]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="a JSONL file; the row of a case replaces an earlier one")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--rounds", default="9")
    parser.add_argument("--seconds", default="0.5")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "adatape-inductor"))
    if arguments.side:
        return build(*arguments.side)
    if not arguments.out:
        parser.error("out is missing; it must be a file for the results")
    chosen = [PARTS[name] for name in arguments.only]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(warm, dict.fromkeys(side for part in chosen for side in sides(part))))
    turns = [(part, mode, batch) for part in chosen for mode in part.modes for batch in part.batches]
    for part, mode, batch in turns:
        how = ["--mode", mode, "--batch", str(batch), "--graphs", "on", *part.extra]
        timing = ["--rounds", arguments.rounds, "--seconds", arguments.seconds]
        add_rows(arguments.out, timed([*part.models, *how, *timing]), "cuda")
    return None


if __name__ == "__main__":
    main()
