"""MQA decode attention over the compressed rows: one key-value head of width C + R, whose first C values are V.

The context is cut into splits, each an independent online softmax (Milakov and Gimelshein, 2018) that leaves a maximum,
a sum and an unnormalised latent sum; :mod:`tmla.stages.v_combine` joins them. Within a split, rows are taken by tiles
and each tile serves every head, so that a cached row is fetched once. This file is the CPU's;
:mod:`tmla.stages.attention_tiles` and :mod:`tmla.stages.attention_short` are the GPU's.
"""

import numpy as np
import taichi as ti

from tmla.stages.threads import SPREAD, share, team

TILE = 32  # cached rows per rescale
HEADS = 4  # heads that share one pass over a tile's rows (accumulators stay in registers)
ROWS = 2  # rows per pass of the score product
CHUNK = 32  # latent values per pass of the value product
NEG_INF = -3.0e38


@ti.func
def split_span(n_rows, n_splits: ti.template(), tile: ti.template()):
    """Tiles of each split, and how many splits have any: ``n_rows`` spread over at most `n_splits`."""
    n_tiles = (n_rows + (tile - 1)) // tile
    per = (n_tiles + (n_splits - 1)) // n_splits
    return ti.Vector([per, (n_tiles + per - 1) // per])


@ti.func
def _tile_scores(w: ti.template(), lay, t0, t1, qa: ti.template(), s, scores: ti.template()):
    """scores[s, h, t - t0] = qa[0, h] . cache[layer, t] for the tile's rows and all heads."""
    n_heads = ti.static(qa.shape[1])
    for hg in range((n_heads + HEADS - 1) // HEADS):
        for tg in range((t1 - t0 + ROWS - 1) // ROWS):
            # rows and heads past the end repeat the last one: the same value is written twice
            ta = t0 + tg * ROWS
            tb = ti.min(ta + 1, t1 - 1)
            h0 = hg * HEADS
            h1, h2, h3 = ti.min(h0 + 1, n_heads - 1), ti.min(h0 + 2, n_heads - 1), ti.min(h0 + 3, n_heads - 1)
            a0, a1, a2, a3 = 0.0, 0.0, 0.0, 0.0
            b0, b1, b2, b3 = 0.0, 0.0, 0.0, 0.0
            for c in range(w.row_width):
                ka = ti.cast(w.cache[lay, ta, c], ti.f32)
                kb = ti.cast(w.cache[lay, tb, c], ti.f32)
                q0, q1, q2, q3 = qa[0, h0, c], qa[0, h1, c], qa[0, h2, c], qa[0, h3, c]
                a0 += ka * q0
                a1 += ka * q1
                a2 += ka * q2
                a3 += ka * q3
                b0 += kb * q0
                b1 += kb * q1
                b2 += kb * q2
                b3 += kb * q3
            scores[s, h0, ta - t0], scores[s, h1, ta - t0] = a0, a1
            scores[s, h2, ta - t0], scores[s, h3, ta - t0] = a2, a3
            scores[s, h0, tb - t0], scores[s, h1, tb - t0] = b0, b1
            scores[s, h2, tb - t0], scores[s, h3, tb - t0] = b2, b3


@ti.func
def _tile_softmax(s, n, first, a: ti.template()):
    """Turn a tile's scores into weights relative to the running maximum; leave the rescale factor in a.rescale."""
    for h in range(a.scores.shape[1]):
        m_old = NEG_INF
        total = 0.0
        if not first:
            m_old, total = a.top[h, s], a.total[h, s]
        m = m_old
        for t in range(n):
            m = ti.max(m, a.scores[s, h, t])
        rescale = ti.exp(m_old - m)
        new = 0.0
        for t in range(n):
            p = ti.exp(a.scores[s, h, t] - m)
            a.scores[s, h, t] = p
            new += p
        for t in range(n, ti.min((n + 3) // 4 * 4, TILE)):
            a.scores[s, h, t] = 0.0  # the value product takes four rows at a time
        a.top[h, s] = m
        a.total[h, s] = total * rescale + new
        a.rescale[s, h] = rescale


@ti.func
def _tile_values(w: ti.template(), lay, t0, t1, s, first, a: ti.template()):
    """a.part[s, h] = a.part[s, h] * rescale + sum over the tile of weight * latent."""
    n_heads, n_latent = ti.static(a.part.shape[1], a.part.shape[2])
    for hg in range((n_heads + 1) // 2):
        h0 = hg * 2
        h1 = ti.min(h0 + 1, n_heads - 1)
        for b in range(n_latent // CHUNK):
            acc0, acc1 = ti.Vector.zero(ti.f32, CHUNK), ti.Vector.zero(ti.f32, CHUNK)
            for tg in range((t1 - t0 + 3) // 4):
                # rows past the end repeat the last one with weight 0
                k, last = tg * 4, t1 - t0 - 1
                p0, p1, p2, p3 = (
                    a.scores[s, h0, k],
                    a.scores[s, h0, k + 1],
                    a.scores[s, h0, k + 2],
                    a.scores[s, h0, k + 3],
                )
                r0, r1, r2, r3 = (
                    a.scores[s, h1, k],
                    a.scores[s, h1, k + 1],
                    a.scores[s, h1, k + 2],
                    a.scores[s, h1, k + 3],
                )
                ta, tb, tc, td = (
                    t0 + k,
                    t0 + ti.min(k + 1, last),
                    t0 + ti.min(k + 2, last),
                    t0 + ti.min(k + 3, last),
                )
                for j in range(CHUNK):
                    c = b * CHUNK + j
                    v0 = ti.cast(w.cache[lay, ta, c], ti.f32)
                    v1 = ti.cast(w.cache[lay, tb, c], ti.f32)
                    v2 = ti.cast(w.cache[lay, tc, c], ti.f32)
                    v3 = ti.cast(w.cache[lay, td, c], ti.f32)
                    acc0[j] += p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3
                    acc1[j] += r0 * v0 + r1 * v1 + r2 * v2 + r3 * v3
            f0, f1 = a.rescale[s, h0], a.rescale[s, h1]
            for j in range(CHUNK):
                c = b * CHUNK + j
                old0, old1 = 0.0, 0.0
                if not first:  # what an earlier token left here may be NaN
                    old0, old1 = a.part[s, h0, c], a.part[s, h1, c]
                a.part[s, h0, c] = old0 * f0 + acc0[j]
                a.part[s, h1, c] = old1 * f1 + acc1[j]


@ti.func
def attention_splits(
    first_split,
    end_split,
    w: ti.template(),
    layer: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
    a: ti.template(),
):
    """Some splits of the context; those behind its end have no rows."""
    n_rows = pos[0] + 1
    span = split_span(n_rows, a.part.shape[0], TILE)
    n_tiles = (n_rows + TILE - 1) // TILE
    for s in range(first_split, end_split):
        first = s * span[0]
        for tile in range(first, ti.min(first + span[0], n_tiles)):
            t0 = tile * TILE
            t1 = ti.min(t0 + TILE, n_rows)
            _tile_scores(w, layer[0] - w.first, t0, t1, qa, s, a.scores)
            _tile_softmax(s, t1 - t0, tile == first, a)
            _tile_values(w, layer[0] - w.first, t0, t1, s, tile == first, a)


@ti.kernel
def _attention(w: ti.template(), layer: ti.template(), pos: ti.template(), qa: ti.template(), a: ti.template()):
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, a.part.shape[0])
            attention_splits(span[0], span[1], w, layer, pos, qa, a)


def attention(w, layer, pos, qa, scratch):
    """CPU: attend from every head to the first ``pos[0] + 1`` cached rows.

    Parameters
    ----------
    w : AttentionBank
        ``cache`` f16 or f32 [L, T, C + R], ``first``, ``row_width`` (C + R).
    layer, pos : ti.Field, i32 [1]
    qa : ti.Field, f32 [1, H, >= C + R]
        Fused query rows, score scale included.
    scratch : AttentionScratch
        ``scores`` [S, H, TILE], ``rescale`` [S, H], ``top``, ``total`` [H, S], ``part`` [S, H, C], all f32. Of the
        splits used, `top` (maximum), `total` (sum of weights) and `part` (weighted latent sum) are written whole.

    Notes
    -----
    Reads ``(C + R) * bytes`` per cached row; ``2 H (2 C + R)`` operations a row. Reference: :func:`attention_ref`.
    """
    _attention(w, layer, pos, qa, scratch)


def attention_ref(rows, qa, n_latent):
    """NumPy reference: rows [T, C + R], fused queries [H, C + R] -> latent mix float64 [H, C]."""
    rows, qa = rows.astype(np.float64), qa.astype(np.float64)
    score = qa @ rows.T
    p = np.exp(score - score.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True)) @ rows[:, :n_latent]
