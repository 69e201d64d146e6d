"""One step of Algorithm 2 for all rows as two Triton kernels: `score`, the best tokens per tile, then `advance`.

The arithmetic is that of `atr`: scores are summed in float64 and rounded once to float32, so that equal keys score
equally at every position; the next query is computed in float64. Rows that have halted are skipped.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**63))


@triton.jit
def _ranked(score, place):
    """Packs score and index into one integer whose maximum is the best score and, among equals, the lowest index."""
    score = tl.where(score == 0, 0.0, score)  # -0 and 0 are equal but differ in their bits
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (place ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _place(rank):
    return (rank & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def _score(rank):
    ordered = (rank >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_of(best, more, slot, MERGE: tl.constexpr):
    """The MERGE highest ranks of both, in descending order; ranks are unique except NOTHING."""
    found = tl.full(best.shape, NOTHING, tl.int64)
    for k in range(MERGE):
        top = tl.maximum(tl.max(best, 0), tl.max(more, 0))
        best = tl.where(best == top, NOTHING, best)
        more = tl.where(more == top, NOTHING, more)
        found = tl.where(slot == k, top, found)
    return found


@triton.jit(do_not_specialize=["rows", "tiles"])
def score(
    query,  # (b, h) float64
    keys,  # (c, h) or (b, c, h) float32
    taken,  # (b, c) uint8
    halting,  # (b,) float64
    best,  # (b, tiles, SLOTS) int64, written: the best ranks of each tile
    rows,
    size,
    width,
    tiles,
    threshold: tl.float64,
    OWN: tl.constexpr,  # one bank per row; then ROWS is 1
    MERGE: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least MERGE
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,  # in a tile
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least width
):
    tile, block = tl.program_id(0), tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < rows
    running = tl.load(halting + row, mask=real, other=float("inf")) < threshold  # line 2
    if tl.max(running.to(tl.int32), 0) == 0:
        return
    row = row.to(tl.int64)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    there = token < size
    bank = keys + block.to(tl.int64) * size * width if OWN else keys
    d = tl.zeros((ROWS, TOKENS), tl.float64)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        within = column < width
        q = tl.load(query + row[:, None] * width + column, mask=real[:, None] & within, other=0.0)
        k = tl.load(bank + token.to(tl.int64)[:, None] * width + column, mask=there[:, None] & within, other=0.0)
        k = k.to(tl.float64)
        if OWN:
            d += tl.sum(q * k, 1)[None, :]  # line 3
        else:
            d = tl.dot(q, tl.trans(k), d, out_dtype=tl.float64)
    shown = real[:, None] & there[None, :]
    hidden = tl.load(taken + row[:, None] * size + token[None, :], mask=shown, other=1)
    rank = _ranked(tl.where(hidden != 0, float("-inf"), d.to(tl.float32)), token[None, :])  # line 4
    rank = tl.where(shown, rank, NOTHING)
    slot = tl.arange(0, SLOTS)[None, :]
    found = tl.full((ROWS, SLOTS), NOTHING, tl.int64)
    for k in range(MERGE):
        top = tl.max(rank, 1)[:, None]
        rank = tl.where(rank == top, NOTHING, rank)
        found = tl.where(slot == k, top, found)
    tl.store(best + (row[:, None] * tiles + tile) * SLOTS + slot, found, mask=real[:, None])


@triton.jit(do_not_specialize=["tiles", "step", "steps"])
def advance(
    query,  # (b, h) float64, updated
    keys,  # (c, h) or (b, c, h) float32
    taken,  # (b, c) uint8, updated
    halting,  # (b,) float64, updated
    best,  # (b, tiles, SLOTS) int64
    index,  # (b, steps, MERGE) int64, written
    weight,  # (b, steps, MERGE) float32, written
    mask,  # (b, steps) bool, written
    size,
    width,
    tiles,
    step,
    steps,
    threshold: tl.float64,
    temperature: tl.float64,
    OWN: tl.constexpr,
    AVERAGE: tl.constexpr,
    MERGE: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(halting + row)
    if before >= threshold:  # line 2
        return
    slot, column = tl.arange(0, SLOTS), tl.arange(0, WIDTH)
    merged, within = slot < MERGE, column < width
    found = tl.full((SLOTS,), NOTHING, tl.int64)
    for start in range(0, tiles * SLOTS, CHUNK):  # line 5
        place = start + tl.arange(0, CHUNK)
        rank = tl.load(best + row * tiles * SLOTS + place, mask=place < tiles * SLOTS, other=NOTHING)
        found = _best_of(found, rank, slot, MERGE)

    place = tl.where(merged, _place(found), 0).to(tl.int64)
    w = tl.where(merged, _score(found).to(tl.float64) / temperature, float("-inf"))  # lines 6-7
    w = tl.exp(w - tl.max(w, 0))
    w = w / tl.sum(w, 0)
    bank = keys + row * size * width if OWN else keys
    key = tl.load(bank + place[:, None] * width + column[None, :], mask=merged[:, None] & within[None, :], other=0.0)
    s = tl.sum(w[:, None] * key.to(tl.float64), 0)  # line 8
    if AVERAGE:
        s = (tl.load(query + row * width + column, mask=within, other=0.0) + s) / 2
    tl.store(query + row * width + column, s, mask=within)  # line 16
    tl.store(halting + row, before + tl.max(w, 0))  # line 13

    out = (row * steps + step) * MERGE + slot
    tl.store(index + out, place, mask=merged)  # line 9
    tl.store(weight + out, w.to(tl.float32), mask=merged)
    tl.store(mask + row * steps + step, 1)
    tl.store(taken + row * size + place, tl.full((SLOTS,), 1, tl.uint8), mask=merged)  # line 15
