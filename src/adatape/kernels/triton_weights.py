"""The gradient of a tape's weights as one Triton kernel, with one program per row."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["steps"])
def tape_weights_backward(
    query,  # (b, h) float32
    keys,  # (b, steps, MERGE, h) float32, of the selected tokens
    weight,  # (b, steps, MERGE) float32
    length,  # (b,) int64
    grad_weight,  # (b, steps, MERGE) float32
    queries,  # (b, steps, h) float32, scratch
    grad_query,  # (b, h) float32, written
    grad_keys,  # (b, steps, MERGE, h) float32, written up to a row's length
    steps,
    width,
    temperature: tl.float64,
    AVERAGE: tl.constexpr,
    MERGE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, column = tl.arange(0, SLOTS), tl.arange(0, WIDTH)
    merged, within = slot < MERGE, column < width
    both = merged[:, None] & within[None, :]
    read = tl.load(length + row).to(tl.int32)

    q = tl.load(query + row * width + column, mask=within, other=0.0)
    for step in range(read):
        at = row * steps + step
        tl.store(queries + at * width + column, q, mask=within)
        k = tl.load(keys + (at * MERGE + slot[:, None]) * width + column[None, :], mask=both, other=0.0)
        w = tl.load(weight + at * MERGE + slot, mask=merged, other=0.0)
        s = tl.sum(w[:, None] * k, 0)
        q = (q + s) / 2 if AVERAGE else s
    tl.debug_barrier()

    grad_next = tl.zeros((WIDTH,), tl.float32)
    for back in range(read):
        at = row * steps + read - 1 - back
        k = tl.load(keys + (at * MERGE + slot[:, None]) * width + column[None, :], mask=both, other=0.0)
        w = tl.load(weight + at * MERGE + slot, mask=merged, other=0.0)
        q = tl.load(queries + at * width + column, mask=within, other=0.0)
        grad_s = grad_next / 2 if AVERAGE else grad_next
        grad_w = tl.load(grad_weight + at * MERGE + slot, mask=merged, other=0.0) + tl.sum(k * grad_s[None, :], 1)
        grad_d = (w * (grad_w - tl.sum(w * grad_w, 0)) / temperature).to(tl.float32)
        grad_k = w[:, None] * grad_s[None, :] + grad_d[:, None] * q[None, :]
        tl.store(grad_keys + (at * MERGE + slot[:, None]) * width + column[None, :], grad_k, mask=both)
        through = tl.sum(grad_d[:, None] * k, 0)
        grad_next = through + grad_s if AVERAGE else through
    tl.store(grad_query + row * width + column, grad_next, mask=within)
