"""Matrix times one activation row, weights in Q8_0: the sum under every projection of the model."""

import numpy as np
import taichi as ti

Q8_BLOCK = 32  # values that share one f16 scale (ggml block_q8_0)


@ti.func
def q8_value(w_q: ti.template(), layer, o, i):
    """One quant as f32, from either layout: u8 of int8 bits, or u32 words of four quants each, the first lowest."""
    bits = ti.i8(0)
    if ti.static(w_q.dtype == ti.u8):
        bits = ti.cast(w_q[layer, o, i], ti.i8)  # the cast brings the sign back
    else:
        bits = ti.cast((w_q[layer, o, i >> 2] >> ti.cast((i & 3) << 3, ti.u32)) & ti.u32(255), ti.i8)
    return ti.cast(bits, ti.f32)


@ti.func
def row_dot_q8(w_q: ti.template(), w_d: ti.template(), layer, o, x: ti.template(), x_row, x0, n_block):
    """Dot product of the first `n_block` blocks of row `o` with ``x[x_row, x0:]``."""
    acc = 0.0
    for b in range(n_block):
        part = 0.0
        for j in range(Q8_BLOCK):  # a plain loop: LLVM vectorises it, an unrolled one it does not
            i = b * Q8_BLOCK + j
            part += q8_value(w_q, layer, o, i) * x[x_row, x0 + i]
        acc += ti.cast(w_d[layer, o, b], ti.f32) * part
    return acc


@ti.func
def matvec_q8_body(w_q: ti.template(), w_d: ti.template(), layer, x: ti.template(), y: ti.template()):
    for o in range(w_d.shape[1]):
        y[0, o] = row_dot_q8(w_q, w_d, layer, o, x, 0, 0, w_d.shape[2])


@ti.func
def matvec_q8_heads_body(w_q: ti.template(), w_d: ti.template(), layer, x: ti.template(), y: ti.template()):
    for o in range(w_d.shape[1]):
        y[0, o // y.shape[2], o % y.shape[2]] = row_dot_q8(w_q, w_d, layer, o, x, 0, 0, w_d.shape[2])


@ti.func
def matvec_q8_add_body(w_q: ti.template(), w_d: ti.template(), layer, scale, x: ti.template(), y: ti.template()):
    for o in range(w_d.shape[1]):
        y[0, o] = y[0, o] + scale * row_dot_q8(w_q, w_d, layer, o, x, 0, 0, w_d.shape[2])


@ti.kernel
def _matvec_q8(w_q: ti.template(), w_d: ti.template(), layer: ti.i32, x: ti.template(), y: ti.template()):
    matvec_q8_body(w_q, w_d, layer, x, y)


@ti.kernel
def _matvec_q8_heads(w_q: ti.template(), w_d: ti.template(), layer: ti.i32, x: ti.template(), y: ti.template()):
    matvec_q8_heads_body(w_q, w_d, layer, x, y)


@ti.kernel
def _matvec_q8_add(
    w_q: ti.template(), w_d: ti.template(), layer: ti.i32, scale: ti.f32, x: ti.template(), y: ti.template()
):
    matvec_q8_add_body(w_q, w_d, layer, scale, x, y)


def matvec_q8(w_q, w_d, layer, x, y):
    """Multiply one activation row by a Q8_0 matrix: ``y = W[layer] @ x``.

    Parameters
    ----------
    w_q, w_d : ti.Field, u8 [L, O, I] and f16 [L, O, I/32]
        Quantised values (int8 bits) and block scales.
    layer : int
        ``0 <= layer < L``, unchecked: the decode loop calls this for every token.
    x, y : ti.Field, f32 [1, I] and f32 [1, O]
        Input row, and output row of which every element is written.

    Notes
    -----
    Reads ``34/32 * O * I`` bytes of weights; accumulates in f32. Reference: :func:`matvec_q8_ref`.
    Source: ``block_q8_0`` in ggml-common.h.
    """
    _matvec_q8(w_q, w_d, layer, x, y)


def matvec_q8_heads(w_q, w_d, layer, x, y):
    """As :func:`matvec_q8`, into rows of heads: y is f32 [1, H, O/H] (the query projection)."""
    _matvec_q8_heads(w_q, w_d, layer, x, y)


def matvec_q8_add(w_q, w_d, layer, scale, x, y):
    """Add a projected row to the residual: ``y += scale * (W[layer] @ x)``; shapes as :func:`matvec_q8`."""
    _matvec_q8_add(w_q, w_d, layer, scale, x, y)


def dequantise_ref(w_q, w_d):
    """Q8_0 in NumPy: u8 [..., I] and f16 [..., I/32] -> float64 [..., I]."""
    return w_q.view(np.int8).astype(np.float64) * np.repeat(w_d.astype(np.float64), Q8_BLOCK, axis=-1)


def matvec_q8_ref(w_q, w_d, x):
    """NumPy reference for one layer: u8 [O, I], f16 [O, I/32], [I] -> float64 [O]."""
    return dequantise_ref(w_q, w_d) @ x.astype(np.float64)
