"""Stages of a chunk of tokens that treat each row by itself: embedding, RMSNorm, cache rows, query rope.

Row t of the chunk stands at position ``pos0 + t``. On a CPU a thread takes a share of the rows, on a GPU a block one.
The single-token forms with their references are :mod:`tmla.stages.embed`, `norm`, `cache_row` and `rope`.
"""

import taichi as ti

from tmla import runtime
from tmla.stages.cache_row import cache_row_block, write_row
from tmla.stages.lanes import cdiv, log2, width
from tmla.stages.linear import Q8_BLOCK, q8_value
from tmla.stages.rope import turned
from tmla.stages.threads import SPREAD, share, team
from tmla.stages.words import rms_factor

BLOCK = 256


@ti.kernel
def _embed_rows(
    w_q: ti.template(), w_d: ti.template(), tokens: ti.template(), n: ti.i32, scale: ti.f32, x: ti.template()
):
    dim = ti.static(x.shape[1])
    for k in range(n * dim):
        t = k // dim
        i = k - t * dim
        x[t, i] = scale * ti.cast(w_d[0, tokens[t], i // Q8_BLOCK], ti.f32) * q8_value(w_q, 0, tokens[t], i)


@ti.kernel
def _norm_rows_loop(x: ti.template(), w: ti.template(), lay: ti.i32, n: ti.i32, eps: ti.f32, y: ti.template()):
    dim = ti.static(w.shape[1])
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n)
            for t in range(span[0], span[1]):
                ss = 0.0
                for c in range(dim):
                    ss += x[t, c] * x[t, c]
                inv = 1.0 / ti.sqrt(ss / dim + eps)
                for c in range(dim):
                    y[t, c] = x[t, c] * inv * w[lay, c]


@ti.kernel
def _norm_rows_simt(x: ti.template(), w: ti.template(), lay: ti.i32, n: ti.i32, eps: ti.template(), y: ti.template()):
    dim = ti.static(w.shape[1])
    ti.loop_config(block_dim=BLOCK)
    for i in range(n * BLOCK):
        part = ti.simt.block.SharedArray(ti.static(BLOCK // width()), ti.f32)
        tid, t = i & (BLOCK - 1), i >> ti.static(log2(BLOCK))
        sq = 0.0
        for k in range(ti.static(cdiv(w.shape[1], BLOCK))):
            c = k * BLOCK + tid
            if c < dim:
                sq += x[t, c] * x[t, c]
        inv = rms_factor(sq, part, 0, tid, dim, eps, BLOCK)
        for k in range(ti.static(cdiv(w.shape[1], BLOCK))):
            c = k * BLOCK + tid
            if c < dim:
                y[t, c] = x[t, c] * inv * w[lay, c]
        ti.simt.block.sync()  # a block may take another row


@ti.kernel
def _cache_rows_loop(w: ti.template(), lay: ti.i32, proj: ti.template(), table: ti.template(), pos0: ti.i32, n: ti.i32):
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n)
            for t in range(span[0], span[1]):
                row, pos = ti.min(t, n - 1), ti.min(pos0 + t, ti.static(w.cache.shape[1] - 1))
                write_row(proj, row, w.row0, w.kv_a_norm, lay, w.eps, table, w.half_pairs, w.cache, pos)


@ti.kernel
def _cache_rows_simt(w: ti.template(), lay: ti.i32, proj: ti.template(), table: ti.template(), pos0: ti.i32, n: ti.i32):
    ti.loop_config(block_dim=BLOCK)
    for i in range(n * BLOCK):
        part = ti.simt.block.SharedArray(ti.static(BLOCK // width()), ti.f32)
        tid, t = i & (BLOCK - 1), i >> ti.static(log2(BLOCK))
        cache_row_block(
            tid,
            part,
            proj,
            t,
            w.row0,
            w.kv_a_norm,
            lay,
            w.eps,
            table,
            w.half_pairs,
            w.cache,
            pos0 + t,
            w.cache_f32,
            BLOCK,
        )
        ti.simt.block.sync()  # a block may take another row


@ti.kernel
def _turn_queries(
    w: ti.template(), q: ti.template(), table: ti.template(), scale: ti.template(), pos0: ti.i32, n: ti.i32
):
    n_pair, per_head, n_heads = ti.static(table.shape[1], w.n_nope // 2 + table.shape[1], w.n_heads)
    for k in range(n * n_heads * per_head):
        th = k // per_head
        e = k - th * per_head
        t = th // n_heads
        at, s = (th - t * n_heads) * (w.n_nope + 2 * n_pair), scale[pos0 + t]
        if e < n_pair:
            v = turned(q, t, at + w.n_nope, e, table, pos0 + t, w.half_pairs) * s
            i, j = at + w.n_nope + 2 * e, at + w.n_nope + 2 * e + 1
            if ti.static(w.half_pairs):
                i, j = at + w.n_nope + e, at + w.n_nope + e + n_pair
            q[t, i] = v[0]
            q[t, j] = v[1]
        else:
            i = at + 2 * (e - n_pair)
            q[t, i] = q[t, i] * s
            q[t, i + 1] = q[t, i + 1] * s


@ti.kernel
def _copy_rows(x: ti.template(), t0: ti.i32, n: ti.i32, y: ti.template()):
    dim = ti.static(y.shape[1])
    for k in range(n * dim):
        t = k // dim
        y[t, k - t * dim] = x[t0 + t, k - t * dim]


@ti.kernel
def _copy_pe(
    x: ti.template(),
    x_stride: ti.template(),
    x0: ti.template(),
    n: ti.i32,
    y: ti.template(),
    y_stride: ti.template(),
    y0: ti.template(),
    n_heads: ti.template(),
    n_rope: ti.template(),
):
    for k in range(n * ti.static(n_heads * n_rope)):
        t = k // ti.static(n_heads * n_rope)
        e = k - t * ti.static(n_heads * n_rope)
        h = e // n_rope
        r = e - h * n_rope
        y[t, h * y_stride + y0 + r] = x[t, h * x_stride + x0 + r]


def copy_pe(x, x_stride, x0, n, y, y_stride, y0, n_heads, n_rope):
    """Copy every head's window of R values, on any backend: ``y[t, h y_stride + y0 :] = x[t, h x_stride + x0 :]``."""
    _copy_pe(x, x_stride, x0, n, y, y_stride, y0, n_heads, n_rope)


def copy_rows(x, t0, n, y):
    """``y[:n] = x[t0 : t0 + n]``, f32 [T, D]."""
    _copy_rows(x, t0, n, y)


def embed_rows(w_q, w_d, tokens, n, scale, x):
    """Write the embeddings of ``tokens[:n]``, times `scale`: [1, n_vocab, D] and i32 [T] -> f32 [T, D].

    Every token lies in the vocabulary: the caller's duty. Reference: :func:`tmla.stages.embed.embed_ref`.
    """
    _embed_rows(w_q, w_d, tokens, n, scale, x)


def norm_rows(x, w, lay, n, eps, y):
    """Normalise `n` rows: the first ``w.shape[1]`` values of f32 [T, >= D], by f32 [L, D] at `lay`, into f32 [T, D].

    Reference: :func:`tmla.stages.norm.rms_norm_ref`.
    """
    (_norm_rows_simt if runtime.caps().gpu else _norm_rows_loop)(x, w, lay, n, eps, y)


def cache_rows(w, lay, proj, table, pos0, n):
    """Write ``w.cache[lay, pos0 : pos0 + n]`` from the kv_a projections, which stand at ``proj[:, w.row0:]``.

    Reference, row by row: :func:`tmla.stages.cache_row.cache_row_ref`.
    """
    (_cache_rows_simt if runtime.caps().gpu else _cache_rows_loop)(w, lay, proj, table, pos0, n)


def turn_queries(w, q, table, scale, pos0, n):
    """Turn the pe windows of `n` tokens' queries, f32 [T, >= H (N + R)], in place, and multiply all by the score scale.

    `table` f32 [n_ctx, R/2, 2] and `scale` f32 [n_ctx] are read from position `pos0` on. Reference:
    :func:`tmla.stages.rope.rope_ref`, times the scale.
    """
    _turn_queries(w, q, table, scale, pos0, n)
