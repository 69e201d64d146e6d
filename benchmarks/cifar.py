"""Runs a list of CIFAR experiments one after the other in one process, and writes one JSON row per run.

    python benchmarks/cifar.py results/x.json --data data/cifar10 "plainvit seed=0" "adatape patch=8 bank_patch=4"

Each quoted argument is a run: the system, keywords of the recipe, and dotted fields, as in data.augment.mixup=0.5.
Rows are written as they come; a run that would begin after `--minutes` is left out and said so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from adatape.recipes import RECIPES
from adatape.train.folder import environment
from adatape.train.journal import lines_of
from adatape.train.run import run
from adatape.train.stop import Stopped
from adatape.train.sweep import experiment_of

FIGURES = ("accuracy", "loss", "length_mean", "length_var", "gflops_mean", "seconds")


def carry_out(text: str, recipe: str, data: str, device: str) -> dict[str, Any]:
    experiment = experiment_of(RECIPES[recipe], text, path=data)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "run"
        try:
            row = {"result": run(experiment, out, device, lambda _: None)}
        except Stopped as stopped:  # by a time limit, say: what it had learnt by then still counts
            row = {"unfinished": str(stopped)}
        scored = [line for line in lines_of(out / "metrics.jsonl") if line["kind"] == "validation"]
    return {"run": text, "recipe": recipe, **row, "curve": [[line["epoch"], line["accuracy"]] for line in scored]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--data", default="data/cifar10")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=60)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.time()
    for text in arguments.runs:
        if time.time() - began > 60 * arguments.minutes:
            rows.append({"run": text, "unfinished": "not started: the time was up"})
        else:
            rows.append(carry_out(text, arguments.recipe, arguments.data, arguments.device))
            result = rows[-1].get("result")
            said = rows[-1]["unfinished"] if result is None else {name: result[name] for name in FIGURES}
            print(text, json.dumps(said), flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        table = {"environment": environment(arguments.device), "rows": rows}
        arguments.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
