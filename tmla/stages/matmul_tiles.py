"""Matrix times many rows on a GPU, Q8_0 in words: one matrix for a token, or one for each of its heads.

A block makes a tile of sums (:mod:`tmla.stages.tile`). The uses by heads: :mod:`tmla.stages.head_rows`.
"""

import taichi as ti

from tmla.stages.lanes import cdiv
from tmla.stages.tile import (
    BLOCK,
    DEPTH,
    ROW_PAIRS,
    ROWS,
    SUMS,
    TOKEN_PAIRS,
    TOKENS,
    fetch_tokens,
    fetch_word,
    multiply_tile,
    put_fetched_tokens,
    put_pair,
    put_rows,
    quant,
    row_of,
    token_of,
)


@ti.func
def _fetch_across(
    bits: ti.template(),
    d: ti.template(),
    w_q: ti.template(),
    w_d: ti.template(),
    lay,
    row0,
    k0,
    n_in: ti.template(),
    col0,
    tid,
):
    """Words of a matrix whose rows are the sum's index: thread ``16 k + c`` has word c of rows k and k + 16."""
    word = ti.min(col0 // 8 + (tid & 15), w_q.shape[2] - 1)
    for s in ti.static(range(2)):
        k = k0 + (tid >> 4) + 16 * s
        fetch_word(bits, d, s, w_q, w_d, lay, row0 + ti.min(k, n_in - 1), word)
        d[s] = d[s] if k < n_in else 0.0


@ti.func
def _put_across(ws: ti.template(), bits: ti.template(), d: ti.template(), tid):
    for s in ti.static(range(2)):
        for p in ti.static(range(4)):
            a, b = d[s] * quant(bits[s], 2 * p), d[s] * quant(bits[s], 2 * p + 1)
            put_pair(ws, (tid >> 4) + 16 * s, (tid & 15) * 4 + p, a, b)


@ti.kernel
def _matmul_tiles(
    w_q: ti.template(),
    w_d: ti.template(),
    lay: ti.i32,
    across: ti.template(),
    n_heads: ti.template(),
    n_out: ti.template(),
    n_in: ti.template(),
    stride: ti.template(),
    offset: ti.template(),
    x: ti.template(),
    x_stride: ti.template(),
    n: ti.i32,
    scale: ti.f32,
    add: ti.template(),
    y: ti.template(),
    y_stride: ti.template(),
):
    """y[t, h y_stride + o] = scale * sum over k of M_h[o, k] x[t, h x_stride + k], or += that.

    Row o of M_h, or its column o `across`, is row ``h * stride + offset + o`` of the matrix.
    """
    row_tiles = ti.static(cdiv(n_out, ROWS))
    ti.loop_config(block_dim=BLOCK)
    for i in range(ti.static(n_heads * cdiv(n_out, ROWS)) * ((n + (TOKENS - 1)) // TOKENS) * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        n_token_tiles = (n + (TOKENS - 1)) // TOKENS
        unit, t0 = blk // n_token_tiles, blk % n_token_tiles * TOKENS
        h = unit // row_tiles
        row0 = (unit - h * row_tiles) * ROWS
        first = h * stride + offset
        ra, rb = ti.min(row0 + 2 * (tid >> 2), n_out - 1), ti.min(row0 + 2 * (tid >> 2) + 1, n_out - 1)
        ta, tb = ti.min(t0 + 2 * (tid >> 3), n - 1), ti.min(t0 + 2 * (tid >> 3) + 1, n - 1)
        acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
        bits = ti.Vector([ti.u64(0) for _ in ti.static(range(2))], dt=ti.u64)
        d = ti.Vector([0.0 for _ in ti.static(range(2))])
        v = ti.Vector([0.0 for _ in ti.static(range(8))])
        for step in range(ti.static(cdiv(n_in, DEPTH) + 1)):
            if step > 0:
                if ti.static(across):
                    _put_across(ws, bits, d, tid)
                else:
                    put_rows(ws, bits, d, tid)
                put_fetched_tokens(xs, v, tid)
                ti.simt.block.sync()
            if step < ti.static(cdiv(n_in, DEPTH)):
                if ti.static(across):
                    _fetch_across(bits, d, w_q, w_d, lay, first, step * DEPTH, n_in, row0, tid)
                else:
                    fetch_word(bits, d, 0, w_q, w_d, lay, first + ra, step * 4 + (tid & 3))
                    fetch_word(bits, d, 1, w_q, w_d, lay, first + rb, step * 4 + (tid & 3))
                fetch_tokens(v, x, ta, tb, h * x_stride, step * DEPTH, n_in, tid)
            if step > 0:
                multiply_tile(acc, ws, xs, tid)
                ti.simt.block.sync()
        for j in ti.static(range(4)):
            for r in ti.static(range(8)):
                t, o = t0 + token_of(tid, j), row0 + row_of(tid, r)
                if t < n and o < n_out:
                    s = scale * acc[r * 4 + j]
                    if ti.static(add):
                        s += y[t, h * y_stride + o]
                    y[t, h * y_stride + o] = s


def matmul_simt(w_q, w_d, lay, x, n, scale, add, y):
    """As :func:`tmla.stages.matmul.matmul_q8`, quants in words: u64 [L, O, I/8]."""
    n_out, n_in = w_d.shape[1], w_d.shape[2] * 32
    _matmul_tiles(w_q, w_d, lay, False, 1, n_out, n_in, 0, 0, x, 0, n, scale, add, y, 0)


def head_matmul_simt(w_q, w_d, lay, across, n_heads, n_out, n_in, stride, offset, x, x_stride, n, y, y_stride):
    """As :func:`tmla.stages.head_rows.head_matmul`."""
    heads = (across, n_heads, n_out, n_in, stride, offset)
    _matmul_tiles(w_q, w_d, lay, *heads, x, x_stride, n, 1.0, False, y, y_stride)
