"""The parity tables of docs/results.md, from results/parity.jsonl and results/parity_small.jsonl.

Runs of results/parity_figure.jsonl, three seeds of each system to the last step, have their own rows; the picture shows
them in place of earlier runs of the same system and length.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cells import rounded, table
from rows import RESULTS, Row, read_rows

LENGTHS = (16, 32, 64, 128)
EQUAL_STEPS = 3250  # steps of AdaTape's slowest seed
UNFINISHED = "ᵃ"
RATES = ("3e-5", "1e-4", "3e-4")
ADATAPE = "adatape"
FIGURE = "parity_figure"
TO_THE_END = {
    "transformer": "plain Transformer, `--system transformer`, by seed (steps)",
    "ut": "Universal Transformer, `--system ut`, by seed (steps)",
    "singles": "control: every symbol singly, `--system singles` (merge 1, T = τ = N), by seed (steps)",
}


class Run(NamedTuple):
    system: str
    length: int
    lr: str
    seed: int
    row: Row


def runs_in(name: str) -> list[Run]:
    """The runs of a file, without those of no score and exploratory ones, which have another stopping rule."""
    rows = [row for row in read_rows(RESULTS / f"{name}.jsonl") if "exploration" not in row.get("session", "")]
    return [run_of(row) for row in rows if "result" in row or row.get("curve")]


def figure_runs() -> list[Run]:
    """The runs that are drawn: those of parity_figure.jsonl, else of parity.jsonl, for each system and length."""
    new = runs_in(FIGURE)
    taken = {(run.system, run.length) for run in new}
    return [run for run in runs_in("parity") if (run.system, run.length) not in taken] + new


def run_of(row: Row) -> Run:
    words = shlex.split(row["options"])
    options = dict(zip(words[::2], words[1::2], strict=True))
    system, length = options.get("--system", ADATAPE), int(options["--length"])
    return Run(system, length, options.get("--lr", ""), int(options.get("--seed", 0)), row)


def chosen(runs: Sequence[Run], system: str, length: int) -> list[Run]:
    """Runs of a system and length, sorted by learning rate and seed."""
    found = [run for run in runs if (run.system, run.length) == (system, length)]
    return sorted(found, key=lambda run: (RATES.index(run.lr) if run.lr in RATES else 0, run.seed))


def percent(share: float, digits: int = 2) -> str:
    return rounded(100 * share, digits)


def as_long_as_run(run: Run) -> str:
    """Held-out accuracy and steps; for a run that was stopped, its last validation accuracy, with a mark."""
    if "result" in run.row:
        accuracy, steps, mark = run.row["result"]["accuracy"], run.row["result"]["steps"], ""
    else:
        (steps, accuracy), mark = run.row["curve"][-1], f" {UNFINISHED}"
    text = f"**{percent(accuracy)}**" if accuracy > 0.9 else percent(accuracy)
    return f"{text}{mark} ({steps:,})"


def at_equal_steps(run: Run) -> str:
    """Validation accuracy at EQUAL_STEPS; for a shorter run, at its last point."""
    points = dict(run.row["curve"])
    if EQUAL_STEPS in points:
        return percent(points[EQUAL_STEPS])
    step, accuracy = run.row["curve"][-1]
    return f"{percent(accuracy)} {UNFINISHED} ({step:,})"


def by_length() -> str:
    runs, new = runs_in("parity"), runs_in(FIGURE)

    def line(name: str, system: str, cell: Callable[[Run], str], runs: Sequence[Run] = runs) -> list[str]:
        return [name, *(", ".join(map(cell, chosen(runs, system, length))) for length in LENGTHS)]

    solved = [chosen(runs, ADATAPE, length) for length in LENGTHS]
    worst = [min(run.row["result"]["accuracy"] for run in of_length) for of_length in solved]
    steps = [", ".join(str(run.row["result"]["steps"]) for run in of_length) for of_length in solved]
    plain = "plain Transformer, `--system transformer --lr L`, L = 3e-5, 1e-4, 3e-4, seed 0: validation after "
    singly = "control: every symbol singly, `--system singles` (merge 1, T = τ = N; N = 16: seeds 0, 1, 2)"
    rows = [
        ["AdaTape, `--length N --seed 0`, `1`, `2`: worst of 3 seeds", *(f"**{percent(each)}**" for each in worst)],
        ["… steps to the end, by seed", *steps],
        line(f"{plain}{EQUAL_STEPS:,} steps", "transformer", at_equal_steps),
        line("… as long as it was run (steps)", "transformer", as_long_as_run),
        line(singly, "singles", as_long_as_run),
        line("control: random pairs, `--system random`", "random", as_long_as_run),
        line("control: pairs in order, `--system order`", "order", as_long_as_run),
    ]
    rows += [
        line(name, system, as_long_as_run, new)
        for system, name in TO_THE_END.items()
        if any(chosen(new, system, length) for length in LENGTHS)
    ]
    return table(["accuracy, %, of `adatape train parity …`", *(f"N = {length}" for length in LENGTHS)], rows)


def beyond() -> str:
    """Training on longer sequences, and testing on longer ones than trained."""
    runs = runs_in("parity")
    (longer, *_), (longest, *_) = (chosen(runs, ADATAPE, length) for length in (256, 512))
    curve, result = longer.row["curve"], longer.row["result"]
    perfect = next(step for step, accuracy in curve if accuracy == 1)
    step, accuracy = longest.row["curve"][-1]
    tested = [dict(run.row["elsewhere"]) for run in chosen(runs, ADATAPE, 64)]
    far = [{percent(each[length], 1) for each in tested} for length in (256, 512, 1024)]
    command = "adatape train parity --length"
    ended = f"{percent(accuracy, 1)} % at step {step:,}, where its GPU time ended: not known"
    rows = [
        [
            "trained at 256, seed 0",
            f"{percent(result['accuracy'])} % at step {result['steps']:,} (first perfect validation at {perfect:,})",
            f"`{command} 256`",
        ],
        by_seed(512) or ["trained at 512, seed 0", ended, f"`{command} 512`"],
        by_seed(1024) or ["trained at 1024", "not run", ""],
        [
            "trained at 64, tested at 128",
            f"{', '.join(percent(each[128]) for each in tested)} % (seeds 0, 1, 2)",
            "`adatape eval RUN --length 128`",
        ],
        [
            "trained at 64, tested at 256, 512, 1024",
            f'{", ".join("/".join(sorted(each)) for each in far)} %, all seeds: always "even"',
            "`adatape eval RUN --length 256`",
        ],
    ]
    return table(["", "figure", "command"], rows)


def by_seed(length: int) -> list[str]:
    """The row of AdaTape at a length of the figure's file; empty if that has none."""
    found = chosen(runs_in(FIGURE), ADATAPE, length)
    seeds = f"seed{'s' * (len(found) > 1)} {', '.join(str(run.seed) for run in found)}"
    cells = ", ".join(map(as_long_as_run, found))
    row = [f"trained at {length}, {seeds} (steps)", cells, f"`adatape train parity --length {length}`"]
    return row if found else []


SMALL = {
    "Universal Transformer, `ut`": "ut",
    "plain Transformer, `transformer`": "transformer",
    "control: every symbol singly, `singles`": "singles",
    "control: random pairs, `random`": "random",
    "control: pairs in order, `order`": "order",
    "AdaTape, `adatape`": ADATAPE,
}


def small() -> str:
    """Held-out accuracy by seed."""
    runs, lengths = runs_in("parity_small"), (16, 32, 64)
    rows = [
        [name, *(", ".join(percent(run.row["result"]["accuracy"], 1) for run in chosen(runs, system, length))
                 for length in lengths)]
        for name, system in SMALL.items()
    ]  # fmt: skip
    return table(["accuracy, %, by seed", *(f"N = {length}" for length in lengths)], rows)
