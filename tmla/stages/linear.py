"""Matrix times one activation row, weights in Q8_0: the sum under every projection of the model.

The row can be normalised on the way (``W @ (x * gain) / rms(x)``: the factor is applied to the sum), and the product
stored, or added to what is there. The position-independent layer number is read from a one-element field.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.lanes import cdiv, log2, pow2, width
from tmla.stages.threads import SPREAD, share, team
from tmla.stages.words import Tiling, rms_factor, row_parts, rows_dot

TALL = 32768  # rows from which a matrix fills any device with one warp for four rows
Q8_BLOCK = 32  # values that share one f16 scale (ggml block_q8_0)
LANES = 16  # sums side by side in a CPU's dot product


@ti.func
def q8_value(w_q: ti.template(), layer, o, i):
    """One quant as f32, from either layout: u8 of int8 bits, or u64 words of eight quants, the first lowest."""
    bits = ti.i8(0)
    if ti.static(w_q.dtype == ti.u8):
        bits = ti.cast(w_q[layer, o, i], ti.i8)  # the cast brings the sign back
    else:
        bits = ti.cast((w_q[layer, o, i >> 3] >> ti.cast((i & 7) << 3, ti.u64)) & ti.u64(255), ti.i8)
    return ti.cast(bits, ti.f32)


@ti.func
def row_dot_q8(w_q: ti.template(), w_d: ti.template(), layer, o, x: ti.template(), x_row, x0, n_block: ti.template()):
    """Dot product of the first `n_block` blocks of row `o` with ``x[x_row, x0:]``.

    Sixteen sums side by side that go through the whole row, two blocks at a time: LLVM keeps them in two registers and
    adds them up once, at the end (27 % faster than one sum a block: docs/log.md).

    The row's number is limited to the last row, which it never exceeds: LLVM's loop strength reduction tries every way
    to split a sum of addresses, and a minimum is one term less. It took most of the time to compile (docs/log.md).
    """
    acc = ti.Vector.zero(ti.f32, LANES)
    row = ti.min(o, ti.static(w_q.shape[1] - 1))
    for b in range(n_block // 2):
        d, e = ti.cast(w_d[layer, row, 2 * b], ti.f32), ti.cast(w_d[layer, row, 2 * b + 1], ti.f32)
        for j in range(LANES):  # a plain loop: LLVM vectorises it, an unrolled one it does not
            i = 2 * b * Q8_BLOCK + j
            first = q8_value(w_q, layer, row, i) * x[x_row, x0 + i]
            first += q8_value(w_q, layer, row, i + LANES) * x[x_row, x0 + i + LANES]
            i += Q8_BLOCK
            second = q8_value(w_q, layer, row, i) * x[x_row, x0 + i]
            second += q8_value(w_q, layer, row, i + LANES) * x[x_row, x0 + i + LANES]
            acc[j] += d * first + e * second
    if ti.static(n_block % 2 == 1):
        d = ti.cast(w_d[layer, row, n_block - 1], ti.f32)
        for j in range(LANES):
            i = (n_block - 1) * Q8_BLOCK + j
            last = q8_value(w_q, layer, row, i) * x[x_row, x0 + i]
            last += q8_value(w_q, layer, row, i + LANES) * x[x_row, x0 + i + LANES]
            acc[j] += d * last
    total = 0.0
    for j in range(LANES):
        total += acc[j]
    return total


@ti.func
def matvec_rows(
    first_row,
    end_row,
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.template(),
    first: ti.template(),
    x: ti.template(),
    x0,
    scale,
    add: ti.template(),
    y: ti.template(),
):
    """Some rows of y = scale * W[layer - first] @ x[x0:], or y += that; x is normalised already."""
    for o in range(first_row, end_row):
        v = scale * row_dot_q8(w_q, w_d, layer[0] - first, o, x, 0, x0, w_d.shape[2])
        if ti.static(add):
            v += y[0, o]
        y[0, o] = v


@ti.func
def matvec_simt(
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.template(),
    first: ti.template(),
    x: ti.template(),
    x0: ti.template(),
    gain: ti.template(),
    eps: ti.template(),
    scale: ti.template(),
    norm: ti.template(),
    add: ti.template(),
    y: ti.template(),
    t: ti.template(),
):
    """y = scale * W[layer - first] @ norm(x[x0:]), or y += that. `t` is a :class:`Tiling`."""
    n_out, n_word = ti.static(w_q.shape[1], w_q.shape[2])
    w = ti.static(width())
    n_warp = ti.static(t.block // w)
    n_shared = ti.static(row_parts(n_word, w * t.split * t.ahead)[2])
    ti.loop_config(block_dim=t.block)
    for i in range(ti.static(cdiv(n_out, t.rows * t.groups) * t.block)):
        tid = i & ti.static(t.block - 1)
        xs = ti.simt.block.SharedArray(n_shared, ti.f32)
        part = ti.simt.block.SharedArray(n_warp * (t.rows + 1), ti.f32)
        warp = tid >> ti.static(log2(w))
        group0 = (i >> ti.static(log2(t.block))) * t.groups
        row0 = (group0 + (warp >> ti.static(log2(t.split)))) * t.rows
        rows = ti.Vector([ti.min(row0 + r, n_out - 1) for r in ti.static(range(t.rows))])
        lay = layer[0] - first
        acc = ti.Vector([0.0 for _ in ti.static(range(t.rows))])
        sq = rows_dot(acc, w_q, w_d, w_q, w_d, False, lay, rows, x, x0, gain, lay, norm, tid, xs, part, t)
        factor = ti.cast(ti.static(scale), ti.f32)
        if ti.static(norm):
            factor *= rms_factor(sq, part, n_warp * t.rows, tid, n_word * 8, eps, t.block)
        if (tid & ti.static(w - 1)) == 0:
            for r in ti.static(range(t.rows)):
                part[warp * t.rows + r] = acc[r]
        ti.simt.block.sync()
        if tid < ti.static(t.groups * t.rows):
            g = tid // t.rows
            v = 0.0
            for k in range(ti.static(t.split)):
                v += part[(g * t.split + k) * t.rows + tid - g * t.rows]
            row = group0 * t.rows + tid
            if row < n_out:
                v *= factor
                if ti.static(add):
                    v += y[0, row]
                y[0, row] = v


@ti.kernel
def _matvec_loop(
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.template(),
    x: ti.template(),
    scale: ti.f32,
    add: ti.template(),
    y: ti.template(),
):
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, w_d.shape[1])
            matvec_rows(span[0], span[1], w_q, w_d, layer, 0, x, 0, scale, add, y)


@ti.kernel
def _matvec_simt(
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.template(),
    x: ti.template(),
    gain: ti.template(),
    eps: ti.template(),
    scale: ti.template(),
    norm: ti.template(),
    add: ti.template(),
    y: ti.template(),
    t: ti.template(),
):
    matvec_simt(w_q, w_d, layer, 0, x, 0, gain, eps, scale, norm, add, y, t)


def tiling(n_out: int, n_in: int) -> Tiling:
    """Tiling of a matrix kernel on the running backend; measured on V2-Lite's shapes (docs/log.md)."""
    w = width()
    n_word = n_in // 8
    if n_out >= TALL:
        if runtime.caps().lane_ops == "warp":
            return Tiling(rows=4, split=1, block=4 * w, ahead=min(2, pow2(cdiv(n_word, w))))
        return Tiling(rows=4, split=1, block=8 * w, ahead=1, prefetch=True)
    split = 1
    while split < 4 and n_word >= 4 * w * split and n_out < 4096 * (4 // split):
        split *= 2  # a matrix of few rows fills the device by sharing rows among warps
    ahead = 1
    while ahead < 4 and n_word >= 2 * w * split * ahead:
        ahead *= 2
    return Tiling(rows=4, split=split, block=8 * w, ahead=ahead)


def matvec_q8(w_q, w_d, layer, x, y, *, scale=1.0, add=False):
    """Multiply one activation row by a Q8_0 matrix: ``y = scale * W[layer] @ x``, or ``y +=`` that.

    Parameters
    ----------
    w_q, w_d : ti.Field
        Quants and f16 scales [L, O, I/32]: u8 [L, O, I] (int8 bits) or u64 [L, O, I/8].
    layer : ti.Field, i32 [1]
        ``0 <= layer[0] < L``, unchecked: the decode loop calls this for every token.
    x, y : ti.Field, f32 [1, I] and f32 [1, O]
        Input row, and output row of which every element is written.
    scale : float
    add : bool
        Add to `y`.

    Notes
    -----
    Reads ``34/32 * O * I`` bytes of weights; accumulates in f32. Reference: :func:`matvec_q8_ref`.
    Source: ``block_q8_0`` in ggml-common.h.
    """
    if runtime.caps().gpu:
        t = tiling(w_q.shape[1], x.shape[1])
        _matvec_simt(w_q, w_d, layer, x, x, 0.0, scale, False, add, y, t)
    else:
        _matvec_loop(w_q, w_d, layer, x, scale, add, y)


def norm_matvec_q8(w_q, w_d, layer, x, gain, eps, y):
    """GPU only: ``y = W[layer] @ rms_norm(x)``, the norm in the same pass; gain is f32 [L, I]."""
    _matvec_simt(w_q, w_d, layer, x, gain, eps, 1.0, True, False, y, tiling(w_q.shape[1], x.shape[1]))


def dequantise_ref(w_q, w_d):
    """Q8_0 in NumPy: u8 [..., I] and f16 [..., I/32] -> float64 [..., I]."""
    return w_q.view(np.int8).astype(np.float64) * np.repeat(w_d.astype(np.float64), Q8_BLOCK, axis=-1)


def matvec_q8_ref(w_q, w_d, x):
    """NumPy reference for one layer: u8 [O, I], f16 [O, I/32], [I] -> float64 [O]."""
    return dequantise_ref(w_q, w_d) @ x.astype(np.float64)
