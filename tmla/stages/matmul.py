"""Matrix times many activation rows, weights in Q8_0: the sum under every projection of a chunk of tokens.

``y[t] = scale * W @ x[t]``. A quant is turned into f32 once for all tokens of the chunk. This file is the CPU's: a strip
of matrix rows goes to f32 scratch that stays in the second cache, and meets block after block of activation rows, two
matrix rows and three tokens at once: six sums that LLVM keeps in registers (the best of fifteen forms: docs/log.md).
:mod:`tmla.stages.matmul_tiles` is the GPU's.
"""

import numpy as np
import taichi as ti

from tmla.stages.linear import Q8_BLOCK, dequantise_ref, q8_value
from tmla.stages.threads import SPREAD

SLOTS = 16  # parts of a matrix that CPU threads share out, each with a strip of its own
TOKENS = 3  # activation rows that meet two matrix rows at once
STRIP_VALUES = 32768  # f32 of a strip
BLOCK_VALUES = 65536  # f32 of a block of activation rows


def strip_rows(n_in: int) -> int:
    """Matrix rows of `n_in` values in a strip, an even number."""
    return max(1, min(8, STRIP_VALUES // n_in // 2)) * 2


def block_tokens(n_in: int) -> int:
    """Activation rows of `n_in` values that a strip meets before the next."""
    return max(2, min(32, BLOCK_VALUES // n_in // TOKENS)) * TOKENS


def strip_len(*widths: int) -> int:
    """f32 of one slot of scratch, for matrices of these widths."""
    return max(strip_rows(n) * n for n in widths)


@ti.func
def fill_row(w_q: ti.template(), w_d: ti.template(), lay, row, ws: ti.template(), slot, at):
    """ws[slot, at + i] = W[lay, row, i] in f32."""
    for b in range(w_d.shape[2]):
        d = ti.cast(w_d[lay, row, b], ti.f32)
        for j in range(Q8_BLOCK):
            ws[slot, at + b * Q8_BLOCK + j] = d * q8_value(w_q, lay, row, b * Q8_BLOCK + j)


@ti.func
def dots(ws: ti.template(), slot, at0, at1, x: ti.template(), t0, t1, t2, x0, n):
    """Two rows of scratch, ``ws[slot, at : at + n]``, times three activation rows ``x[t, x0 : x0 + n]``: six sums."""
    a0, a1, b0, b1, c0, c1 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        w0, w1 = ws[slot, at0 + i], ws[slot, at1 + i]
        xa, xb, xc = x[t0, x0 + i], x[t1, x0 + i], x[t2, x0 + i]
        a0 += w0 * xa
        a1 += w1 * xa
        b0 += w0 * xb
        b1 += w1 * xb
        c0 += w0 * xc
        c1 += w1 * xc
    return ti.Vector([a0, a1, b0, b1, c0, c1])


@ti.func
def put_six(y: ti.template(), t0, t1, t2, o0, o1, v, add: ti.template()):
    """Store what :func:`dots` gave. A token or row may stand there twice: all is read before anything is written."""
    s = v
    if ti.static(add):
        s += ti.Vector([y[t0, o0], y[t0, o1], y[t1, o0], y[t1, o1], y[t2, o0], y[t2, o1]])
    y[t0, o0], y[t0, o1] = s[0], s[1]
    y[t1, o0], y[t1, o1] = s[2], s[3]
    y[t2, o0], y[t2, o1] = s[4], s[5]


@ti.func
def strip_times_rows(
    ws: ti.template(),
    slot,
    o0,
    o1,
    x: ti.template(),
    x0,
    n_in: ti.template(),
    n,
    scale,
    add: ti.template(),
    y: ti.template(),
):
    """y[t, o] = scale * ws row (o - o0) . x[t, x0:], for the strip's rows o0 <= o < o1 and all n tokens."""
    per_block = ti.static(block_tokens(n_in))
    for tb in range((n + (per_block - 1)) // per_block):
        first, end = tb * per_block, ti.min((tb + 1) * per_block, n)
        for p in range((o1 - o0 + 1) // 2):
            ra, rb = 2 * p, ti.min(2 * p + 1, o1 - o0 - 1)
            for tg in range((end - first + (TOKENS - 1)) // TOKENS):
                t0 = first + tg * TOKENS
                t1, t2 = ti.min(t0 + 1, end - 1), ti.min(t0 + 2, end - 1)
                v = dots(ws, slot, ra * n_in, rb * n_in, x, t0, t1, t2, x0, n_in)
                put_six(y, t0, t1, t2, o0 + ra, o0 + rb, scale * v, add)


@ti.kernel
def _matmul_loop(
    w_q: ti.template(),
    w_d: ti.template(),
    lay: ti.i32,
    x: ti.template(),
    n: ti.i32,
    scale: ti.f32,
    add: ti.template(),
    ws: ti.template(),
    y: ti.template(),
):
    n_out, n_in = ti.static(w_d.shape[1], w_d.shape[2] * Q8_BLOCK)
    rows = ti.static(strip_rows(w_d.shape[2] * Q8_BLOCK))
    n_strip = ti.static(-(-w_d.shape[1] // rows))
    for i in range(SLOTS * SPREAD):
        if i % SPREAD == 0:
            s = i // SPREAD
            for strip in range(s * n_strip // SLOTS, (s + 1) * n_strip // SLOTS):
                o0, o1 = strip * rows, ti.min((strip + 1) * rows, n_out)
                for o in range(o0, o1):
                    fill_row(w_q, w_d, lay, o, ws, s, (o - o0) * n_in)
                strip_times_rows(ws, s, o0, o1, x, 0, n_in, n, scale, add, y)


def matmul_ref(w_q, w_d, x):
    """NumPy reference for one layer: u8 [O, I], f16 [O, I/32], [T, I] -> float64 [T, O]."""
    return x.astype(np.float64) @ dequantise_ref(w_q, w_d).T
