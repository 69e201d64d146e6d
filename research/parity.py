"""Runs grids of parity experiments in several processes; each run becomes a row of a study.

    python research/parity.py results/parity.jsonl "--length 16,32 --seed 0,1,2" "--length 16 --system order" --jobs 2
    python research/parity.py results/parity_figure.jsonl "--length 16 --system ut --seed 0,1,2" --together 3
    python research/parity.py results/parity_small_long.jsonl "--length 16 --steps 10000 --seed 0,1,2" --small
    python research/parity.py --margins            accuracy of a small AdaTape, trained at N = 16, on longer sequences

Each quoted argument is one grid: the product of comma-separated options of `adatape train parity`, with `--small` of
`adatape train parity-small`. `--also` evaluates each trained model at other lengths. A run that is not done after
`--minutes` is stopped and marked. Runs that the file has a result of are left out, and those that were stopped go on in
their folders, if the same command is given again.

With `--together` so many runs at a time are branches of one CUDA graph (`fleet.py`) and take all their steps, also
where they would stop early alone; SIGTERM stops them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fleet import fleets, run_together
from rows import Row, add_rows, read_rows

from adatape.config import Experiment
from adatape.data.parity import held_out_set
from adatape.evaluate.device import pick_device
from adatape.models.adatape import AdaTape
from adatape.recipes import parity, parity_small
from adatape.train.logger import METRICS, read_metrics
from adatape.train.stop import Stopped
from adatape.train.sweep import with_fields
from adatape.train.trainer import Trainer
from adatape.validation import value_of

ADATAPE = [sys.executable, "-m", "adatape"]
RUNS = Path("runs")
GRACE = 5  # seconds that a run has beyond the time


def runs_of(grid: str) -> list[list[str]]:
    words = shlex.split(grid)
    names, values = words[::2], [word.split(",") for word in words[1::2]]
    return [list(itertools.chain(*zip(names, row, strict=True))) for row in itertools.product(*values)]


def left_of(arguments: argparse.Namespace) -> list[list[str]]:
    """The runs of all grids that the file has no result of."""
    done = {row["run"] for row in read_rows(arguments.out) if "result" in row}
    every = [options for grid in arguments.grids for options in runs_of(grid)]
    return [options for options in every if " ".join(options) not in done]


def folder_of(folder: Path, options: list[str]) -> Path:
    return folder / " ".join(options).replace("--", "").replace(" ", "-")


def train(recipe: list[str], options: list[str], folder: Path, device: str, also: list[str], deadline: float) -> Row:
    text = " ".join(options)
    row: Row = {"run": text, "options": text}
    if time.time() > deadline:
        return {**row, "unfinished": "not started: the time was up", "curve": curve_of(folder)}
    command = [*ADATAPE, "train", *recipe, *options, "--out", str(folder), "--resume", "--device", device]
    try:
        ask(command, limit=deadline + GRACE - time.time())
    except subprocess.TimeoutExpired:
        return {**row, "unfinished": "stopped: the time was up", "curve": curve_of(folder)}
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip() or str(error)
        return {**row, "unfinished": why.splitlines()[-1], "curve": curve_of(folder)}
    return finished(row, folder, also, device)


def finished(row: Row, folder: Path, also: list[str], device: str) -> Row:
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
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            said, complaint = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # a run saves a checkpoint, from which it can go on
            process.communicate()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, said, complaint)
    return said


def curve_of(folder: Path) -> list[list[float]]:
    """[step, validation accuracy] pairs up to the last step of the run."""
    scored = [line for line in read_metrics(folder / METRICS).lines if line["kind"] == "validation"]
    return [[line["step"], round(line["accuracy"], 4)] for line in scored]


def describe(row: Row) -> str:
    if "result" not in row:
        return f"{row['unfinished']} {row.get('curve', [])[-1:]}"
    result = row["result"]
    return f"{result['accuracy']:.4f}  step {result['steps']}  {result['seconds']:.0f} s  {row['elsewhere'] or ''}"


def experiment_of(options: list[str], evaluate_every: int | None, small: bool = False) -> Experiment:
    """What `adatape train parity OPTIONS` trains, or `parity-small`, to its last step."""
    named = zip(options[::2], options[1::2], strict=True)
    given = {name.removeprefix("--").replace("-", "_"): value_of(value) for name, value in named}
    every = {} if evaluate_every is None else {"evaluate_every": evaluate_every}
    return with_fields((parity_small if small else parity)(**given), {"stop_at": None, **every})


def work_together(arguments: argparse.Namespace, folder: Path) -> None:
    also = [length for length in arguments.also.split(",") if length]
    runs = left_of(arguments)
    every = [folder_of(folder, options) for options in runs]
    experiments = [experiment_of(options, arguments.evaluate_every, arguments.small) for options in runs]
    device = pick_device(arguments.device)
    for places in fleets(experiments, arguments.together, every):
        names, folders = [" ".join(runs[place]) for place in places], [every[place] for place in places]
        print("\n".join(["together:", *names]), flush=True)
        results = run_together([experiments[place] for place in places], folders, device, show, resume=True)
        for name, at, result in zip(names, folders, results, strict=True):
            row: Row = {"run": name, "options": name}
            failed = {"unfinished": result.get("error"), "curve": curve_of(at)}
            row = row | failed if "error" in result else finished(row, at, also, device)
            add_rows(arguments.out, [row])
            print(f"{name:60s} {describe(row)}", flush=True)


def show(status: Any) -> None:
    if status.score is not None:
        print(f"step {status.step} of {status.steps}, first run {status.score.accuracy:.4f}", flush=True)


def work(arguments: argparse.Namespace, folder: Path) -> None:
    also = [length for length in arguments.also.split(",") if length]
    deadline = time.time() + 60 * arguments.minutes
    with ThreadPoolExecutor(arguments.jobs) as pool:
        recipe = ["parity-small" if arguments.small else "parity"]
        recipe += ["--set", f"evaluate_every={arguments.evaluate_every}"] if arguments.evaluate_every else []
        rest = (arguments.device, also, deadline)
        each = ((recipe, options, folder_of(folder, options), *rest) for options in left_of(arguments))
        for row in pool.map(lambda given: train(*given), each):
            add_rows(arguments.out, [row])
            print(f"{row['options']:60s} {describe(row)}", flush=True)


@torch.no_grad()
def margins(model: AdaTape, trained_at: int, lengths: Sequence[int], count: int = 1000) -> Iterator[str]:
    """Accuracy and mean logit margins of odd and of even sequences; the budget scales with the length."""
    reading = model.eval().reader.reading
    for length in lengths:
        model.bank.size = length
        model.set_budget(reading.steps * length // trained_at, reading.threshold * length / trained_at)
        data = held_out_set(length, count)
        logits = model(data.symbols)
        margin, right = logits[:, 1] - logits[:, 0], (logits.argmax(-1) == data.label).float().mean()
        odd, even = (margin[data.label == label].mean() for label in (1, 0))
        yield f"N {length:4d}  accuracy {right:.3f}  margin odd {odd:6.2f}  even {even:6.2f}"


def print_margins(seeds: Sequence[int] = (0, 1, 2), steps: int = 400) -> None:
    warnings.simplefilter("ignore", UserWarning)  # budgets beyond the trained one are intended
    for seed in seeds:
        trainer = Trainer(parity_small(seed=seed))
        for _ in trainer.train(steps):
            pass
        model = trainer.model
        assert isinstance(model, AdaTape)
        for line in margins(model, 16, (16, 32, 64, 128, 256)):
            print(f"seed {seed}  {line}", flush=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="the study's JSONL file")
    parser.add_argument("grids", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--also", default="", help="comma-separated lengths")
    parser.add_argument("--small", action="store_true", help="the small model of `parity-small`")
    parser.add_argument("--together", type=int, help="runs in one CUDA graph")
    parser.add_argument("--runs", type=Path, help="where run folders go; runs/STUDY unless given")
    parser.add_argument("--evaluate-every", type=int, help="steps between validations")
    parser.add_argument("--margins", action="store_true")
    arguments = parser.parse_args(given)
    if arguments.margins:
        print_margins()
    elif arguments.out and arguments.grids:
        try:
            (work_together if arguments.together else work)(arguments, arguments.runs or RUNS / arguments.out.stem)
        except Stopped as stopped:
            parser.exit(stopped.code, f"{stopped}; the same command goes on\n")
    else:
        parser.error("nothing to run; give a file and grids, or --margins")


if __name__ == "__main__":
    main()
