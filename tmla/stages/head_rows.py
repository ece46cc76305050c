"""Absorb and v-combine for a chunk of tokens: each head's matrix times the chunk's rows (CPU).

The matrices and their two layouts are those of :mod:`tmla.stages.absorb` and :mod:`tmla.stages.v_combine`; what is new
is that a thread turns 32 rows of a head into f32 once and multiplies all tokens by them. An unsplit key matrix lies
across: its rows are the sum's index, so they are turned on their way into scratch. :mod:`tmla.stages.head_tiles` is the
GPU's.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.absorb import w_uk_ref
from tmla.stages.head_tiles import absorb_rows_simt, value_rows_simt
from tmla.stages.linear import Q8_BLOCK, q8_value
from tmla.stages.matmul import fill_row, strip_times_rows
from tmla.stages.threads import SPREAD, share, slots
from tmla.stages.v_combine import v_combine_ref

ROWS = 32  # rows of a head in a strip


@ti.func
def _fill_keys(w: ti.template(), lay, h, c0, strip: ti.template(), slot):
    """strip[slot, r N + n] = w_uk[h, n, c0 + r] for the 32 latent values from c0 on."""
    if ti.static(w.split):
        for r in range(ROWS):
            fill_row(w.k_q, w.k_d, lay, h * w.n_latent + c0 + r, strip, slot, r * w.n_nope)
    else:
        for n in range(w.n_nope):
            row = h * (w.n_nope + w.n_v) + n
            d = ti.cast(w.k_d[lay, row, c0 // Q8_BLOCK], ti.f32)
            for r in range(ROWS):
                strip[slot, r * w.n_nope + n] = d * q8_value(w.k_q, lay, row, c0 + r)


@ti.kernel
def _absorb_rows_loop(
    w: ti.template(), lay: ti.i32, q: ti.template(), n: ti.i32, strip: ti.template(), qa: ti.template()
):
    per_head, width = ti.static(w.n_latent // ROWS, qa.shape[1] // w.n_heads)
    for i in range(ti.static(slots() * SPREAD)):
        if i % SPREAD == 0:
            span = share(i, w.n_heads * per_head)
            for u in range(span[0], span[1]):
                h = u // per_head
                c0 = (u - h * per_head) * ROWS
                _fill_keys(w, lay, h, c0, strip, i // SPREAD)
                x0, o0 = h * (w.n_nope + w.n_rope), h * width + c0
                strip_times_rows(strip, i // SPREAD, ROWS, q, 0, n, x0, w.n_nope, 1.0, False, qa, o0)


@ti.kernel
def _copy_pe_loop(w: ti.template(), q: ti.template(), n: ti.i32, qa: ti.template()):
    width = ti.static(qa.shape[1] // w.n_heads)
    for i in range(ti.static(slots() * SPREAD)):
        if i % SPREAD == 0:
            span = share(i, n)
            for t in range(span[0], span[1]):
                for h in range(w.n_heads):
                    for r in range(w.n_rope):
                        qa[t, h * width + w.n_latent + r] = q[t, h * (w.n_nope + w.n_rope) + w.n_nope + r]


@ti.kernel
def _value_rows_loop(
    w: ti.template(), lay: ti.i32, mix: ti.template(), n: ti.i32, strip: ti.template(), o: ti.template()
):
    per_head = ti.static(-(-w.n_v // ROWS))
    for i in range(ti.static(slots() * SPREAD)):
        if i % SPREAD == 0:
            span = share(i, w.n_heads * per_head)
            for u in range(span[0], span[1]):
                h = u // per_head
                v0 = (u - h * per_head) * ROWS
                n_rows = ti.min(ROWS, w.n_v - v0)
                for r in range(n_rows):
                    fill_row(
                        w.v_q, w.v_d, lay, h * w.v_stride + w.v_offset + v0 + r, strip, i // SPREAD, r * w.n_latent
                    )
                x0, o0 = h * w.n_latent, h * w.n_v + v0
                strip_times_rows(strip, i // SPREAD, n_rows, mix, 0, n, x0, w.n_latent, 1.0, False, o, o0)


def strip_len(n_nope: int, n_latent: int) -> int:
    """f32 of scratch that one thread needs here."""
    return ROWS * max(n_nope, n_latent)


def absorb_rows(w, lay, q, n, strip, qa):
    """Fused query rows ``[q' ; q_pe]`` of `n` tokens.

    Parameters
    ----------
    w : AttentionBank
        As for :func:`tmla.stages.absorb.absorb`, and ``n_heads`` (H).
    lay : int
    q : ti.Field, f32 [T, >= H * (N + R)]
        Turned and scaled by :func:`tmla.stages.rows.turn_queries`.
    strip : ti.Field, f32 [threads, >= strip_len(N, C)]
        CPU: scratch.
    qa : ti.Field, f32 [T, H * width]
        Head h's row begins at ``h * width``, width at least C + R; what is behind C + R is left as it is.

    Notes
    -----
    ``2 H N C n`` operations. Reference: :func:`absorb_rows_ref`.
    """
    if runtime.caps().gpu:
        absorb_rows_simt(w, lay, q, n, qa)
    else:
        _absorb_rows_loop(w, lay, q, n, strip, qa)
        _copy_pe_loop(w, q, n, qa)


def value_rows(w, lay, mix, n, strip, o):
    """``o[t, h V + v] = w_uv[h, v] . mix[t, h C :]`` of `n` tokens: f32 [T, H * C] -> f32 [T, H * V].

    Reference: :func:`value_rows_ref`.
    """
    if runtime.caps().gpu:
        value_rows_simt(w, lay, mix, n, o)
    else:
        _value_rows_loop(w, lay, mix, n, strip, o)


def absorb_rows_ref(w_q, w_d, q, n_nope, n_v, *, split):
    """NumPy reference for one layer: scaled queries [T, H, N + R] -> float64 [T, H, C + R]."""
    q = q.astype(np.float64)
    w_uk = w_uk_ref(w_q, w_d, q.shape[1], n_nope, n_v, split=split)
    return np.concatenate([np.einsum("thn,hnc->thc", q[..., :n_nope], w_uk), q[..., n_nope:]], axis=2)


def value_rows_ref(w_q, w_d, stride, offset, n_v, mix):
    """NumPy reference for one layer: mix [T, H, C] -> float64 [T, H * V]."""
    return np.stack([v_combine_ref(w_q, w_d, stride, offset, n_v, m) for m in mix])
