"""Indices of a bank's keys on disk: FAISS builds them from an array of values; opening one checks that all parts fit.

A folder holds the index and `index.json` (`IndexFacts`), written last. Values stay in their own .npy file, which is
memory-mapped. Keys are the first `query_width` coordinates of values after the reader's norm.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from numpy import ndarray
from torch import Tensor, nn

from adatape.banks.base import keys_of
from adatape.extras import how_to_install
from adatape.limits import Count, CountOrZero, NotNegative, Quantity, Record, Width
from adatape.validation import from_values

Kind = Literal["exact", "ivf", "ivf-pq"]
OnProgress = Callable[[str, int, int], object]
INDEX, FACTS, FORMAT = "keys.faiss", "index.json", 1
MOST_CELLS = 4096  # by default: every key is compared with every cell's centre when an index is built
KEYS_PER_CELL = 64  # that k-means sees
CODES = 256  # per sub-vector of a compressed key, which is one byte
QUERIES_AT_ONCE = 16  # FAISS sums in another order from 20 queries on, and cells would depend on the batch
PIECES, PIECE = 64, 4096  # of a file, that its fingerprint reads


@dataclass(frozen=True)
class IndexFacts(Record):
    """What `index.json` holds."""

    rows: Count
    width: Width
    query_width: Width
    kind: Kind
    norm: str
    """`norm_hash` of the norm that the keys went through"""
    largest_key: NotNegative
    """the largest length of a key, for bounds on rounding"""
    first_row: CountOrZero
    """of the array, where a folder indexes a part of it"""
    values: str
    """path of the array, relative to the folder"""
    values_hash: str
    index_hash: str
    cells: Quantity = 1
    """into which an inverted file sorts its keys"""
    probes: Quantity = 1
    """cells that are searched by default"""
    format: Quantity = FORMAT


def build_index(
    values: str | Path,
    folder: str | Path,
    *,
    norm: nn.Module | None = None,
    query_width: int = 64,
    kind: Kind = "exact",
    cells: int | None = None,
    probes: int = 32,
    code_bytes: int = 16,
    rows: tuple[int, int] | None = None,
    chunk: int = 65_536,
    on_progress: OnProgress | None = None,
) -> IndexFacts:
    """Indexes the keys of an array (c, d) in a .npy file, reading `chunk` rows at a time, into a new folder.

    `norm` is the reader's (`model.reader.norm`); None is that of a new reader. `kind` is "exact"; "ivf", which sorts
    keys into `cells` and searches the `probes` nearest; or "ivf-pq", which also compresses a key to `code_bytes`.
    `rows` (start, stop) indexes a part of the array. `on_progress(task, done, total)` is called after every chunk.
    """
    faiss, folder, values = import_faiss(), Path(folder), Path(values)
    if (folder / FACTS).exists():
        raise FileExistsError(f"{folder / FACTS} exists; choose another folder or remove it")
    array = open_values(values)
    first, stop = (0, len(array)) if rows is None else rows
    count, width = stop - first, array.shape[1]
    if not 0 <= first < stop <= len(array):
        raise ValueError(f"rows is {rows}; they must lie within the {len(array)} rows of {values}")
    if not 0 < query_width <= width:
        raise ValueError(f"query_width is {query_width}; it must be between 1 and the values' width {width}")
    _check_counts(query_width=query_width, probes=probes, code_bytes=code_bytes, chunk=chunk)
    layer = _layer_norm(norm, width)
    cells = max(1, min(round(4 * count**0.5), count // KEYS_PER_CELL, MOST_CELLS)) if cells is None else cells
    index = _empty_index(faiss, kind, query_width, cells, code_bytes, count)

    def keys(task: str, picked: range | ndarray) -> Iterator[Float32[ndarray, "n h"]]:
        for begin in range(0, len(picked), chunk):
            part = picked[begin : begin + chunk]
            yield _checked_keys(array, part, layer, query_width, values)
            if on_progress is not None:
                on_progress(task, begin + len(part), len(picked))

    if not index.is_trained:
        sampled = np.random.default_rng(0).choice(count, min(count, max(KEYS_PER_CELL * cells, 40 * CODES)), False)
        index.train(np.concatenate(list(keys("sampling keys", first + np.sort(sampled)))))
    largest = 0.0
    for part in keys("indexing keys", range(first, stop)):
        largest = max(largest, float(torch.from_numpy(part).norm(dim=1).max()))
        index.add(part)
    folder.mkdir(parents=True, exist_ok=True)
    faiss.write_index(index, str(folder / INDEX))
    facts = IndexFacts(
        rows=count,
        width=width,
        query_width=query_width,
        kind=kind,
        norm=norm_hash(layer),
        largest_key=largest,
        first_row=first,
        values=os.path.relpath(values, folder),
        values_hash=fingerprint(values),
        index_hash=fingerprint(folder / INDEX),
        **({} if kind == "exact" else {"cells": cells, "probes": min(probes, cells)}),
    )
    partial = folder / f"{FACTS}.partial"
    partial.write_text(json.dumps(asdict(facts), indent=2) + "\n")
    partial.replace(folder / FACTS)
    return facts


class IndexFolder:
    """An opened index with its values; rows are counted from 0 within it."""

    def __init__(self, folder: str | Path) -> None:
        faiss, self.name, folder = import_faiss(), str(folder), Path(folder)
        self.facts = facts = read_facts(folder)
        values, stored = folder / facts.values, folder / INDEX
        for path, known in ((stored, facts.index_hash), (values, facts.values_hash)):
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing, which the index {folder} needs")
            if fingerprint(path) != known:
                raise ValueError(f"{path} is not the file that {folder / FACTS} describes; build the index again")
        array = open_values(values)
        self.values = array[facts.first_row : facts.first_row + facts.rows]
        try:
            self.index = faiss.read_index(str(stored))
        except RuntimeError as error:
            raise ValueError(f"{stored} cannot be read by FAISS: {str(error).splitlines()[0]}") from error
        self._check(faiss, len(array), array.shape[1])

    def _check(self, faiss: Any, rows: int, width: int) -> None:
        """Refuses an index or values that `index.json` describes otherwise."""
        facts, index = self.facts, self.index
        kinds: dict[Kind, Any] = {"exact": faiss.IndexFlat, "ivf": faiss.IndexIVFFlat, "ivf-pq": faiss.IndexIVFPQ}
        described = Path(self.name) / FACTS
        found = (index.ntotal, index.d, index.metric_type)
        if found != (facts.rows, facts.query_width, faiss.METRIC_INNER_PRODUCT):
            raise ValueError(f"{INDEX} has {found[0]} keys of width {found[1]}; {described} says otherwise")
        cells = getattr(index, "nlist", 1)
        if not isinstance(index, kinds[facts.kind]) or cells != facts.cells:
            raise ValueError(
                f"{INDEX} is a FAISS {type(index).__name__} of {cells} cells; {described} says {facts.kind} and "
                f"{facts.cells}"
            )
        if width != facts.width or facts.first_row + facts.rows > rows:
            raise ValueError(f"{facts.values} has {rows} rows of width {width}; {described} says otherwise")

    def search(
        self, query: Float32[ndarray, "n h"], count: int, least: int, probes: int | None
    ) -> tuple[Float32[ndarray, "n m"], Int64[ndarray, "n m"]]:
        """FAISS's scores and rows of the best `count` keys, -1 where it found fewer, but at least `least` of them."""
        count, least = min(count, self.facts.rows), min(least, self.facts.rows)
        if self.facts.kind == "exact":
            return self.index.search(query, count)
        probes = self.facts.probes if probes is None else min(probes, self.facts.cells)
        begins = range(0, len(query), QUERIES_AT_ONCE)
        found = [self._probe(query[begin : begin + QUERIES_AT_ONCE], count, least, probes) for begin in begins]
        return np.concatenate([scores for scores, _ in found]), np.concatenate([rows for _, rows in found])

    def _probe(self, query: ndarray, count: int, least: int, probes: int) -> tuple[ndarray, ndarray]:
        how = import_faiss().SearchParametersIVF(nprobe=probes)
        scores, rows = self.index.search(query, count, params=how)
        short = rows[:, least - 1] < 0
        if short.any() and probes < self.facts.cells:
            scores[short], rows[short] = self._probe(query[short], count, least, min(4 * probes, self.facts.cells))
        return scores, rows

    def search_above(self, query: Float32[ndarray, "1 h"], floor: float) -> Int64[ndarray, " m"]:
        """All rows of an exact index whose FAISS score is above `floor`."""
        return self.index.range_search(query, floor)[2]

    def take(self, rows: Int64[ndarray, " n"]) -> Shaped[ndarray, "n d"]:
        return self.values[rows]


def norm_hash(norm: nn.Module | None) -> str:
    """A SHA-256 of a norm's scale, shift and epsilon in float32; "none" where a reader has no norm."""
    if not isinstance(norm, nn.LayerNorm):
        return "none"
    numbers = [norm.weight, norm.bias, torch.tensor([norm.eps])]
    stored = torch.cat([each.detach().float().cpu().flatten() for each in numbers])
    return hashlib.sha256(stored.numpy().tobytes()).hexdigest()


def fingerprint(path: Path) -> str:
    """A SHA-256 of a file's size and of pieces spread over it: another file is noticed without reading all of it."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for place in np.linspace(0, max(0, size - PIECE), PIECES).astype(np.int64):
            file.seek(int(place))
            found.update(file.read(PIECE))
    return found.hexdigest()


def read_facts(folder: Path) -> IndexFacts:
    path = folder / FACTS
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; adatape.build_index(values, folder) makes an index")
    try:
        return parse_facts(path.read_text(), str(path))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; build the index again") from None


def parse_facts(text: str, name: str) -> IndexFacts:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or set(found) != {field.name for field in fields(IndexFacts)}:
        raise ValueError(f"{name} is not a description of an index; build the index again")
    if found["format"] != FORMAT:
        raise ValueError(f"{name} has format {found['format']}, and {FORMAT} is read; build the index again")
    return from_values(IndexFacts, found, name)


def open_values(path: Path) -> Shaped[ndarray, "c d"]:
    """A memory-mapped array of numbers, never of objects."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; values must be an array (c, d) in a .npy file")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file: {error}") from error
    if not isinstance(array, ndarray) or array.ndim != 2 or array.dtype.kind != "f" or not len(array):
        said = f"shape {array.shape} and {array.dtype}" if isinstance(array, ndarray) else "several arrays"
        raise ValueError(f"{path} has {said}; values must be an array (c, d) of floating-point numbers")
    return array


def as_tensor(rows: Shaped[ndarray, "n d"]) -> Float32[Tensor, "n d"]:
    return torch.from_numpy(np.require(rows, np.float32, ["C", "W"]))


def import_faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(how_to_install(error.name) or str(error), name=error.name) from error
    return faiss


def norm_on_cpu(norm: nn.LayerNorm) -> nn.LayerNorm:
    """A copy of a reader's norm, since keys are made on the CPU."""
    copied = nn.LayerNorm(norm.normalized_shape, eps=norm.eps)
    copied.load_state_dict(norm.state_dict())
    return copied


def _layer_norm(norm: nn.Module | None, width: int) -> nn.LayerNorm | None:
    if norm is None:
        return nn.LayerNorm(width, eps=1e-6)  # a new TapeReader's
    if isinstance(norm, nn.Identity):
        return None
    if not isinstance(norm, nn.LayerNorm) or norm.normalized_shape != (width,) or norm.bias is None:
        raise ValueError(
            f"norm is {norm}; it must be a reader's norm, an nn.LayerNorm with scale and shift of the values' "
            f"width {width}"
        )
    return norm_on_cpu(norm)


def _check_counts(**given: int) -> None:
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _empty_index(faiss: Any, kind: str, width: int, cells: int, code_bytes: int, count: int) -> Any:
    flat = faiss.IndexFlatIP(width)
    if kind == "exact":
        return flat
    if not 0 < cells <= count:
        raise ValueError(f"cells is {cells}; it must be between 1 and the number of keys, {count}")
    if kind == "ivf":
        index = faiss.IndexIVFFlat(flat, width, cells, faiss.METRIC_INNER_PRODUCT)
    elif kind == "ivf-pq":
        if width % code_bytes or count < CODES:
            raise ValueError(
                f"code_bytes is {code_bytes} and there are {count} keys; it must divide query_width, {width}, "
                f"and compression needs {CODES} keys"
            )
        index = faiss.IndexIVFPQ(flat, width, cells, code_bytes, 8, faiss.METRIC_INNER_PRODUCT)
        index.pq.cp.min_points_per_centroid = 1
    else:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(get_args(Kind))}")
    index.cp.min_points_per_centroid = 1  # no warning on stderr; the default number of cells gives enough
    return index


@torch.no_grad()
def _checked_keys(
    array: ndarray, picked: range | ndarray, norm: nn.LayerNorm | None, width: int, path: Path
) -> Float32[ndarray, "n h"]:
    rows = as_tensor(array[picked.start : picked.stop] if isinstance(picked, range) else array[picked])
    finite = rows.isfinite().all(1)
    if not finite.all():
        bad = int(picked[int((~finite).nonzero()[0, 0])])
        raise ValueError(f"row {bad} of {path} has non-finite values; keys must be finite")
    return keys_of(rows, norm, width).contiguous().numpy()
