"""A head's matrix times many rows, for all heads: absorb, v-combine and expansion of a chunk of tokens (CPU).

The matrices and their two layouts are those of :mod:`tmla.stages.absorb` and :mod:`tmla.stages.v_combine`. Four uses:

====================  ================  ==================  ==============  ==============
use                   sum over          unsplit             split           rows multiplied
====================  ================  ==================  ==============  ==============
absorb                nope              key rows, across    ``k_b``         queries
v-combine             latent            value rows          ``v_b``         latent mixes
expand keys           latent            key rows            ``k_b`` across  cached latents
expand values         latent            value rows          ``v_b``         cached latents
====================  ================  ==================  ==============  ==============

*Across*: the matrix's rows are the sum's index, and are turned on their way into scratch.
:mod:`tmla.stages.matmul_tiles` is the GPU's.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.absorb import w_uk_ref
from tmla.stages.linear import Q8_BLOCK, q8_value
from tmla.stages.matmul import fill_row, strip_times_rows
from tmla.stages.matmul_tiles import head_matmul_simt
from tmla.stages.rows import copy_pe
from tmla.stages.threads import SPREAD, share, team
from tmla.stages.v_combine import v_combine_ref

ROWS = 32  # outputs of a head in a strip


@ti.kernel
def _head_rows_loop(
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
    strip: ti.template(),
    y: ti.template(),
    y_stride: ti.template(),
):
    per_head = ti.static(-(-n_out // ROWS))
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n_heads * per_head)
            for u in range(span[0], span[1]):
                h = u // per_head
                o0 = (u - h * per_head) * ROWS
                n_rows = ti.min(ROWS, n_out - o0)
                if ti.static(across):
                    for k in range(n_in):
                        row = h * stride + offset + k
                        d = ti.cast(w_d[lay, row, o0 // Q8_BLOCK], ti.f32)
                        for r in range(n_rows):
                            strip[i // SPREAD, r * n_in + k] = d * q8_value(w_q, lay, row, o0 + r)
                else:
                    for r in range(n_rows):
                        fill_row(w_q, w_d, lay, h * stride + offset + o0 + r, strip, i // SPREAD, r * n_in)
                x0, y0 = h * x_stride, h * y_stride + o0
                strip_times_rows(strip, i // SPREAD, n_rows, x, 0, n, x0, n_in, 1.0, False, y, y0)


def strip_len(n_nope: int, n_latent: int) -> int:
    """f32 of scratch that one thread needs here."""
    return ROWS * max(n_nope, n_latent)


def head_matmul(w_q, w_d, lay, across, n_heads, n_out, n_in, stride, offset, x, x_stride, n, strip, y, y_stride):
    """``y[t, h y_stride + o] = sum over k of M_h[o, k] x[t, h x_stride + k]`` for `n` rows and all heads.

    Parameters
    ----------
    w_q, w_d : ti.Field
        Q8_0 matrix of all heads. M_h[o] is row ``h * stride + offset + o``; `across`, that row is instead M_h[:, o].
    lay : int
    n_heads, n_out, n_in, stride, offset, x_stride, y_stride : int
        Compile-time numbers.
    x, y : ti.Field, f32 [>= n, ...]
    strip : ti.Field, f32 [threads, >= strip_len(N, C)]
        CPU: scratch.
    """
    shape = (across, n_heads, n_out, n_in, stride, offset)
    if runtime.caps().gpu:
        head_matmul_simt(w_q, w_d, lay, *shape, x, x_stride, n, y, y_stride)
    else:
        _head_rows_loop(w_q, w_d, lay, *shape, x, x_stride, n, strip, y, y_stride)


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
    stride, width = w.n_latent if w.split else w.n_nope + w.n_v, qa.shape[1] // w.n_heads
    shape = (not w.split, w.n_heads, w.n_latent, w.n_nope, stride, 0)
    head_matmul(w.k_q, w.k_d, lay, *shape, q, w.n_nope + w.n_rope, n, strip, qa, width)
    copy_pe(q, w.n_nope + w.n_rope, w.n_nope, n, qa, width, w.n_latent, w.n_heads, w.n_rope)


def value_rows(w, lay, mix, n, strip, o):
    """``o[t, h V + v] = w_uv[h, v] . mix[t, h C :]`` of `n` tokens: f32 [T, H * C] -> f32 [T, H * V].

    ``2 H V C n`` operations. Reference: :func:`value_rows_ref`.
    """
    shape = (False, w.n_heads, w.n_v, w.n_latent, w.v_stride, w.v_offset)
    head_matmul(w.v_q, w.v_d, lay, *shape, mix, w.n_latent, n, strip, o, w.n_v)


def expand_rows(w, lay, latents, n, strip, keys, values):
    """Keys and values of every head from `n` cached rows.

    Parameters
    ----------
    w : AttentionBank
    lay : int
    latents : ti.Field, f32 [S, C + R]
        Cached rows.
    n : int
    keys : ti.Field, f32 [S, H * (N + R)]
        Takes ``[k_nope ; k_pe]`` of each head.
    values : ti.Field, f32 [S, H * V]

    Notes
    -----
    ``2 H (N + V) C n`` operations. Reference: :func:`expand_rows_ref`.
    """
    stride, width = w.n_latent if w.split else w.n_nope + w.n_v, w.n_nope + w.n_rope
    shape = (w.split, w.n_heads, w.n_nope, w.n_latent, stride, 0)
    head_matmul(w.k_q, w.k_d, lay, *shape, latents, 0, n, strip, keys, width)
    shape = (False, w.n_heads, w.n_v, w.n_latent, w.v_stride, w.v_offset)
    head_matmul(w.v_q, w.v_d, lay, *shape, latents, 0, n, strip, values, w.n_v)
    copy_pe(latents, 0, w.n_latent, n, keys, width, w.n_nope, w.n_heads, w.n_rope)


def absorb_rows_ref(w_q, w_d, q, n_nope, n_v, *, split):
    """NumPy reference for one layer: scaled queries [T, H, N + R] -> float64 [T, H, C + R]."""
    q = q.astype(np.float64)
    w_uk = w_uk_ref(w_q, w_d, q.shape[1], n_nope, n_v, split=split)
    return np.concatenate([np.einsum("thn,hnc->thc", q[..., :n_nope], w_uk), q[..., n_nope:]], axis=2)


def value_rows_ref(w_q, w_d, stride, offset, n_v, mix):
    """NumPy reference for one layer: mix [T, H, C] -> float64 [T, H * V]."""
    return np.stack([v_combine_ref(w_q, w_d, stride, offset, n_v, m) for m in mix])


def expand_rows_ref(w_q, w_d, rows, n_heads, n_nope, n_v, *, split):
    """NumPy reference of the keys for one layer: cached rows [S, C + R] -> float64 [S, H, N + R].

    The values are :func:`value_rows_ref` of the same latents for every head.
    """
    rows, w_uk = rows.astype(np.float64), w_uk_ref(w_q, w_d, n_heads, n_nope, n_v, split=split)
    n_latent = w_uk.shape[2]
    pe = np.broadcast_to(rows[:, None, n_latent:], (len(rows), n_heads, rows.shape[1] - n_latent))
    return np.concatenate([np.einsum("sc,hnc->shn", rows[:, :n_latent], w_uk), pe], axis=2)
