"""Matrix times many activation rows on a GPU: a block makes a tile of sums (:mod:`tmla.stages.tile`)."""

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
    put_rows,
    row_of,
    token_of,
)


@ti.kernel
def _matmul_tiles(
    w_q: ti.template(),
    w_d: ti.template(),
    lay: ti.i32,
    x: ti.template(),
    n: ti.i32,
    scale: ti.f32,
    add: ti.template(),
    y: ti.template(),
):
    n_out, n_in = ti.static(w_d.shape[1], w_d.shape[2] * 32)
    ti.loop_config(block_dim=BLOCK)
    for i in range(ti.static(cdiv(w_d.shape[1], ROWS)) * ((n + (TOKENS - 1)) // TOKENS) * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        n_token_tiles = (n + (TOKENS - 1)) // TOKENS  # neighbouring blocks share their matrix rows
        row0, t0 = blk // n_token_tiles * ROWS, blk % n_token_tiles * TOKENS
        ra, rb = ti.min(row0 + 2 * (tid >> 2), n_out - 1), ti.min(row0 + 2 * (tid >> 2) + 1, n_out - 1)
        ta, tb = ti.min(t0 + 2 * (tid >> 3), n - 1), ti.min(t0 + 2 * (tid >> 3) + 1, n - 1)
        acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
        bits = ti.Vector([ti.u64(0) for _ in ti.static(range(2))], dt=ti.u64)
        d = ti.Vector([0.0 for _ in ti.static(range(2))])
        v = ti.Vector([0.0 for _ in ti.static(range(8))])
        for step in range(ti.static(w_d.shape[2] + 1)):  # put step - 1, fetch step, multiply step - 1
            if step > 0:
                put_rows(ws, bits, d, tid)
                put_fetched_tokens(xs, v, tid)
                ti.simt.block.sync()
            if step < ti.static(w_d.shape[2]):
                fetch_word(bits, d, 0, w_q, w_d, lay, ra, step * 4 + (tid & 3))
                fetch_word(bits, d, 1, w_q, w_d, lay, rb, step * 4 + (tid & 3))
                fetch_tokens(v, x, ta, tb, 0, step * DEPTH, n_in, tid)
            if step > 0:
                multiply_tile(acc, ws, xs, tid)
                ti.simt.block.sync()
        for j in ti.static(range(4)):
            for r in ti.static(range(8)):
                t, o = t0 + token_of(tid, j), row0 + row_of(tid, r)
                if t < n and o < n_out:
                    s = scale * acc[r * 4 + j]
                    if ti.static(add):
                        s += y[t, o]
                    y[t, o] = s


def matmul_simt(w_q, w_d, lay, x, n, scale, add, y):
    """As :func:`tmla.stages.matmul.matmul_q8`, quants in words: u64 [L, O, I/8]."""
    _matmul_tiles(w_q, w_d, lay, x, n, scale, add, y)
