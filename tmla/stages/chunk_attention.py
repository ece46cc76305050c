"""Causal attention of a chunk of tokens over the cache (CPU), in the form that needs fewer operations.

Token t of the chunk, at position ``pos0 + t``, sees the cached rows 0 .. pos0 + t.

- *Absorbed*, as in decoding: every head's query meets the compressed rows themselves, 2 C + R multiplications a row and
  head; queries are carried into the latent space before, and mixes out of it behind.
- *Expanded*: each segment's keys and values are made for all heads first; N + R + V multiplications a row and head
  follow. That pays when the rows are few for the tokens that look at them: :func:`expanding_pays`.

The context is taken in segments, between which goes an online softmax (Milakov and Gimelshein, 2018). A segment's
values are turned in scratch, so that scores and values are both sums over neighbouring numbers.
:mod:`tmla.stages.chunk_attention_tiles` and :mod:`tmla.stages.expanded_tiles` are the GPU's.
"""

import dataclasses

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.attention import NEG_INF, attention_ref
from tmla.stages.chunk_attention_tiles import absorbed_segment_simt
from tmla.stages.expanded_tiles import expanded_segment_simt, spread_rows_simt
from tmla.stages.head_rows import absorb_rows, expand_rows, value_rows
from tmla.stages.matmul import TOKENS, dots, put_six
from tmla.stages.threads import SPREAD, share, team

SEGMENT = 256  # cached rows between two rescales
QUERIES = 48  # tokens of one head that a thread works on


@dataclasses.dataclass(frozen=True)
class Form:
    """Where a head's numbers stand: widths, and strides from head to head; compile-time numbers."""

    key_width: int
    key_stride: int
    query_stride: int
    n_value: int
    value_stride: int


def expanding_pays(w, pos0: int, n: int) -> bool:
    """Does the expanded form need fewer multiplications for `n` tokens behind `pos0` cached rows?"""
    heads_rows = w.n_latent * (
        w.n_nope + w.n_v
    )  # a head's matrices, once a token (absorbed) or a cached row (expanded)
    seen = n * pos0 + n * (n + 1) // 2
    absorbed = n * heads_rows + seen * (w.row_width + w.n_latent)
    return (pos0 + n) * heads_rows + seen * (w.n_nope + w.n_rope + w.n_v) < absorbed


@ti.kernel
def _spread_rows(w: ti.template(), lay: ti.i32, r0: ti.i32, n_rows: ti.i32, rows: ti.template()):
    """rows[r] = cached row r0 + r, in f32."""
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n_rows)
            for r in range(span[0], span[1]):
                for c in range(w.row_width):
                    rows[r, c] = ti.cast(w.cache[lay, r0 + r, c], ti.f32)


@ti.kernel
def _turn_values(values: ti.template(), width: ti.template(), n_rows: ti.i32, turned: ti.template()):
    """turned[0, c SEGMENT + r] = values[r, c]."""
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n_rows)
            for r in range(span[0], span[1]):
                for c in range(width):
                    turned[0, c * SEGMENT + r] = values[r, c]


@ti.func
def _scores(f: ti.template(), q: ti.template(), h, ta, te, n_keys, keys: ti.template(), p: ti.template(), p0):
    """p[p0 + t - ta, r] = query of token t . key r, for one head."""
    at = h * f.key_stride
    for kp in range((n_keys + 1) // 2):
        ra, rb = 2 * kp, ti.min(2 * kp + 1, n_keys - 1)
        for tg in range((te - ta + (TOKENS - 1)) // TOKENS):
            t0 = ta + tg * TOKENS
            t1, t2 = ti.min(t0 + 1, te - 1), ti.min(t0 + 2, te - 1)
            v = dots(keys, ra, at, rb, at, q, t0, t1, t2, h * f.query_stride, f.key_width)
            put_six(p, p0 + t0 - ta, p0 + t1 - ta, p0 + t2 - ta, ra, rb, v, False)


@ti.func
def _weights(h, t, own, n_keys, first, p: ti.template(), row, a: ti.template()):
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
    a.factor[row] = 1.0 / total if own >= 0 and own < SEGMENT else 1.0  # its last segment: normalise


@ti.func
def _values(f: ti.template(), h, ta, te, n_keys, first, p: ti.template(), p0, a: ti.template(), out: ti.template()):
    """out[t, h] = (out[t, h] * rescale + weights . values) * factor."""
    for cp in range((f.n_value + 1) // 2):
        ca, cb = 2 * cp, ti.min(2 * cp + 1, f.n_value - 1)
        for tg in range((te - ta + (TOKENS - 1)) // TOKENS):
            t0 = ta + tg * TOKENS
            t1, t2 = ti.min(t0 + 1, te - 1), ti.min(t0 + 2, te - 1)
            q0, q1, q2 = p0 + t0 - ta, p0 + t1 - ta, p0 + t2 - ta
            at = h * f.value_stride
            v = dots(a.turned, 0, (at + ca) * SEGMENT, 0, (at + cb) * SEGMENT, p, q0, q1, q2, 0, n_keys)
            oa, ob = h * f.n_value + ca, h * f.n_value + cb
            if not first:  # what an earlier chunk left there may be NaN
                v[0] += out[t0, oa] * a.rescale[q0]
                v[1] += out[t0, ob] * a.rescale[q0]
                v[2] += out[t1, oa] * a.rescale[q1]
                v[3] += out[t1, ob] * a.rescale[q1]
                v[4] += out[t2, oa] * a.rescale[q2]
                v[5] += out[t2, ob] * a.rescale[q2]
            f0, f1, f2 = a.factor[q0], a.factor[q1], a.factor[q2]
            out[t0, oa], out[t0, ob] = v[0] * f0, v[1] * f0
            out[t1, oa], out[t1, ob] = v[2] * f1, v[3] * f1
            out[t2, oa], out[t2, ob] = v[4] * f2, v[5] * f2


@ti.kernel
def _attend_segment(
    f: ti.template(),
    n_heads: ti.template(),
    q: ti.template(),
    keys: ti.template(),
    pos0: ti.i32,
    n: ti.i32,
    r0: ti.i32,
    a: ti.template(),
    out: ti.template(),
):
    n_block = (n + (QUERIES - 1)) // QUERIES
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n_heads * n_block)
            for u in range(span[0], span[1]):
                h = u // n_block
                ta = (u - h * n_block) * QUERIES
                te = ti.min(ta + QUERIES, n)
                n_keys = ti.min(SEGMENT, pos0 + te - r0)
                if n_keys > 0:
                    p0 = (i // SPREAD) * QUERIES
                    _scores(f, q, h, ta, te, n_keys, keys, a.p, p0)
                    for t in range(ta, te):
                        _weights(h, t, pos0 + t - r0, n_keys, r0 == 0, a.p, p0 + t - ta, a)
                    _values(f, h, ta, te, n_keys, r0 == 0, a.p, p0, a, out)


def attend_rows(w, lay, q, pos0, n, strip, scratch, qa, mix, o, *, expand=None):
    """Attend from every head of `n` tokens to the cached rows each may see: queries in, V values a head out.

    Parameters
    ----------
    w : AttentionBank
        Rows up to ``pos0 + n`` of its cache are written already.
    lay : int
    q : ti.Field, f32 [T, >= H * (N + R)]
        Queries, turned and scaled by :func:`tmla.stages.rows.turn_queries`.
    pos0, n : int
        Position of the first token, and number of tokens.
    strip : ti.Field
        CPU: scratch, as for :func:`tmla.stages.head_rows.head_matmul`.
    scratch : ChunkAttentionScratch
    qa, mix : ti.Field, f32 [T, H * width] and f32 [T, H * C]
        Absorbed: scratch for the fused queries and the latent mixes.
    o : ti.Field, f32 [T, H * V]
        Takes the heads' values.
    expand : bool, optional
        The form; default: :func:`expanding_pays`.

    Notes
    -----
    Reference: :func:`attend_rows_ref` with the references of :mod:`tmla.stages.head_rows` around it.
    """
    a, segment, gpu = scratch, scratch.rows.shape[0], runtime.caps().gpu
    expand = expanding_pays(w, pos0, n) if expand is None else expand
    if not expand:
        absorb_rows(w, lay, q, n, strip, qa)
    for r0 in range(0, pos0 + n, segment):
        n_rows = min(segment, pos0 + n - r0)
        if expand or not gpu:
            (spread_rows_simt if gpu else _spread_rows)(w, lay, r0, n_rows, a.rows)
        if expand:
            expand_rows(w, lay, a.rows, n_rows, strip, a.keys, a.values)
        if gpu and expand:
            expanded_segment_simt(w, q, pos0, n, r0, n_rows, a, o)
        elif gpu:
            absorbed_segment_simt(w, lay, qa, pos0, n, r0, n_rows, a, mix)
        elif expand:
            form = Form(w.n_nope + w.n_rope, w.n_nope + w.n_rope, w.n_nope + w.n_rope, w.n_v, w.n_v)
            _turn_values(a.values, w.n_heads * w.n_v, n_rows, a.turned)
            _attend_segment(form, w.n_heads, q, a.keys, pos0, n, r0, a, o)
        else:
            form = Form(w.row_width, 0, qa.shape[1] // w.n_heads, w.n_latent, 0)
            _turn_values(a.rows, w.n_latent, n_rows, a.turned)
            _attend_segment(form, w.n_heads, qa, a.rows, pos0, n, r0, a, mix)
    if not expand:
        value_rows(w, lay, mix, n, strip, o)


def attend_rows_ref(rows, qa, pos0, n_latent):
    """NumPy reference: cached rows [>= pos0 + T, C + R], queries [T, H, C + R] -> latent mix float64 [T, H, C]."""
    return np.stack([attention_ref(rows[: pos0 + t + 1], q, n_latent) for t, q in enumerate(qa)])
