"""The table of docs/banks.md, from rows of benchmarks/retrieval.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from cells import rounded, table
from rows import RESULTS, Row, read_rows

NAMES = {"plain": "in memory", "exact": "`exact`", "ivf": "`ivf`", "ivf-pq": "`ivf-pq`"}


def by_size() -> str:
    """One table for each kind of data, with centres and without; a row has one bank, a column the cells searched."""
    every = read_rows(RESULTS / "retrieval.jsonl")
    named = {True: "Tokens around 20,000 centres:", False: "Tokens without any structure:"}
    found = []
    for clustered, text in named.items():
        rows = [row for row in every if bool(row["centres"]) == clustered]
        probes = sorted({row["probes"] for row in rows if row["probes"]})
        head = ["tokens", "bank", "all keys", *(f"{count} cell{'s' * (count > 1)}" for count in probes)]
        banks = [_bank(list(group), probes) for _, group in groupby(sorted(rows, key=_order), _order)]
        found.append(f"{text}\n\n{table([*head, 'memory', 'build', 'index'], banks)}")
    return "\n\n".join(found)


def _order(row: Row) -> tuple[int, int, int]:
    return row["rows"], [*NAMES].index(row["kind"]), row.get("fetch") or 0


def _bank(rows: Sequence[Row], probes: Sequence[int]) -> list[str]:
    first, searched = rows[0], {row["probes"]: _searched(row) for row in rows}
    name = NAMES[first["kind"]]
    name += f" of {first['cells']:,} cells" if first["probes"] else ""
    name += f", {first['fetch']:,} candidates" if first.get("fetch") else ""
    name += "" if first["recall_steps"] == 10 else f", first {first['recall_steps']} steps"
    built = (
        [f"{first['build_cpu_seconds']:.0f} s", _bytes(first["index_bytes"])] if "index_bytes" in first else ["–"] * 2
    )
    memory = _bytes(max(row["peak_megabytes"] for row in rows) * 2**20)
    size = f"{first['rows']:.0e}".replace("+0", "")
    return [size, name, *(searched.get(count, "–") for count in (None, *probes)), memory, *built]


def _searched(row: Row) -> str:
    recall = f", {100 * row['recall']:.1f} %" if "recall" in row else ""
    return f"{rounded(row['cpu_milliseconds'], 0)} ms{recall}"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
