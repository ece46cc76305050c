"""Causal MQA attention of a chunk of tokens over the compressed rows (CPU).

Token t of the chunk, at position ``pos0 + t``, sees the cached rows 0 .. pos0 + t. The context is taken in segments; a
segment's rows go to f32 scratch twice, as they are (keys) and turned (values), so that scores and values are both sums
over neighbouring numbers. From segment to segment goes an online softmax (Milakov and Gimelshein, 2018).
:mod:`tmla.stages.chunk_attention_tiles` is the GPU's.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.attention import NEG_INF, attention_ref
from tmla.stages.chunk_attention_tiles import attend_rows_simt
from tmla.stages.matmul import TOKENS, dots, put_six
from tmla.stages.threads import SPREAD, share, slots

SEGMENT = 256  # cached rows between two rescales
QUERIES = 48  # tokens of one head that a thread works on


@ti.kernel
def _spread_segment(
    w: ti.template(), lay: ti.i32, r0: ti.i32, n_rows: ti.i32, keys: ti.template(), values: ti.template()
):
    """keys[0, r (C + R) + c] and values[0, c SEGMENT + r] of the cached rows r0 + r; values behind n_rows are 0."""
    for i in range(ti.static(slots() * SPREAD)):
        if i % SPREAD == 0:
            span = share(i, SEGMENT)
            for r in range(span[0], span[1]):
                if r < n_rows:
                    for c in range(w.row_width):
                        keys[0, r * w.row_width + c] = ti.cast(w.cache[lay, r0 + r, c], ti.f32)
                    for c in range(w.n_latent):
                        values[0, c * SEGMENT + r] = keys[0, r * w.row_width + c]
                else:
                    for c in range(w.n_latent):
                        values[0, c * SEGMENT + r] = 0.0


@ti.func
def _scores(w: ti.template(), qa: ti.template(), h, ta, te, n_keys, keys: ti.template(), p: ti.template(), p0):
    """p[p0 + t - ta, r] = qa[t, h] . keys[r]."""
    width, x0 = ti.static(w.row_width), h * ti.static(qa.shape[1] // w.n_heads)
    for kp in range((n_keys + 1) // 2):
        ra, rb = 2 * kp, ti.min(2 * kp + 1, n_keys - 1)
        for tg in range((te - ta + (TOKENS - 1)) // TOKENS):
            t0 = ta + tg * TOKENS
            t1, t2 = ti.min(t0 + 1, te - 1), ti.min(t0 + 2, te - 1)
            v = dots(keys, 0, ra * width, rb * width, qa, t0, t1, t2, x0, width)
            put_six(p, p0 + t0 - ta, p0 + t1 - ta, p0 + t2 - ta, ra, rb, v, False)


@ti.func
def _weights(w: ti.template(), h, t, own, n_keys, first, p: ti.template(), row, a: ti.template()):
    """Scores of one query into weights; the rows it must not see get 0. `own`: its own row's place in the segment."""
    n_seen = ti.max(0, ti.min(n_keys, own + 1))
    top_old, total = NEG_INF, 0.0
    if not first:
        top_old, total = a.top[t, h], a.total[t, h]
    top = top_old
    for r in range(n_seen):
        top = ti.max(top, p[row, r])
    rescale, new = ti.exp(top_old - top), 0.0
    for r in range(n_seen):
        e = ti.exp(p[row, r] - top)
        p[row, r] = e
        new += e
    for r in range(n_seen, n_keys):
        p[row, r] = 0.0
    total = total * rescale + new
    a.top[t, h] = top
    a.total[t, h] = total
    a.rescale[row] = rescale
    a.factor[row] = 1.0 / total if 0 <= own < SEGMENT else 1.0  # its last segment: normalise


@ti.func
def _values(w: ti.template(), h, ta, te, n_keys, first, p: ti.template(), p0, a: ti.template(), mix: ti.template()):
    """mix[t, h] = (mix[t, h] * rescale + weights . values) * factor."""
    for cp in range(w.n_latent // 2):
        ca, cb = 2 * cp, 2 * cp + 1
        for tg in range((te - ta + (TOKENS - 1)) // TOKENS):
            t0 = ta + tg * TOKENS
            t1, t2 = ti.min(t0 + 1, te - 1), ti.min(t0 + 2, te - 1)
            q0, q1, q2 = p0 + t0 - ta, p0 + t1 - ta, p0 + t2 - ta
            v = dots(a.values, 0, ca * SEGMENT, cb * SEGMENT, p, q0, q1, q2, 0, n_keys)
            oa, ob = h * w.n_latent + ca, h * w.n_latent + cb
            if not first:  # what an earlier chunk left there may be NaN
                v[0] += mix[t0, oa] * a.rescale[q0]
                v[1] += mix[t0, ob] * a.rescale[q0]
                v[2] += mix[t1, oa] * a.rescale[q1]
                v[3] += mix[t1, ob] * a.rescale[q1]
                v[4] += mix[t2, oa] * a.rescale[q2]
                v[5] += mix[t2, ob] * a.rescale[q2]
            f0, f1, f2 = a.factor[q0], a.factor[q1], a.factor[q2]
            mix[t0, oa], mix[t0, ob] = v[0] * f0, v[1] * f0
            mix[t1, oa], mix[t1, ob] = v[2] * f1, v[3] * f1
            mix[t2, oa], mix[t2, ob] = v[4] * f2, v[5] * f2


@ti.kernel
def _attend_segment(
    w: ti.template(), qa: ti.template(), pos0: ti.i32, n: ti.i32, r0: ti.i32, a: ti.template(), mix: ti.template()
):
    n_block = (n + (QUERIES - 1)) // QUERIES
    for i in range(ti.static(slots() * SPREAD)):
        if i % SPREAD == 0:
            span = share(i, w.n_heads * n_block)
            for u in range(span[0], span[1]):
                h = u // n_block
                ta = (u - h * n_block) * QUERIES
                te = ti.min(ta + QUERIES, n)
                n_keys = ti.min(SEGMENT, pos0 + te - r0)
                if n_keys > 0:
                    p0 = (i // SPREAD) * QUERIES
                    _scores(w, qa, h, ta, te, n_keys, a.keys, a.p, p0)
                    for t in range(ta, te):
                        _weights(w, h, t, pos0 + t - r0, n_keys, r0 == 0, a.p, p0 + t - ta, a)
                    _values(w, h, ta, te, n_keys, r0 == 0, a.p, p0, a, mix)


def attend_rows(w, lay, qa, pos0, n, scratch, mix):
    """Attend from every head of `n` tokens to the cached rows each may see.

    Parameters
    ----------
    w : AttentionBank
        ``cache``, ``row_width`` (C + R), ``n_latent`` (C), ``n_heads`` (H). Rows up to ``pos0 + n`` are written.
    lay : int
    qa : ti.Field, f32 [T, H * width]
        Fused query rows, score scale included.
    pos0, n : int
        Position of the first token, and number of tokens.
    scratch : ChunkAttentionScratch
    mix : ti.Field, f32 [T, H * C]
        Takes each head's latent mix.

    Notes
    -----
    About ``2 H (2 C + R) n (pos0 + n / 2)`` operations. Reference: :func:`attend_rows_ref`.
    """
    if runtime.caps().gpu:
        attend_rows_simt(w, lay, qa, pos0, n, scratch, mix)
        return
    for r0 in range(0, pos0 + n, SEGMENT):
        _spread_segment(w, lay, r0, min(SEGMENT, pos0 + n - r0), scratch.keys, scratch.values)
        _attend_segment(w, qa, pos0, n, r0, scratch, mix)


def attend_rows_ref(rows, qa, pos0, n_latent):
    """NumPy reference: cached rows [>= pos0 + T, C + R], queries [T, H, C + R] -> latent mix float64 [T, H, C]."""
    return np.stack([attention_ref(rows[: pos0 + t + 1], q, n_latent) for t, q in enumerate(qa)])
