"""Causal attention of a chunk of tokens on a GPU, absorbed: scores, weights, values, three dispatches a segment.

A *query* is one head of one token, number ``t H + h``: all share the cached rows, so both products are plain matrix
products (:mod:`tmla.stages.tile`): queries times keys, then weights times latents. Tiles that none of their queries may
see are left out. Between segments goes an online softmax, one group of lanes a query.
"""

import taichi as ti

from tmla.stages.attention import NEG_INF
from tmla.stages.attention_tiles import cached, four
from tmla.stages.lanes import cdiv, lane_max, lane_sum, log2, width
from tmla.stages.tile import (
    BLOCK,
    DEPTH,
    ROW_PAIRS,
    ROWS,
    SUMS,
    TOKEN_PAIRS,
    TOKENS,
    multiply_tile,
    put_fetched_tokens,
    put_pair,
    row_of,
    token_of,
)

SCORE_BYTES = 64 << 20  # of a chunk's scores of one segment


def segment_rows(n_queries: int, expanded_width: int) -> int:
    """Cached rows of a segment: as many as SCORE_BYTES hold scores of, or expanded keys and values of."""
    return max(1, min(16, SCORE_BYTES // (4 * max(n_queries, expanded_width) * 256))) * 256


@ti.func
def _fetch_queries(
    v: ti.template(), qa: ti.template(), n_heads: ti.template(), qw: ti.template(), ma, mb, k0, n_in, tid
):
    for i in ti.static(range(4)):
        k = k0 + (tid & 7) * 4 + i
        v[i], v[4 + i] = 0.0, 0.0
        if k < n_in:
            v[i] = qa[ma // n_heads, ma % n_heads * qw + k]
            v[4 + i] = qa[mb // n_heads, mb % n_heads * qw + k]


@ti.func
def _fetch_keys(kw: ti.template(), w: ti.template(), lay, r0, row0, last, k0, tid):
    """Four values each of two pairs of rows: thread ``8 r + q`` has values ``k0 + 4 q`` of pairs r and r + 32."""
    word = ti.min(k0 // 4 + (tid & 7), ti.static(cdiv(w.row_width, 4) - 1))  # behind the row's end queries are 0
    for s in ti.static(range(4)):
        row = ti.min(row0 + 2 * ((tid >> 3) + 32 * (s // 2)) + s % 2, last)
        cached(kw, s, w.cache, lay, r0 + row, word, w.cache_f32)


@ti.func
def _put_keys(ws: ti.template(), kw: ti.template(), w: ti.template(), tid):
    for s in ti.static(range(2)):
        a, b = four(kw, 2 * s, w.cache_f32), four(kw, 2 * s + 1, w.cache_f32)
        for i in ti.static(range(4)):
            put_pair(ws, (tid & 7) * 4 + i, (tid >> 3) + 32 * s, a[i], b[i])


@ti.kernel
def _score_tiles(
    w: ti.template(),
    lay: ti.i32,
    qa: ti.template(),
    pos0: ti.i32,
    n: ti.i32,
    r0: ti.i32,
    n_rows: ti.i32,
    p: ti.template(),
):
    """p[m, r] = query m . cached row r0 + r."""
    n_heads, qw = ti.static(w.n_heads, qa.shape[1] // w.n_heads)
    per_row = ti.static(2 if w.cache_f32 else 1)  # u64 that four cached values take
    ti.loop_config(block_dim=BLOCK)
    for i in range(((n_rows + (ROWS - 1)) // ROWS) * ((n * n_heads + (TOKENS - 1)) // TOKENS) * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        n_query = n * n_heads
        query_tiles = (n_query + (TOKENS - 1)) // TOKENS
        row0, m0 = blk // query_tiles * ROWS, blk % query_tiles * TOKENS
        if r0 + row0 <= pos0 + ti.min(m0 + TOKENS - 1, n_query - 1) // n_heads:  # else none of them sees any
            ma, mb = ti.min(m0 + 2 * (tid >> 3), n_query - 1), ti.min(m0 + 2 * (tid >> 3) + 1, n_query - 1)
            acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
            kw = ti.Vector([ti.u64(0) for _ in ti.static(range(4 * per_row))], dt=ti.u64)
            v = ti.Vector([0.0 for _ in ti.static(range(8))])
            for step in range(ti.static(cdiv(w.row_width, DEPTH) + 1)):
                if step > 0:
                    _put_keys(ws, kw, w, tid)
                    put_fetched_tokens(xs, v, tid)
                    ti.simt.block.sync()
                if step < ti.static(cdiv(w.row_width, DEPTH)):
                    _fetch_keys(kw, w, lay, r0, row0, n_rows - 1, step * DEPTH, tid)
                    _fetch_queries(v, qa, n_heads, qw, ma, mb, step * DEPTH, w.row_width, tid)
                if step > 0:
                    multiply_tile(acc, ws, xs, tid)
                    ti.simt.block.sync()
            for j in ti.static(range(4)):
                for r in ti.static(range(8)):
                    m, row = m0 + token_of(tid, j), row0 + row_of(tid, r)
                    if m < n_query and row < n_rows:
                        p[m, row] = acc[r * 4 + j]


@ti.kernel
def weight_rows(w: ti.template(), pos0: ti.i32, n: ti.i32, r0: ti.i32, n_rows: ti.i32, first: ti.i32, a: ti.template()):
    """Scores to weights, 0 for what a query must not see; its maximum, sum, rescale and final factor."""
    n_heads, wd = ti.static(w.n_heads, width())
    ti.loop_config(block_dim=BLOCK)
    for i in range((n * n_heads * wd + (BLOCK - 1)) // BLOCK * BLOCK):
        lane = i & ti.static(width() - 1)
        m = i >> ti.static(log2(width()))
        if m < n * n_heads:
            t = m // n_heads
            h = m - t * n_heads
            own = pos0 + t - r0  # place of its own row in the segment
            n_seen = ti.max(0, ti.min(n_rows, own + 1))
            top, total = NEG_INF, 0.0
            if first == 0 and lane == 0:  # the lane that writes them: on Metal no barrier orders buffers
                top, total = a.top[t, h], a.total[t, h]
            best = top
            for k in range((n_seen + (wd - 1)) // wd):
                r = k * wd + lane
                if r < n_seen:
                    best = ti.max(best, a.p[m, r])
            best = lane_max(best)
            s = 0.0
            for k in range((n_rows + (DEPTH - 1)) // DEPTH * ti.static(cdiv(DEPTH, width()))):
                r = k * wd + lane
                e = 0.0
                if r < n_seen:
                    e = ti.exp(a.p[m, r] - best)
                s += e
                if r < a.p.shape[1]:
                    a.p[m, r] = e
            new = lane_sum(s)
            if lane == 0:
                rescale = ti.exp(top - best)
                total = total * rescale + new
                a.top[t, h] = best
                a.total[t, h] = total
                a.rescale[m] = rescale
                a.factor[m] = 1.0 / total if own >= 0 and own < a.p.shape[1] else 1.0


@ti.func
def _fetch_latents(lw: ti.template(), w: ti.template(), lay, r0, last, k0, col0, tid):
    """Four values each of four rows: thread ``32 k + q`` has columns ``col0 + 4 q`` of rows k, k + 8 and so on."""
    word = ti.min(col0 // 4 + (tid & 31), ti.static(w.n_latent // 4 - 1))
    for s in ti.static(range(4)):
        row = ti.min(k0 + (tid >> 5) + 8 * s, last)  # behind the end weights are 0
        cached(lw, s, w.cache, lay, r0 + row, word, w.cache_f32)


@ti.func
def _put_latents(ws: ti.template(), lw: ti.template(), w: ti.template(), tid):
    for s in ti.static(range(4)):
        v = four(lw, s, w.cache_f32)
        for q in ti.static(range(2)):
            put_pair(ws, (tid >> 5) + 8 * s, (tid & 31) * 2 + q, v[2 * q], v[2 * q + 1])


@ti.kernel
def _value_tiles(
    w: ti.template(),
    lay: ti.i32,
    pos0: ti.i32,
    n: ti.i32,
    r0: ti.i32,
    n_rows: ti.i32,
    first: ti.i32,
    a: ti.template(),
    mix: ti.template(),
):
    """mix[m] = (mix[m] * rescale + weights . latents) * factor."""
    n_heads = ti.static(w.n_heads)
    column_tiles = ti.static(cdiv(w.n_latent, ROWS))
    per_row = ti.static(2 if w.cache_f32 else 1)
    ti.loop_config(block_dim=BLOCK)
    for i in range(column_tiles * ((n * n_heads + (TOKENS - 1)) // TOKENS) * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        n_query = n * n_heads
        col0, m0 = blk % column_tiles * ROWS, blk // column_tiles * TOKENS
        n_seen = ti.min(n_rows, pos0 + ti.min(m0 + TOKENS - 1, n_query - 1) // n_heads - r0 + 1)
        if n_seen > 0:
            ma, mb = ti.min(m0 + 2 * (tid >> 3), n_query - 1), ti.min(m0 + 2 * (tid >> 3) + 1, n_query - 1)
            acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
            lw = ti.Vector([ti.u64(0) for _ in ti.static(range(4 * per_row))], dt=ti.u64)
            v = ti.Vector([0.0 for _ in ti.static(range(8))])
            n_steps = (n_seen + (DEPTH - 1)) // DEPTH
            for step in range(n_steps + 1):
                if step > 0:
                    _put_latents(ws, lw, w, tid)
                    put_fetched_tokens(xs, v, tid)
                    ti.simt.block.sync()
                if step < n_steps:
                    _fetch_latents(lw, w, lay, r0, n_rows - 1, step * DEPTH, col0, tid)
                    for q in ti.static(range(4)):
                        k = step * DEPTH + (tid & 7) * 4 + q
                        v[q], v[4 + q] = a.p[ma, k], a.p[mb, k]
                if step > 0:
                    multiply_tile(acc, ws, xs, tid)
                    ti.simt.block.sync()
            for j in ti.static(range(4)):
                m = m0 + token_of(tid, j)
                if m < n_query:
                    t = m // n_heads
                    for r in ti.static(range(8)):
                        c = col0 + row_of(tid, r)
                        if c < w.n_latent:
                            at = (m - t * n_heads) * w.n_latent + c
                            s = acc[r * 4 + j]
                            if first == 0:  # what an earlier chunk left there may be NaN
                                s += mix[t, at] * a.rescale[m]
                            mix[t, at] = s * a.factor[m]


def absorbed_segment_simt(w, lay, qa, pos0, n, r0, n_rows, a, mix):
    """One segment of :func:`tmla.stages.chunk_attention.attend_rows`, absorbed.

    Scratch: ``p`` [T H, segment], ``rescale``, ``factor`` [T H], ``top``, ``total`` [T, H].
    """
    _score_tiles(w, lay, qa, pos0, n, r0, n_rows, a.p)
    weight_rows(w, pos0, n, r0, n_rows, int(r0 == 0), a)
    _value_tiles(w, lay, pos0, n, r0, n_rows, int(r0 == 0), a, mix)
