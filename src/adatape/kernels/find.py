"""Which tokens each row reads, with what weights and how many: Algorithm 2 without gradients, as one operator."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adatape.atr import read_tape
from adatape.config import Update

HAS_TRITON = find_spec("triton") is not None


class Found(NamedTuple):
    """What Algorithm 2 chose for b samples in t steps of k merged tokens."""

    index: Tensor  # type: ignore[assignment]  # (b, t, k) int64, -1 where hidden
    weight: Tensor  # (b, t, k) float32, zero where hidden
    mask: Tensor  # (b, t) bool


def find(
    query: Float[Tensor, "b h"],
    keys: Float[Tensor, "c h"] | Float[Tensor, "b c h"],
    taken: Bool[Tensor, "b c"] | None,
    steps: int,
    threshold: float,
    merge: int,
    temperature: float,
    average: bool,
) -> Found:
    """In float32 keys of the query's width; no gradient passes."""
    return Found(*_find(query.detach(), keys.detach(), taken, steps, threshold, merge, temperature, average))


SCHEMA = (
    "(Tensor query, Tensor keys, Tensor? taken, int steps, float threshold, int merge, float temperature, bool average)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("adatape::find", mutates_args=(), schema=SCHEMA)
def _find(
    query: Tensor,
    keys: Tensor,
    taken: Tensor | None,
    steps: int,
    threshold: float,
    merge: int,
    temperature: float,
    average: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    given = (query, keys, taken, steps, threshold, merge, temperature, average)
    return launched(*given) if query.is_cuda and HAS_TRITON else _by_definition(*given)


@_find.register_fake
def _(
    query: Tensor, keys: Tensor, taken: Tensor | None, steps: int, threshold: float, merge: int, *_: object
) -> object:
    b = query.shape[0]
    index = query.new_empty(b, steps, merge, dtype=torch.int64)
    return index, query.new_empty(b, steps, merge, dtype=torch.float32), index.new_empty(b, steps, dtype=torch.bool)


def _by_definition(
    query: Tensor,
    keys: Tensor,
    taken: Tensor | None,
    steps: int,
    threshold: float,
    merge: int,
    temperature: float,
    average: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    update: Update = "average" if average else "replace"
    tape = read_tape(
        query, keys, steps, threshold, merge, query.shape[1], taken, update, temperature=temperature, check=False
    )
    return tape.index, tape.weight, tape.mask


def launched(
    query: Float[Tensor, "b h"],
    keys: Float[Tensor, "c h"] | Float[Tensor, "b c h"],
    taken: Bool[Tensor, "b c"] | None,
    steps: int,
    threshold: float,
    merge: int,
    temperature: float,
    average: bool,
) -> tuple[Int[Tensor, "b t k"], Float[Tensor, "b t k"], Bool[Tensor, "b t"]]:
    """By Triton: two launches a step, nothing waits for the GPU, so a CUDA graph can hold it."""
    from adatape.kernels.triton_find import advance, score

    own, (b, h), c = keys.dim() == 3, query.shape, keys.shape[-2]
    device, plan = query.device, planned(b, c, own, merge)
    q, keys = query.double().contiguous(), keys.float().contiguous()
    hidden = torch.zeros(b, c, dtype=torch.uint8, device=device) if taken is None else taken.to(torch.uint8, copy=True)
    tiles, blocks, width = -(-c // plan.tokens), -(-b // plan.rows), max(16, power_of_two(h))
    best = torch.empty(b, tiles, plan.slots, dtype=torch.int64, device=device)
    halting = torch.zeros(b, dtype=torch.float64, device=device)
    index = torch.full((b, steps, merge), -1, dtype=torch.int64, device=device)
    weight = torch.zeros(b, steps, merge, dtype=torch.float32, device=device)
    mask = torch.zeros(b, steps, dtype=torch.bool, device=device)
    for step in range(steps):
        score[(tiles, blocks)](
            q, keys, hidden, halting, best, b, c, h, tiles, threshold,
            OWN=own, MERGE=merge, SLOTS=plan.slots, ROWS=plan.rows, LINES=max(16, plan.rows), TOKENS=plan.tokens,
            COLUMNS=min(64, width), WIDTH=width, num_warps=plan.score_warps,
        )  # fmt: skip
        advance[(b,)](
            q, keys, hidden, halting, best, index, weight, mask, c, h, tiles, step, steps, threshold, temperature,
            OWN=own, AVERAGE=average, MERGE=merge, SLOTS=plan.slots,
            CHUNK=min(8192, power_of_two(tiles * plan.slots)), WIDTH=width, num_warps=plan.advance_warps,
        )  # fmt: skip
    return index, weight, mask


class Plan(NamedTuple):
    """How a read is laid out over a GPU."""

    slots: int  # for the best tokens of a tile, a power of two
    rows: int  # scored together
    tokens: int  # of a tile
    score_warps: int
    advance_warps: int


def planned(b: int, c: int, own: bool, merge: int) -> Plan:
    """What was fastest on an H200."""
    slots = max(2, power_of_two(merge))
    rows = 1 if own else 16 if b <= 16 else 32
    return Plan(slots, rows, max(slots, 32 if own else 128), 2 if own else 4, 4 if c > 2**15 else 2)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
