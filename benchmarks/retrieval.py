"""Time, memory and recall of a RetrievalBank beside a bank in memory: 10 tokens of 5 merged bank tokens, 8 queries.

python benchmarks/retrieval.py results/retrieval.jsonl                                       a million tokens
python benchmarks/retrieval.py results/retrieval.jsonl --rows 10000000 --kinds exact ivf ivf-pq
python benchmarks/retrieval.py results/retrieval.jsonl --rows 100000000 --kinds ivf-pq --dtype float16 --cells 1024 \\
    --recall 16 --recall-steps 2                 (the exact tape, by comparing all values at every step, takes minutes)

Tokens are drawn around `--centres` random points (0: none, the hardest case for cells), queries in the same way. Banks
of one call are timed in turns in one process; memory, with the most probes, is that of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from record import Row, add_rows, parser_of
from torch import Tensor

from adatape.banks import Bank, FrozenBank, RetrievalBank, build_index
from adatape.banks.index import INDEX, IndexFacts, as_tensor, import_faiss, norm_hash
from adatape.banks.search import BankSearch
from adatape.config import ReaderConfig
from adatape.kernels.select import ReadParams
from adatape.reader import TapeReader

CHUNK = 1_000_000
STEPS, MERGE, SPREAD = 10, 5, 0.7
PARAMS = ReadParams(STEPS, float(STEPS), MERGE, 8.0, True)


class Case(NamedTuple):
    """A bank and how many cells of it are searched."""

    kind: str
    probes: int | None = None
    fetch: int | None = None

    def open(self, folder: Path) -> Bank:
        if self.kind == "plain":
            return FrozenBank(as_tensor(np.load(folder / "values.npy")))
        return RetrievalBank(folder / self.kind, probes=self.probes, fetch=self.fetch)


def drawn(count: int, width: int, centres: int, seed: int) -> Tensor:
    """`count` tokens around the same centres for every seed."""
    noise = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    if not centres:
        return noise
    generator = torch.Generator().manual_seed(0)
    middle = torch.randn(centres, width, generator=generator)
    picked = torch.randint(centres, (count,), generator=torch.Generator().manual_seed(seed + 1))
    return middle[picked] + SPREAD * noise


def write_values(path: Path, arguments: argparse.Namespace) -> None:
    if path.is_file():
        return
    partial = path.with_suffix(".partial")
    array = open_memmap(partial, "w+", np.dtype(arguments.dtype), (arguments.rows, arguments.width))
    for begin in range(0, arguments.rows, CHUNK):
        count = min(CHUNK, arguments.rows - begin)
        array[begin : begin + count] = drawn(count, arguments.width, arguments.centres, 2 * begin + 2).numpy()
    array.flush()
    partial.replace(path)


def queries(count: int, arguments: argparse.Namespace, seed: int = 1) -> Tensor:
    return drawn(count, arguments.width, arguments.centres, -seed)


def reader_of(bank: Bank, width: int) -> TapeReader:
    reading = ReaderConfig(steps=STEPS, merge=MERGE, threshold=float(STEPS), query_width=width, norm_learns=False)
    return TapeReader(width, reading, bank.size).eval()


def reading_of(bank: Bank, query: Tensor) -> Callable[[], Tensor]:
    reader = reader_of(bank, query.shape[1])

    @torch.inference_mode()
    def read() -> Tensor:
        return reader(query, bank.open(query, query[:, None], query)).index

    return read


def milliseconds(cases: Sequence[Case], folder: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Medians over rounds, in which each case reads a batch once; queries differ by round.

    Processor time of the one thread is what a machine that others use does not distort.
    """
    banks = {case.kind: case.open(folder) for case in cases}  # cases of one index share it
    took: list[list[tuple[float, float]]] = [[] for _ in cases]
    for round_ in range(arguments.rounds + 1):
        query = queries(arguments.batch, arguments, 100 + 2 * round_)
        for found, case in zip(took, cases, strict=True):
            bank = banks[case.kind]
            if isinstance(bank, RetrievalBank):
                bank.opened.search.probes, bank.opened.search.fetch = case.probes, case.fetch
            read = reading_of(bank, query)
            began = time.perf_counter(), time.process_time()
            read()
            found.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    warm = [zip(*found[1:], strict=True) for found in took]
    medians = [[statistics.median(each) for each in found] for found in warm]
    return [{"milliseconds": round(1e3 * wall, 2), "cpu_milliseconds": round(1e3 * cpu, 2)} for wall, cpu in medians]


def peak_megabytes(case: Case, folder: Path, arguments: argparse.Namespace) -> float:
    """What opening the bank and reading one batch add to a process's resident memory, mapped pages included."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (case, folder, arguments))


def _peak(case: Case, folder: Path, arguments: argparse.Namespace) -> float:
    import_faiss().omp_set_num_threads(1)
    torch.set_num_threads(1)
    query = queries(arguments.batch, arguments)
    before = _resident("VmRSS")
    reading_of(case.open(folder), query)()
    return (_resident("VmHWM") - before) / 1024


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


class Scan:
    """An exact index that keeps nothing: it compares all values at every search."""

    def __init__(self, values: Path) -> None:
        self.name, self.values = str(values), np.load(values, mmap_mode="r")
        rows, width = self.values.shape
        norm = torch.nn.LayerNorm(width, eps=1e-6)
        self.facts = IndexFacts(rows, width, width, "exact", norm_hash(norm), 2 * width**0.5, 0, "", "", "")

    @torch.inference_mode()
    def search(
        self,
        query: np.ndarray,
        count: int,
        least: int,  # noqa: ARG002
        probes: int | None,  # noqa: ARG002
    ) -> tuple[np.ndarray, np.ndarray]:
        q = torch.from_numpy(query)
        best = torch.full((len(q), count), -torch.inf), torch.full((len(q), count), -1)
        for begin in range(0, len(self.values), CHUNK // 4):
            keys = as_tensor(self.values[begin : begin + CHUNK // 4])
            found = (q @ torch.nn.functional.layer_norm(keys, keys.shape[1:], eps=1e-6).T).topk(min(count, len(keys)))
            scores, rows = torch.cat([best[0], found.values], 1), torch.cat([best[1], found.indices + begin], 1)
            kept = scores.topk(count)
            best = kept.values, rows.gather(1, kept.indices)
        return best[0].numpy(), best[1].numpy()

    def search_above(self, query: np.ndarray, floor: float) -> np.ndarray:  # noqa: ARG002
        raise ValueError("two keys are too close to tell apart; use other values")

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self.values[rows]


def exact_tapes(folder: Path, arguments: argparse.Namespace) -> Tensor:
    """The tokens of the exact tape, (n, steps × merge)."""
    query = queries(arguments.recall, arguments)
    part = folder / "exact"
    search = RetrievalBank(part).opened.search if part.is_dir() else BankSearch([Scan(folder / "values.npy")])
    return _tokens(search, query, arguments.recall_steps)


def recall(bank: RetrievalBank, exact: Tensor, arguments: argparse.Namespace) -> float:
    """The share of the exact tape's bank tokens that is read, at any step."""
    found = _tokens(bank.opened.search, queries(arguments.recall, arguments), arguments.recall_steps)
    return float((exact[:, :, None] == found[:, None]).any(-1).double().mean())


def _tokens(search: BankSearch, query: Tensor, steps: int) -> Tensor:
    norm = torch.nn.LayerNorm(query.shape[1], eps=1e-6)
    return search.select(norm(query), norm, PARAMS._replace(steps=steps)).index.flatten(1)


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64, help="of keys and values")
    parser.add_argument("--kinds", nargs="+", default=["plain", "exact", "ivf", "ivf-pq"])
    parser.add_argument("--cells", type=int, help="by default that of build_index")
    parser.add_argument("--probes", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--fetch", type=int, help="candidates scored again at each step; by default RetrievalBank's")
    parser.add_argument("--centres", type=int, default=20_000)
    parser.add_argument("--dtype", default="float32", help="of values")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recall", type=int, default=64, help="queries by which recall is measured")
    parser.add_argument("--recall-steps", type=int, default=STEPS, help="first steps of the tape that recall looks at")
    parser.add_argument("--folder", type=Path, help="where values and indices are kept; by default they are removed")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as temporary:
        measure(arguments.folder or Path(temporary), arguments)


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = folder / "values.npy"
    write_values(values, arguments)
    for kind in arguments.kinds:
        if kind != "plain" and not (folder / f"{kind}.json").is_file():
            began = time.perf_counter(), time.process_time()
            build_index(values, folder / kind, kind=kind, query_width=arguments.width, cells=arguments.cells)
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            built = {"build_seconds": round(took[0], 1), "build_cpu_seconds": round(took[1], 1)}
            (folder / f"{kind}.json").write_text(json.dumps(built))
    exact = exact_tapes(folder, arguments)
    threads = torch.get_num_threads()
    import_faiss().omp_set_num_threads(1)
    torch.set_num_threads(1)
    cases = [
        Case(kind, probes, None if kind == "plain" else arguments.fetch)
        for kind in arguments.kinds
        for probes in (arguments.probes if kind.startswith("ivf") else [None])
    ]
    times = milliseconds(cases, folder, arguments)
    most_probes = {case.kind: case for case in cases}
    memory = {kind: peak_megabytes(case, folder, arguments) for kind, case in most_probes.items()}
    for case, timed in zip(cases, times, strict=True):
        row: Row = {
            "case": f"{arguments.rows} {arguments.centres} {case.kind} {case.probes or ''} {case.fetch or ''}".strip(),
            "rows": arguments.rows,
            "centres": arguments.centres,
            "kind": case.kind,
            "probes": case.probes,
            "fetch": case.fetch,
            "batch": arguments.batch,
            "dtype": arguments.dtype,
            "recall_queries": arguments.recall,
            "recall_steps": arguments.recall_steps,
            **timed,
            "peak_megabytes": round(memory[case.kind], 1),
            "values_bytes": values.stat().st_size,
        }
        if case.kind != "plain":
            bank = RetrievalBank(folder / case.kind, probes=case.probes, fetch=case.fetch)
            row |= {"cells": bank.opened.search.facts.cells, "recall": round(recall(bank, exact, arguments), 4)}
            row |= json.loads((folder / f"{case.kind}.json").read_text())
            row["index_bytes"] = (folder / case.kind / INDEX).stat().st_size
        add_rows(arguments.out, [row], "cpu", threads=1, build_threads=threads)
        shown = ("case", "milliseconds", "cpu_milliseconds", "peak_megabytes", "recall")
        print({name: row.get(name) for name in shown}, flush=True)


if __name__ == "__main__":
    main()
