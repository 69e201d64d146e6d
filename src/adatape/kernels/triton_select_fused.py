"""All steps of Algorithm 2 in one Triton launch, for batches so small that all programs run at the same time.

A program keeps its tile of the bank, and which tokens of it were read, in registers. The programs of a row synchronise
once per step; each then computes the best tokens of all tiles itself, so that the next query needs no second barrier.
The arithmetic is that of `triton_find`.
"""

import triton
import triton.language as tl

from adatape.kernels.triton_select import NOTHING, _best_of, _place, _ranked, _score


@triton.jit
def _barrier(arrived, expected):
    """A barrier over the programs of a row; stores made before it are visible after it."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release", scope="gpu")
    seen = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    while seen < expected:
        seen = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["tiles", "steps"])
def select_fused_kernel(
    query,  # (b, h) float32
    keys,  # (c, h) or (b, c, h) float32
    taken,  # (b, c) uint8, where HIDES
    best,  # (2, b, tiles, SLOTS) int64, scratch, double-buffered: a fast program may store while others still load
    arrived,  # (b,) int32, zeros
    index,  # (b, steps, MERGE) int64, written
    weight,  # (b, steps, MERGE) float32, written
    mask,  # (b, steps) bool, written
    size,
    width,
    tiles,
    steps,
    threshold: tl.float64,
    temperature: tl.float64,
    OWN: tl.constexpr,
    HIDES: tl.constexpr,
    AVERAGE: tl.constexpr,
    MERGE: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,  # a power of two, at least tiles * SLOTS
    WIDTH: tl.constexpr,
):
    tile, rows = tl.program_id(0), tl.num_programs(1)
    row = tl.program_id(1).to(tl.int64)
    column, slot, token = tl.arange(0, WIDTH), tl.arange(0, SLOTS), tile * TOKENS + tl.arange(0, TOKENS)
    within, merged, there = column < width, slot < MERGE, token < size
    bank = keys + row * size * width if OWN else keys
    mine = tl.load(
        bank + token.to(tl.int64)[:, None] * width + column[None, :], mask=there[:, None] & within[None, :], other=0.0
    )
    hidden = tl.zeros((TOKENS,), tl.int32)
    if HIDES:
        hidden = tl.load(taken + row * size + token, mask=there, other=0).to(tl.int32)
    q = tl.load(query + row * width + column, mask=within, other=0.0).to(tl.float64)
    halting = tl.sum(tl.zeros((SLOTS,), tl.float64), 0)
    expected = 0
    for step in range(steps):
        out = (row * steps + step) * MERGE + slot
        if halting < threshold:  # line 2
            d = tl.sum(q[None, :] * mine.to(tl.float64), 1)  # line 3
            rank = _ranked(tl.where(hidden != 0, float("-inf"), d.to(tl.float32)), token)  # line 4
            rank = tl.where(there, rank, NOTHING)
            found = _best_of(tl.full((SLOTS,), NOTHING, tl.int64), rank, slot, MERGE)
            row_best = best + ((step % 2) * rows + row) * tiles * SLOTS
            tl.store(row_best + tile * SLOTS + slot, found)
            expected += tiles
            _barrier(arrived + row, expected)
            other = tl.arange(0, CHUNK)
            rank = tl.load(row_best + other, mask=other < tiles * SLOTS, other=NOTHING, cache_modifier=".cg")
            found = _best_of(tl.full((SLOTS,), NOTHING, tl.int64), rank, slot, MERGE)  # line 5

            place = tl.where(merged, _place(found), 0).to(tl.int64)
            w = tl.where(merged, _score(found).to(tl.float64) / temperature, float("-inf"))  # lines 6-7
            w = tl.exp(w - tl.max(w, 0))
            w = w / tl.sum(w, 0)
            key = tl.load(
                bank + place[:, None] * width + column[None, :], mask=merged[:, None] & within[None, :], other=0.0
            )
            s = tl.sum(w[:, None] * key.to(tl.float64), 0)  # line 8
            q = (q + s) / 2 if AVERAGE else s  # line 16
            halting += tl.max(w, 0)  # line 13
            read = (token[:, None] == place[None, :]) & merged[None, :]
            hidden = hidden | tl.max(read.to(tl.int32), 1)  # line 15
            if tile == 0:
                tl.store(index + out, place, mask=merged)  # line 9
                tl.store(weight + out, w.to(tl.float32), mask=merged)
                tl.store(mask + row * steps + step, 1)
        elif tile == 0:
            tl.store(index + out, tl.full((SLOTS,), -1, tl.int64), mask=merged)
            tl.store(weight + out, tl.zeros((SLOTS,), tl.float32), mask=merged)
            tl.store(mask + row * steps + step, 0)
