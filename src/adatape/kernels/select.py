"""Algorithm 2 without gradients as one custom operator: indices, weights and mask of the tokens that each row reads."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adatape.atr import read_tape

HAS_TRITON = find_spec("triton") is not None


class ReadParams(NamedTuple):
    """The parameters of Algorithm 2."""

    steps: int
    threshold: float
    merge: int
    temperature: float
    average: bool  # the next query is the mean of query and token; else the token


class Selection(NamedTuple):
    """The tokens that Algorithm 2 selects for b samples: t steps, each of k merged tokens."""

    index: Tensor  # type: ignore[assignment]  # (b, t, k) int64, -1 where hidden
    weight: Tensor  # (b, t, k) float32, zero where hidden
    mask: Tensor  # (b, t) bool


def select_tokens(
    query: Float[Tensor, "b h"],
    keys: Float[Tensor, "c h"] | Float[Tensor, "b c h"],
    taken: Bool[Tensor, "b c"] | None,
    params: ReadParams,
) -> Selection:
    """Selects tokens by float32 keys of the query's width, without gradient."""
    return Selection(*_select_tokens(query.detach(), keys.detach(), taken, *params))


SCHEMA = (
    "(Tensor query, Tensor keys, Tensor? taken, int steps, float threshold, int merge, float temperature, bool average)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("adatape::select_tokens", mutates_args=(), schema=SCHEMA)
def _select_tokens(query: Tensor, keys: Tensor, taken: Tensor | None, *params: Any) -> tuple[Tensor, ...]:
    how = select_triton if query.is_cuda and HAS_TRITON else select_by_definition
    return tuple(how(query, keys, taken, ReadParams(*params)))


@_select_tokens.register_fake
def _(query: Tensor, keys: Tensor, taken: Tensor | None, *params: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_selection(query, ReadParams(*params)))


def select_by_definition(query: Tensor, keys: Tensor, taken: Tensor | None, params: ReadParams) -> Selection:
    tape = read_tape(
        query,
        keys,
        params.steps,
        params.threshold,
        params.merge,
        query.shape[1],
        taken,
        "average" if params.average else "replace",
        temperature=params.temperature,
        check=False,
    )
    return Selection(tape.index, tape.weight, tape.mask)


def select_triton(
    query: Float[Tensor, "b h"],
    keys: Float[Tensor, "c h"] | Float[Tensor, "b c h"],
    taken: Bool[Tensor, "b c"] | None,
    params: ReadParams,
) -> Selection:
    """Runs the Triton kernels, without synchronising, so that a CUDA graph can capture it."""
    query, keys = query.float().contiguous(), keys.float().contiguous()
    tokens = fused_tile(query.shape, keys.shape, params.merge, sm_count(query.device))
    return (
        select_stepwise(query, keys, taken, params)
        if tokens is None
        else select_fused(query, keys, taken, params, tokens)
    )


def select_stepwise(query: Tensor, keys: Tensor, taken: Tensor | None, params: ReadParams) -> Selection:
    """Two launches per step: the best tokens of each tile of the bank, then the best of all and the next query."""
    from adatape.kernels.triton_select import advance, score

    own, (b, h), c = keys.dim() == 3, query.shape, keys.shape[-2]
    device, plan = query.device, launch_plan(b, c, own, params.merge)
    q = query.double()
    hidden = torch.zeros(b, c, dtype=torch.uint8, device=device) if taken is None else taken.to(torch.uint8, copy=True)
    tiles, blocks, width = -(-c // plan.tokens), -(-b // plan.rows), max(16, power_of_two(h))
    best = torch.empty(b, tiles, plan.slots, dtype=torch.int64, device=device)
    halting = torch.zeros(b, dtype=torch.float64, device=device)
    index, weight, mask = selection = _empty_selection(query, params)
    index.fill_(-1)
    weight.zero_()
    mask.zero_()
    for step in range(params.steps):
        score[(tiles, blocks)](
            q, keys, hidden, halting, best, b, c, h, tiles, params.threshold,
            OWN=own, MERGE=params.merge, SLOTS=plan.slots, ROWS=plan.rows, TOKENS=plan.tokens,
            COLUMNS=min(64, width), WIDTH=width, num_warps=plan.score_warps,
        )  # fmt: skip
        advance[(b,)](
            q, keys, hidden, halting, best, index, weight, mask, c, h, tiles, step, params.steps,
            params.threshold, params.temperature, OWN=own, AVERAGE=params.average, MERGE=params.merge, SLOTS=plan.slots,
            CHUNK=min(8192, power_of_two(tiles * plan.slots)), WIDTH=width, num_warps=plan.advance_warps,
        )  # fmt: skip
    return selection


class LaunchPlan(NamedTuple):
    """The launch configuration of `select_stepwise`."""

    slots: int  # number of best tokens kept per tile, a power of two
    rows: int  # scored by one program
    tokens: int  # per tile
    score_warps: int
    advance_warps: int


def launch_plan(b: int, c: int, own: bool, merge: int) -> LaunchPlan:
    """The configuration that was fastest on an H200."""
    slots = slots_for(merge)
    rows = 1 if own else 16 if b <= 16 else 32
    return LaunchPlan(slots, rows, max(slots, 16 if own else 128), 1 if own else 4, 4 if c > 2**15 else 2)


def select_fused(query: Tensor, keys: Tensor, taken: Tensor | None, params: ReadParams, tokens: int) -> Selection:
    """All steps in one launch, with tiles of `tokens` tokens."""
    from adatape.kernels.triton_select_fused import select_fused_kernel

    own, (b, h), c = keys.dim() == 3, query.shape, keys.shape[-2]
    tiles, slots = -(-c // tokens), slots_for(params.merge)
    best = torch.empty(2, b, tiles, slots, dtype=torch.int64, device=query.device)
    arrived = torch.zeros(b, dtype=torch.int32, device=query.device)
    hidden = query if taken is None else taken.to(torch.uint8)
    index, weight, mask = selection = _empty_selection(query, params)
    together = {"launch_cooperative_grid": True} if query.is_cuda and tiles > 1 else {}
    select_fused_kernel[(tiles, b)](
        query, keys, hidden, best, arrived, index, weight, mask, c, h, tiles, params.steps,
        params.threshold, params.temperature, OWN=own, HIDES=taken is not None, AVERAGE=params.average,
        MERGE=params.merge, SLOTS=slots, TOKENS=tokens, CHUNK=power_of_two(tiles * slots),
        WIDTH=max(16, power_of_two(h)), num_warps=4, **together,
    )  # fmt: skip
    return selection


def fused_tile(query: tuple[int, ...], keys: tuple[int, ...], merge: int, sm_count: int) -> int | None:
    """Tokens per tile if all tiles of all rows can run at the same time and a tile fits in registers; else None."""
    if query[1] > 64 or merge > 32:
        return None
    return next((tokens for tokens in (64, 128) if -(-keys[-2] // tokens) * query[0] <= sm_count), None)


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _empty_selection(query: Tensor, params: ReadParams) -> Selection:
    shape = (query.shape[0], params.steps, params.merge)
    return Selection(
        query.new_empty(shape, dtype=torch.int64),
        query.new_empty(shape, dtype=torch.float32),
        query.new_empty(shape[:2], dtype=torch.bool),
    )


def slots_for(merge: int) -> int:
    return max(2, power_of_two(merge))


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
