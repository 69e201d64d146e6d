"""Triton kernels of tail_attention.py: softmax attention in which a sample's rows end at its length, and its gradient.

Tensors are (b, h, n, d) by three strides and a last one of 1; `lse` and `delta` are (b, h, n) in float32. `scale` is
that of scores in powers of two.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tile(base, row, rows, stride, D: tl.constexpr):
    """(rows of a block, D) of a head; 0 beyond `rows`."""
    column = tl.arange(0, D)
    return tl.load(base + row[:, None] * stride + column[None, :], mask=(row < rows)[:, None], other=0.0)


@triton.jit
def _store(base, row, rows, stride, x, D: tl.constexpr):
    column = tl.arange(0, D)
    tl.store(base + row[:, None] * stride + column[None, :], x.to(base.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit
def forward(
    q, k, v, lengths, out, lse, heads, n, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, b, h = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    length = tl.load(lengths + b)
    row = block * QUERIES + tl.arange(0, QUERIES)
    out += b.to(tl.int64) * o_b + h * o_h
    total = tl.zeros((QUERIES, D), tl.float32)
    if block * QUERIES >= length:
        _store(out, row, n, o_n, total, D)
        return
    q += b.to(tl.int64) * q_b + h * q_h
    k += b.to(tl.int64) * k_b + h * k_h
    v += b.to(tl.int64) * v_b + h * v_h
    query = _tile(q, row, length, q_n, D)
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    share = tl.zeros((QUERIES,), tl.float32)
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        score = tl.dot(query, tl.trans(_tile(k, key, length, k_n, D)), input_precision=PRECISION) * scale
        score = tl.where((key < length)[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        before = tl.exp2(highest - higher)
        share = share * before + tl.sum(weight, 1)
        total = total * before[:, None]
        value = _tile(v, key, length, v_n, D)
        total = tl.dot(weight.to(value.dtype), value, total, input_precision=PRECISION)
        highest = higher
    total = tl.where((row < length)[:, None], total / share[:, None], 0.0)
    _store(out, row, n, o_n, total, D)
    tl.store(lse + tl.program_id(1).to(tl.int64) * n + row, highest + tl.log2(share), mask=row < length)


@triton.jit
def queries_backward(
    q, k, v, lengths, out, lse, d_out, d_q, delta, heads, n, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of queries, and for the other kernel each row's sum of output times gradient."""
    block, b, h = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    length = tl.load(lengths + b)
    row = block * QUERIES + tl.arange(0, QUERIES)
    d_q += b.to(tl.int64) * dq_b + h * dq_h
    found = tl.zeros((QUERIES, D), tl.float32)
    if block * QUERIES >= length:
        _store(d_q, row, n, dq_n, found, D)
        return
    q += b.to(tl.int64) * q_b + h * q_h
    k += b.to(tl.int64) * k_b + h * k_h
    v += b.to(tl.int64) * v_b + h * v_h
    query = _tile(q, row, length, q_n, D)
    gradient = _tile(d_out + b.to(tl.int64) * g_b + h * g_h, row, length, g_n, D)
    made = _tile(out + b.to(tl.int64) * o_b + h * o_h, row, length, o_n, D)
    of_row = tl.sum(made.to(tl.float32) * gradient.to(tl.float32), 1)
    at = tl.program_id(1).to(tl.int64) * n + row
    tl.store(delta + at, of_row, mask=row < length)
    norm = tl.load(lse + at, mask=row < length, other=float("inf"))
    for start in range(0, length, KEYS):
        key = start + tl.arange(0, KEYS)
        keys = _tile(k, key, length, k_n, D)
        score = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        weight = tl.where((key < length)[None, :], tl.exp2(score - norm[:, None]), 0.0)
        towards = tl.dot(gradient, tl.trans(_tile(v, key, length, v_n, D)), input_precision=PRECISION)
        d_score = weight * (towards - of_row[:, None])
        found = tl.dot(d_score.to(keys.dtype), keys, found, input_precision=PRECISION)
    _store(d_q, row, n, dq_n, found * (scale * LN2), D)


@triton.jit
def keys_backward(
    q, k, v, lengths, lse, d_out, delta, d_k, d_v, heads, n, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values."""
    block, b, h = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    length = tl.load(lengths + b)
    key = block * KEYS + tl.arange(0, KEYS)
    d_k += b.to(tl.int64) * dk_b + h * dk_h
    d_v += b.to(tl.int64) * dv_b + h * dv_h
    of_key, of_value = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, D), tl.float32)
    if block * KEYS < length:
        q += b.to(tl.int64) * q_b + h * q_h
        d_out += b.to(tl.int64) * g_b + h * g_h
        keys = _tile(k + b.to(tl.int64) * k_b + h * k_h, key, length, k_n, D)
        values = _tile(v + b.to(tl.int64) * v_b + h * v_h, key, length, v_n, D)
        for start in range(0, length, QUERIES):
            row = start + tl.arange(0, QUERIES)
            at = tl.program_id(1).to(tl.int64) * n + row
            query, gradient = _tile(q, row, length, q_n, D), _tile(d_out, row, length, g_n, D)
            norm = tl.load(lse + at, mask=row < length, other=float("inf"))
            of_row = tl.load(delta + at, mask=row < length, other=0.0)
            score = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * scale  # (keys, queries)
            weight = tl.exp2(score - norm[None, :])
            of_value = tl.dot(weight.to(gradient.dtype), gradient, of_value, input_precision=PRECISION)
            towards = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
            d_score = weight * (towards - of_row[None, :])
            of_key = tl.dot(d_score.to(query.dtype), query, of_key, input_precision=PRECISION)
        hidden = (key >= length)[:, None]
        of_key, of_value = tl.where(hidden, 0.0, of_key), tl.where(hidden, 0.0, of_value)
    _store(d_k, key, n, dk_n, of_key * (scale * LN2), D)
    _store(d_v, key, n, dv_n, of_value, D)
