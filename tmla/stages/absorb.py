"""Absorb: carry each head's query into the latent space, so that the cache rows themselves are the keys.

``q'[h] = w_uk[h]^T @ q_nope[h]``, then the fused row ``[q' ; q_pe]`` times the score scale. A score is then one dot
product with a cache row (DeepSeek-V2 paper, section 2.1.2, and appendix C). The two file layouts hold ``w_uk`` with
different Q8_0 blocks and are both read in place:

- *unsplit* ``attn_kv_b``  ``[H * (N + V), C]``: per head N key rows, then V value rows; blocks run along C.
- *split* ``attn_k_b``  ``[H, C, N]`` (here ``[H * C, N]``): blocks run along N.
"""

import numpy as np
import taichi as ti

from tmla.stages.linear import Q8_BLOCK, dequantise_ref, q8_value


@ti.func
def absorb_unsplit_body(
    w_q: ti.template(),
    w_d: ti.template(),
    layer,
    q: ti.template(),
    n_nope,
    n_v,
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
):
    n_block = ti.static(w_d.shape[2])
    for hb in range(q.shape[1] * n_block):
        h, b = hb // n_block, hb % n_block
        acc = ti.Vector.zero(ti.f32, Q8_BLOCK)
        for n in range(n_nope):
            row = h * (n_nope + n_v) + n
            s = q[0, h, n] * ti.cast(w_d[layer, row, b], ti.f32)
            for j in range(Q8_BLOCK):  # a local vector: the store cannot alias, so LLVM vectorises
                acc[j] += s * q8_value(w_q, layer, row, b * Q8_BLOCK + j)
        for j in range(Q8_BLOCK):
            qa[0, h, b * Q8_BLOCK + j] = acc[j] * scale[pos[0]]


@ti.func
def absorb_split_body(
    w_q: ti.template(),
    w_d: ti.template(),
    layer,
    q: ti.template(),
    n_latent,
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
):
    for hc in range(q.shape[1] * n_latent):
        h, c = hc // n_latent, hc % n_latent
        acc = 0.0
        for b in range(w_d.shape[2]):
            part = 0.0
            for j in range(Q8_BLOCK):
                i = b * Q8_BLOCK + j
                part += q8_value(w_q, layer, hc, i) * q[0, h, i]
            acc += ti.cast(w_d[layer, hc, b], ti.f32) * part
        qa[0, h, c] = acc * scale[pos[0]]


@ti.func
def absorb_pe_body(q: ti.template(), n_nope, n_latent, scale: ti.template(), pos: ti.template(), qa: ti.template()):
    ti.loop_config(serialize=True)
    for h in range(q.shape[1]):
        for r in range(q.shape[2] - n_nope):
            qa[0, h, n_latent + r] = q[0, h, n_nope + r] * scale[pos[0]]


@ti.kernel
def _absorb_unsplit(
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.i32,
    q: ti.template(),
    n_nope: ti.i32,
    n_v: ti.i32,
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
):
    absorb_unsplit_body(w_q, w_d, layer, q, n_nope, n_v, scale, pos, qa)
    absorb_pe_body(q, n_nope, w_d.shape[2] * Q8_BLOCK, scale, pos, qa)


@ti.kernel
def _absorb_split(
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.i32,
    q: ti.template(),
    n_nope: ti.i32,
    n_latent: ti.i32,
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
):
    absorb_split_body(w_q, w_d, layer, q, n_latent, scale, pos, qa)
    absorb_pe_body(q, n_nope, n_latent, scale, pos, qa)


def absorb(w_q, w_d, layer, q, n_nope, n_v, scale, pos, qa, *, split):
    """Write the fused query rows ``[q' ; q_pe]``, times the score scale.

    Parameters
    ----------
    w_q, w_d : ti.Field
        Unsplit: u8 [L, H * (N + V), C] and f16 [L, H * (N + V), C/32]. Split: u8 [L, H * C, N] and f16 [L, H * C, N/32].
    q : ti.Field, f32 [1, H, N + R]
        Queries, pe window already rotated.
    n_nope, n_v : int
        N and V; V counts only in the unsplit layout.
    scale : ti.Field, f32 [T]
        Score scale of every position (softmax scale times temperature).
    pos : ti.Field, i32 [1]
    qa : ti.Field, f32 [1, H, C + R]
        Written whole.
    split : bool
        Which layout `w_q` has.

    Notes
    -----
    Reference: :func:`absorb_ref`. Tests compare with expanded attention, which shares no algebra with it.
    """
    if split:
        _absorb_split(w_q, w_d, layer, q, n_nope, w_q.shape[1] // q.shape[1], scale, pos, qa)
    else:
        _absorb_unsplit(w_q, w_d, layer, q, n_nope, n_v, scale, pos, qa)


def w_uk_ref(w_q, w_d, n_heads, n_nope, n_v, *, split):
    """The key half of ``kv_b`` from either layout -> float64 [H, N, C]."""
    w = dequantise_ref(w_q, w_d)
    if split:
        return w.reshape(n_heads, -1, n_nope).transpose(0, 2, 1)
    return w.reshape(n_heads, n_nope + n_v, -1)[:, :n_nope]


def absorb_ref(w_q, w_d, q, n_nope, n_v, scale, *, split):
    """NumPy reference for one layer: q [H, N + R] -> float64 [H, C + R]."""
    q = q.astype(np.float64)
    w_uk = w_uk_ref(w_q, w_d, q.shape[0], n_nope, n_v, split=split)
    return scale * np.concatenate([np.einsum("hn,hnc->hc", q[:, :n_nope], w_uk), q[:, n_nope:]], axis=1)
