"""The table of docs/banks.md, from rows of benchmarks/retrieval.py."""

from __future__ import annotations

from cells import rounded, table
from rows import RESULTS, Row, read_rows

HEAD = ["tokens", "bank", "cells searched", "a batch of 8", "memory", "recall", "build", "index"]
NAMES = {"plain": "in memory", "exact": "`exact`", "ivf": "`ivf`", "ivf-pq": "`ivf-pq`"}


def by_size() -> str:
    """One table for each kind of data: with centres, then without."""
    every = read_rows(RESULTS / "retrieval.jsonl")
    kinds = {bool(row["centres"]): "" for row in sorted(every, key=lambda row: -row["centres"])}
    for clustered in kinds:
        rows = [row for row in every if bool(row["centres"]) == clustered]
        rows.sort(key=lambda row: (row["rows"], [*NAMES].index(row["kind"]), row["probes"] or 0))
        kinds[clustered] = table(HEAD, [_cells(row) for row in rows])
    named = {True: "Tokens around 20,000 centres:", False: "Tokens without any structure:"}
    return "\n\n".join(f"{named[clustered]}\n\n{text}" for clustered, text in kinds.items())


def _cells(row: Row) -> list[str]:
    searched = f"{row['probes']} of {row['cells']}" if row["probes"] else "–"
    searched += f", {row['fetch']} candidates" if row.get("fetch") else ""
    recall = f"{100 * row['recall']:.1f} %{_note(row)}" if "recall" in row else "–"
    took, memory = f"{rounded(row['cpu_milliseconds'], 0)} ms", _bytes(row["peak_megabytes"] * 2**20)
    built = [f"{row['build_cpu_seconds']:.0f} s", _bytes(row["index_bytes"])] if "index_bytes" in row else ["–", "–"]
    return [f"{row['rows']:.0e}".replace("+0", ""), NAMES[row["kind"]], searched, took, memory, recall, *built]


def _note(row: Row) -> str:
    return "" if row["recall_steps"] == 10 else f" (first {row['recall_steps']} steps)"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
