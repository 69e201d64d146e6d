"""Algorithm 2 by search: each step fetches candidates from indices, scores them again by `atr.scores`, reads the best.

A step reads the K best unread tokens, and its softmax runs over these K only, so it needs K candidates beyond what was
read before. With exact indices the result is that of `atr.read_tape` on the whole bank, index for index: FAISS scores
in float32, and wherever rounding, or a tie, could hide a better token, all tokens above the K-th score are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, Shaped
from numpy import ndarray
from torch import Tensor, nn

from adatape.atr import UPDATE, highest, scores, weighted_sum
from adatape.banks.base import keys_of
from adatape.banks.index import IndexFacts, as_tensor
from adatape.kernels.select import ReadParams, Selection

T = TypeVar("T")
SPARE = 16  # candidates beyond those that are read, so that a second search is rare
COMPRESSED = 32  # candidates per token that is read, where the index only has compressed keys


@runtime_checkable
class IndexPart(Protocol):
    """An opened index over some of the bank's rows: a folder, or a server of one."""

    name: str
    facts: IndexFacts

    def search(self, query: ndarray, count: int, least: int, probes: int | None) -> tuple[ndarray, ndarray]: ...

    def search_above(self, query: ndarray, floor: float) -> ndarray: ...

    def take(self, rows: ndarray) -> ndarray: ...


class Candidates(NamedTuple):
    row: Int64[Tensor, "n m"]  # -1 where there is none
    floor: Float64[Tensor, " n"]  # no other key has a higher FAISS score; -inf where there is no other key


class Found(NamedTuple):
    row: Int64[Tensor, "n k"]
    score: Float32[Tensor, "n k"]
    key: Float64[Tensor, "n k h"]


class BankSearch:
    """Several parts searched as one bank, whose rows are those of the parts in order."""

    def __init__(self, parts: Sequence[IndexPart], probes: int | None = None, fetch: int | None = None) -> None:
        first, *others = parts
        for part in others:
            for name in ("width", "query_width", "norm"):
                mine, theirs = getattr(first.facts, name), getattr(part.facts, name)
                if mine != theirs:
                    raise ValueError(f"{first.name} has {name} {mine} and {part.name} {theirs}; they must be equal")
        for name, value in (("probes", probes), ("fetch", fetch)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value}; it must be at least 1, a whole number")
        self.parts, self.probes, self.fetch = parts, probes, fetch
        self.facts = first.facts
        self.begins = np.cumsum([0, *(part.facts.rows for part in parts)])
        self.size = int(self.begins[-1])
        self.exact = all(part.facts.kind == "exact" for part in parts)
        self.largest_key = max(part.facts.largest_key for part in parts)

    @torch.no_grad()
    def select(self, query: Float[Tensor, "b h"], norm: nn.LayerNorm | None, params: ReadParams) -> Selection:
        """Algorithm 2 on the CPU for a normalised query."""
        b = query.shape[0]
        q, halting = query.detach().cpu().float().double(), torch.zeros(b, dtype=torch.float64)
        index = torch.full((b, params.steps, params.merge), -1)
        weight = torch.zeros(b, params.steps, params.merge)
        mask = torch.zeros(b, params.steps, dtype=torch.bool)
        for step in range(params.steps):
            running = (halting < params.threshold).nonzero().squeeze(1)  # line 2
            if not len(running):
                break
            found = self.best(q[running], index[running, :step].flatten(1), params.merge, norm)  # lines 3-6
            w = (found.score.double() / params.temperature).softmax(-1)  # line 7
            index[running, step], weight[running, step], mask[running, step] = found.row, w.float(), True  # line 9
            halting[running] += w.amax(-1)  # line 13
            update = UPDATE["average" if params.average else "replace"]
            q[running] = update(q[running], weighted_sum(w, found.key))  # lines 8 and 16
        return Selection(index, weight, mask)

    def best(self, q: Float64[Tensor, "n h"], read: Int64[Tensor, "n r"], k: int, norm: nn.LayerNorm | None) -> Found:
        """The k highest unread tokens, as `atr.highest` orders them."""
        least = read.shape[1] + k
        candidates = self.candidates(q, least + self._extra(k), least)
        found = self._highest(q, candidates.row, read, k, norm)
        if self.exact:
            bound = rounding_bound(q, self.largest_key)
            unsure = found.score[:, -1].double() <= candidates.floor + bound
            for n in unsure.nonzero().flatten().tolist():
                rows = self.above(q[n : n + 1], float(found.score[n, -1] - bound[n]))
                again = self._highest(q[n : n + 1], rows[None], read[n : n + 1], k, norm)
                for kept, new in zip(found, again, strict=True):
                    kept[n] = new[0]
        return found

    def candidates(self, q: Float64[Tensor, "n h"], count: int, least: int) -> Candidates:
        query = as_query(q)
        found = self._from_parts(lambda part: part.search(query, count, least, self.probes))
        each = [np.where(rows < 0, -1, rows + begin) for (_, rows), begin in zip(found, self.begins, strict=False)]
        score = np.concatenate([scored for scored, _ in found], 1)
        row = np.concatenate(each, 1)
        score[row < 0] = -np.inf
        count = min(count, row.shape[1])
        if len(self.parts) > 1:
            kept = np.argsort(-score, 1, kind="stable")[:, :count]
            score, row = np.take_along_axis(score, kept, 1), np.take_along_axis(row, kept, 1)
        floor = score.min(1) if count < self.size else np.full(len(score), -np.inf)
        return Candidates(torch.from_numpy(row), torch.from_numpy(floor).double())

    def above(self, q: Float64[Tensor, "1 h"], floor: float) -> Int64[Tensor, " m"]:
        found = self._from_parts(lambda part: part.search_above(as_query(q), floor))
        return torch.from_numpy(np.concatenate([rows + begin for rows, begin in zip(found, self.begins, strict=False)]))

    def take(self, rows: Int64[ndarray, " n"]) -> Shaped[ndarray, "n d"]:
        if len(self.parts) == 1:
            return self.parts[0].take(rows)
        owner = np.searchsorted(self.begins, rows, "right") - 1
        values = np.empty((len(rows), self.facts.width), np.float32)
        for n, part in enumerate(self.parts):
            mine = owner == n
            if mine.any():
                values[mine] = part.take(rows[mine] - self.begins[n])
        return values

    def _highest(
        self, q: Tensor, rows: Int64[Tensor, "n m"], read: Int64[Tensor, "n r"], k: int, norm: nn.LayerNorm | None
    ) -> Found:
        rows = torch.where(rows < 0, self.size, rows).sort(-1).values  # the lowest index wins a tie
        hidden = (rows == self.size) | (rows[..., None] == read[:, None]).any(-1)
        values = as_tensor(self.take(rows.clamp(max=self.size - 1).flatten().numpy()))
        keys = keys_of(values, norm, self.facts.query_width).double().unflatten(0, rows.shape)
        d = scores(q, keys, torch.float32).masked_fill(hidden, -math.inf)
        i = highest(d, k)
        return Found(rows.gather(-1, i), d.gather(-1, i), keys.gather(1, i[..., None].expand(-1, -1, keys.shape[-1])))

    def _extra(self, k: int) -> int:
        if self.fetch is not None:
            return max(0, self.fetch - k)
        return SPARE if all(part.facts.kind != "ivf-pq" for part in self.parts) else COMPRESSED * k

    def _from_parts(self, ask: Callable[[IndexPart], T]) -> list[T]:
        if len(self.parts) == 1:
            return [ask(self.parts[0])]
        with ThreadPoolExecutor(len(self.parts)) as pool:  # FAISS and sockets release the interpreter's lock
            return list(pool.map(ask, self.parts))


def rounding_bound(q: Float64[Tensor, "n h"], largest_key: float) -> Float64[Tensor, " n"]:
    """More than a FAISS score, in float32 and summed in any order, can differ from the score of `atr.scores`."""
    return (q.shape[1] + 8) * 2.0**-23 * q.norm(dim=1) * largest_key


def as_query(q: Float64[Tensor, "n h"]) -> Float32[ndarray, "n h"]:
    """What FAISS takes; a non-finite query finds any keys, and its weights are then as non-finite as it is."""
    return q.float().nan_to_num(0.0, 0.0, 0.0).numpy()
