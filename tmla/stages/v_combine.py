"""v-combine: join the splits of the attention, then carry each head's latent mix back to its V values.

``o[h] = w_uv[h] @ mix[h]``. The value rows of head h stand at ``h * stride + offset`` of the matrix: unsplit ``kv_b``
has stride N + V and offset N, split ``attn_v_b`` stride V and offset 0; blocks run along C in both.
"""

import numpy as np
import taichi as ti

from tmla.stages.attention import CHUNK, split_count
from tmla.stages.linear import dequantise_ref, row_dot_q8


@ti.func
def join_splits_body(
    pos: ti.template(), part_m: ti.template(), part_l: ti.template(), part: ti.template(), mix: ti.template()
):
    n_chunk = ti.static(part.shape[2] // CHUNK)
    for hb in range(part.shape[1] * n_chunk):
        h, b = hb // n_chunk, hb % n_chunk
        n_split = split_count(pos[0] + 1, part.shape[0])
        m = part_m[0, h]
        for s in range(1, n_split):
            m = ti.max(m, part_m[s, h])
        total = 0.0
        acc = ti.Vector.zero(ti.f32, CHUNK)
        for s in range(n_split):
            weight = ti.exp(part_m[s, h] - m)
            total += weight * part_l[s, h]
            for j in range(CHUNK):
                acc[j] += weight * part[s, h, b * CHUNK + j]
        for j in range(CHUNK):
            mix[h, b * CHUNK + j] = acc[j] / total


@ti.func
def v_combine_body(w_q: ti.template(), w_d: ti.template(), layer, stride, offset, mix: ti.template(), o: ti.template()):
    for i in range(o.shape[1]):
        n_v = o.shape[1] // mix.shape[0]
        h = i // n_v
        o[0, i] = row_dot_q8(w_q, w_d, layer, h * stride + offset + i % n_v, mix, h, 0, w_d.shape[2])


@ti.kernel
def _join_splits(
    pos: ti.template(), part_m: ti.template(), part_l: ti.template(), part: ti.template(), mix: ti.template()
):
    join_splits_body(pos, part_m, part_l, part, mix)


@ti.kernel
def _v_combine(
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.i32,
    stride: ti.i32,
    offset: ti.i32,
    mix: ti.template(),
    o: ti.template(),
):
    v_combine_body(w_q, w_d, layer, stride, offset, mix, o)


def join_splits(pos, scratch, mix):
    """Join what :func:`tmla.stages.attention.attention` left for ``pos[0] + 1`` rows into ``mix`` f32 [H, C]."""
    _join_splits(pos, scratch.part_m, scratch.part_l, scratch.part, mix)


def v_combine(w_q, w_d, layer, stride, offset, mix, o):
    """Multiply each head's latent mix by its value rows.

    Parameters
    ----------
    w_q, w_d : ti.Field, u8 [L, H * stride, C] and f16 [L, H * stride, C/32]
    stride, offset : int
        Value row v of head h is row ``h * stride + offset + v``.
    mix : ti.Field, f32 [H, C]
    o : ti.Field, f32 [1, H * V]
    """
    _v_combine(w_q, w_d, layer, stride, offset, mix, o)


def join_splits_ref(part_m, part_l, part):
    """NumPy reference: [S, H], [S, H], [S, H, C] -> float64 [H, C]."""
    weight = np.exp(part_m.astype(np.float64) - part_m.max(axis=0))
    return np.einsum("sh,shc->hc", weight, part) / (weight * part_l).sum(axis=0)[:, None]


def v_combine_ref(w_q, w_d, stride, offset, n_v, mix):
    """NumPy reference for one layer: mix [H, C] -> float64 [H * V]."""
    w = dequantise_ref(w_q, w_d).reshape(mix.shape[0], stride, -1)[:, offset : offset + n_v]
    return np.einsum("hvc,hc->hv", w, mix.astype(np.float64)).reshape(-1)
