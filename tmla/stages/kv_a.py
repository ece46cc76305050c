"""The kv_a projection, written straight into the cache row ``[latent C ; k_pe R]`` of this position."""

import taichi as ti

from tmla.stages.linear import matvec_q8_ref, row_dot_q8


@ti.func
def kv_a_body(
    w_q: ti.template(), w_d: ti.template(), layer, x: ti.template(), cache: ti.template(), pos: ti.template()
):
    for o in range(w_d.shape[1]):
        cache[layer, pos[0], o] = ti.cast(row_dot_q8(w_q, w_d, layer, o, x, 0, 0, w_d.shape[2]), cache.dtype)


@ti.kernel
def _kv_a(
    w_q: ti.template(), w_d: ti.template(), layer: ti.i32, x: ti.template(), cache: ti.template(), pos: ti.template()
):
    kv_a_body(w_q, w_d, layer, x, cache, pos)


def kv_a(w_q, w_d, layer, x, cache, pos):
    """Project the normalised residual row into ``cache[layer, pos[0]]``.

    Parameters
    ----------
    w_q, w_d : ti.Field, u8 [L, C + R, D] and f16 [L, C + R, D/32]
    x : ti.Field, f32 [1, D]
    cache : ti.Field, f16 or f32 [L, T, C + R]
        Row ``[layer, pos[0]]`` is written whole; its latent is not yet normalised and its tail not yet rotated.
    pos : ti.Field, i32 [1]

    Notes
    -----
    DeepSeek-V2 paper, equation 9 (``W_DKV``) and 15 (``W_KR``), one matrix in the files. Reference: :func:`kv_a_ref`.
    """
    _kv_a(w_q, w_d, layer, x, cache, pos)


kv_a_ref = matvec_q8_ref
