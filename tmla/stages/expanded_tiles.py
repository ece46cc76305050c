"""Causal attention of a chunk of tokens on a GPU, expanded: each head's own keys and values.

Keys and values of the segment are made before (:func:`tmla.stages.head_rows.expand_rows`); the softmax between the
two products is that of :mod:`tmla.stages.chunk_attention_tiles`.
"""

import taichi as ti

from tmla.stages.attention_tiles import cached, four
from tmla.stages.chunk_attention_tiles import weight_rows
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
    multiply_tile,
    put_f32_rows,
    put_fetched_tokens,
    put_pair,
    row_of,
    token_of,
)


@ti.kernel
def _spread_rows(w: ti.template(), lay: ti.i32, r0: ti.i32, n_rows: ti.i32, rows: ti.template()):
    """rows[r] = cached row r0 + r, in f32."""
    per_row = ti.static(cdiv(w.row_width, 4))
    per_value = ti.static(2 if w.cache_f32 else 1)
    for i in range(n_rows * per_row):
        r = i // per_row
        word = i - r * per_row
        bits = ti.Vector([ti.u64(0) for _ in ti.static(range(per_value))], dt=ti.u64)
        cached(bits, 0, w.cache, lay, r0 + r, word, w.cache_f32)
        v = four(bits, 0, w.cache_f32)
        for q in ti.static(range(4)):
            if word * 4 + q < w.row_width:
                rows[r, word * 4 + q] = v[q]


@ti.kernel
def _expanded_score_tiles(
    w: ti.template(),
    q: ti.template(),
    keys: ti.template(),
    pos0: ti.i32,
    n: ti.i32,
    r0: ti.i32,
    n_rows: ti.i32,
    p: ti.template(),
):
    """p[t H + h, r] = query of token t, head h . key r of the head."""
    n_heads, n_in = ti.static(w.n_heads, w.n_nope + w.n_rope)
    ti.loop_config(block_dim=BLOCK)
    for i in range(n_heads * ((n_rows + (ROWS - 1)) // ROWS) * ((n + (TOKENS - 1)) // TOKENS) * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        token_tiles, row_tiles = (n + (TOKENS - 1)) // TOKENS, (n_rows + (ROWS - 1)) // ROWS
        unit, t0 = blk // token_tiles, blk % token_tiles * TOKENS
        h, row0 = unit // row_tiles, unit % row_tiles * ROWS
        if r0 + row0 <= pos0 + ti.min(t0 + TOKENS, n) - 1:  # else none of them sees any
            ta, tb = ti.min(t0 + 2 * (tid >> 3), n - 1), ti.min(t0 + 2 * (tid >> 3) + 1, n - 1)
            acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
            m = ti.Vector([0.0 for _ in ti.static(range(16))])
            v = ti.Vector([0.0 for _ in ti.static(range(8))])
            for step in range(ti.static(cdiv(w.n_nope + w.n_rope, DEPTH) + 1)):
                if step > 0:
                    put_f32_rows(ws, m, tid)
                    put_fetched_tokens(xs, v, tid)
                    ti.simt.block.sync()
                if step < ti.static(cdiv(w.n_nope + w.n_rope, DEPTH)):
                    for s in ti.static(range(4)):
                        row = ti.min(row0 + 2 * ((tid >> 3) + 32 * (s // 2)) + s % 2, n_rows - 1)
                        for e in ti.static(range(4)):  # behind the head's end queries are 0
                            k = ti.min(step * DEPTH + (tid & 7) * 4 + e, n_in - 1)
                            m[s * 4 + e] = keys[row, h * n_in + k]
                    fetch_tokens(v, q, ta, tb, h * n_in, step * DEPTH, n_in, tid)
                if step > 0:
                    multiply_tile(acc, ws, xs, tid)
                    ti.simt.block.sync()
            for j in ti.static(range(4)):
                for r in ti.static(range(8)):
                    t, row = t0 + token_of(tid, j), row0 + row_of(tid, r)
                    if t < n and row < n_rows:
                        p[t * n_heads + h, row] = acc[r * 4 + j]


@ti.kernel
def _expanded_value_tiles(
    w: ti.template(),
    pos0: ti.i32,
    n: ti.i32,
    r0: ti.i32,
    n_rows: ti.i32,
    first: ti.i32,
    a: ti.template(),
    o: ti.template(),
):
    """o[t, h] = (o[t, h] * rescale + weights . values of the head) * factor."""
    n_heads = ti.static(w.n_heads)
    column_tiles = ti.static(cdiv(w.n_v, ROWS))
    ti.loop_config(block_dim=BLOCK)
    for i in range(n_heads * column_tiles * ((n + (TOKENS - 1)) // TOKENS) * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        token_tiles = (n + (TOKENS - 1)) // TOKENS
        unit, t0 = blk // token_tiles, blk % token_tiles * TOKENS
        h, col0 = unit // column_tiles, unit % column_tiles * ROWS
        n_seen = ti.min(n_rows, pos0 + ti.min(t0 + TOKENS, n) - r0)
        if n_seen > 0:
            ta, tb = ti.min(t0 + 2 * (tid >> 3), n - 1), ti.min(t0 + 2 * (tid >> 3) + 1, n - 1)
            acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
            m = ti.Vector([0.0 for _ in ti.static(range(16))])
            v = ti.Vector([0.0 for _ in ti.static(range(8))])
            n_steps = (n_seen + (DEPTH - 1)) // DEPTH
            for step in range(n_steps + 1):
                if step > 0:
                    for s in ti.static(range(8)):
                        put_pair(ws, (tid >> 6) + 4 * s, tid & 63, m[2 * s], m[2 * s + 1])
                    put_fetched_tokens(xs, v, tid)
                    ti.simt.block.sync()
                if step < n_steps:
                    for s in ti.static(range(8)):  # thread 64 k + c has columns 2 c, 2 c + 1 of rows k, k + 4 ...
                        row = ti.min(step * DEPTH + (tid >> 6) + 4 * s, n_rows - 1)  # behind the end weights are 0
                        for e in ti.static(range(2)):
                            m[2 * s + e] = a.values[row, h * w.n_v + ti.min(col0 + 2 * (tid & 63) + e, w.n_v - 1)]
                    for e in ti.static(range(4)):
                        k = step * DEPTH + (tid & 7) * 4 + e
                        v[e], v[4 + e] = a.p[ta * n_heads + h, k], a.p[tb * n_heads + h, k]
                if step > 0:
                    multiply_tile(acc, ws, xs, tid)
                    ti.simt.block.sync()
            for j in ti.static(range(4)):
                t = t0 + token_of(tid, j)
                if t < n:
                    for r in ti.static(range(8)):
                        c = col0 + row_of(tid, r)
                        if c < w.n_v:
                            s = acc[r * 4 + j]
                            if first == 0:  # what an earlier chunk left there may be NaN
                                s += o[t, h * w.n_v + c] * a.rescale[t * n_heads + h]
                            o[t, h * w.n_v + c] = s * a.factor[t * n_heads + h]


def spread_rows_simt(w, lay, r0, n_rows, rows):
    """Cached rows r0 .. r0 + n_rows as f32 [S, C + R]."""
    _spread_rows(w, lay, r0, n_rows, rows)


def expanded_segment_simt(w, q, pos0, n, r0, n_rows, a, o):
    """One segment, expanded: ``keys`` [S, H (N + R)] and ``values`` [S, H V] are made already."""
    _expanded_score_tiles(w, q, a.keys, pos0, n, r0, n_rows, a.p)
    weight_rows(w, pos0, n, r0, n_rows, int(r0 == 0), a)
    _expanded_value_tiles(w, pos0, n, r0, n_rows, int(r0 == 0), a, o)
