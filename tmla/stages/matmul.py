"""Matrix times many activation rows, weights in Q8_0: the sum under every projection of a chunk of tokens.

``y[t] = scale * W @ x[t]``. A quant is turned into f32 once for all tokens of the chunk. This file is the CPU's:
a strip of matrix rows goes to f32 scratch that stays in the second cache, and meets block after block of activation
rows, two matrix rows and three tokens at once: six sums that LLVM keeps in registers (the best of fifteen forms:
docs/log.md).
:mod:`tmla.stages.matmul_tiles` is the GPU's.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.linear import Q8_BLOCK, dequantise_ref, q8_value
from tmla.stages.matmul_tiles import matmul_simt
from tmla.stages.threads import SPREAD, share, team

TOKENS = 3  # activation rows that meet two matrix rows at once
STRIP_VALUES = 32768  # f32 of a strip
PIECE_BLOCKS = 64  # blocks of a row that are summed at once: three activation rows of so many stay in the first cache


def strip_rows(n_in: int) -> int:
    """Matrix rows of `n_in` values in a strip, an even number."""
    return max(1, min(8, STRIP_VALUES // n_in // 2)) * 2


def piece_blocks(n_block: int) -> int:
    """Blocks of one of the equal pieces, PIECE_BLOCKS at most, that rows of `n_block` blocks are summed in."""
    return -(-n_block // -(-n_block // PIECE_BLOCKS))


def strip_len(*widths: int) -> int:
    """f32 that one thread's strip takes, for matrices of these widths."""
    return max(strip_rows(n) * n for n in (*widths, *(piece_blocks(n // Q8_BLOCK) * Q8_BLOCK for n in widths)))


@ti.func
def fill_part(w_q: ti.template(), w_d: ti.template(), lay, row, b0, b1, strip: ti.template(), slot, at):
    """strip[slot, at + i] = W[lay, row, 32 b0 + i] in f32, up to block b1."""
    o, at0 = ti.min(row, ti.static(w_d.shape[1] - 1)), ti.max(at, 0) - b0 * Q8_BLOCK  # one term each: row_dot_q8
    for b in range(b0, b1):
        d = ti.cast(w_d[lay, o, b], ti.f32)
        for j in range(Q8_BLOCK):
            strip[slot, at0 + b * Q8_BLOCK + j] = d * q8_value(w_q, lay, o, b * Q8_BLOCK + j)


@ti.func
def fill_row(w_q: ti.template(), w_d: ti.template(), lay, row, strip: ti.template(), slot, at):
    """strip[slot, at + i] = W[lay, row, i] in f32."""
    fill_part(w_q, w_d, lay, row, 0, w_d.shape[2], strip, slot, at)


@ti.func
def dots(w: ti.template(), s0, at0, s1, at1, x: ti.template(), t0, t1, t2, x0, n):
    """Two f32 rows, ``w[s, at : at + n]``, times three activation rows ``x[t, x0 : x0 + n]``: six sums."""
    a0, a1, b0, b1, c0, c1 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        w0, w1 = w[s0, at0 + i], w[s1, at1 + i]
        xa, xb, xc = x[t0, x0 + i], x[t1, x0 + i], x[t2, x0 + i]
        a0 += w0 * xa
        a1 += w1 * xa
        b0 += w0 * xb
        b1 += w1 * xb
        c0 += w0 * xc
        c1 += w1 * xc
    return ti.Vector([a0, a1, b0, b1, c0, c1])


@ti.func
def put_six(y: ti.template(), t0, t1, t2, o0, o1, v, add):
    """Store what :func:`dots` gave. A token or row may stand there twice: all is read before anything is written."""
    s = v
    if add:
        s += ti.Vector([y[t0, o0], y[t0, o1], y[t1, o0], y[t1, o1], y[t2, o0], y[t2, o1]])
    y[t0, o0], y[t0, o1] = s[0], s[1]
    y[t1, o0], y[t1, o1] = s[2], s[3]
    y[t2, o0], y[t2, o1] = s[4], s[5]


@ti.func
def strip_times_rows(
    strip: ti.template(),
    slot,
    n_rows,
    x: ti.template(),
    first,
    end,
    x0,
    n_in,
    scale,
    add,
    y: ti.template(),
    o0,
):
    """y[t, o0 + r] = scale * (row r of the strip) . x[t, x0:], for its `n_rows` rows and tokens first <= t < end."""
    for tg in range((end - first + (TOKENS - 1)) // TOKENS):  # its activation rows stay in the first cache
        t0 = first + tg * TOKENS
        t1, t2 = ti.min(t0 + 1, end - 1), ti.min(t0 + 2, end - 1)
        for p in range((n_rows + 1) // 2):
            ra, rb = 2 * p, ti.min(2 * p + 1, n_rows - 1)
            v = dots(strip, slot, ra * n_in, slot, rb * n_in, x, t0, t1, t2, x0, n_in)
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
    strip: ti.template(),
    y: ti.template(),
):
    n_out, n_block = ti.static(w_d.shape[1], w_d.shape[2])
    piece = ti.static(piece_blocks(w_d.shape[2]))
    rows = ti.static(strip_rows(piece_blocks(w_d.shape[2]) * Q8_BLOCK))
    n_strip = ti.static(-(-w_d.shape[1] // rows))
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n_strip)
            for s in range(span[0], span[1]):
                o0, o1 = s * rows, ti.min((s + 1) * rows, n_out)
                for q in range(ti.static(-(-w_d.shape[2] // piece))):
                    b0, b1 = q * piece, ti.min((q + 1) * piece, n_block)
                    n_in = (b1 - b0) * Q8_BLOCK
                    for o in range(o0, o1):
                        fill_part(w_q, w_d, lay, o, b0, b1, strip, i // SPREAD, (o - o0) * n_in)
                    again = q > 0 or add
                    strip_times_rows(strip, i // SPREAD, o1 - o0, x, 0, n, b0 * Q8_BLOCK, n_in, scale, again, y, o0)


def matmul_q8(w_q, w_d, lay, x, n, strip, y, *, scale=1.0, add=False):
    """Multiply `n` activation rows by a Q8_0 matrix: ``y[t] = scale * W[lay] @ x[t]``, or ``y +=`` that.

    Parameters
    ----------
    w_q, w_d : ti.Field
        Quants and f16 scales [L, O, I/32], as :func:`tmla.stages.linear.matvec_q8` takes them.
    lay : int
        ``0 <= lay < L``.
    x, y : ti.Field, f32 [T, >= I] and f32 [T, >= O]
        The first I values of a row are read; the first O are written, for the first `n` rows.
    strip : ti.Field, f32 [threads, >= strip_len(I)]
        CPU: scratch.
    scale : float
    add : bool

    Notes
    -----
    Reads ``34/32 * O * I`` bytes of weights once; ``2 O I n`` operations in f32. Reference: :func:`matmul_ref`.
    """
    if runtime.caps().gpu:
        matmul_simt(w_q, w_d, lay, x, n, scale, add, y)
    else:
        _matmul_loop(w_q, w_d, lay, x, n, scale, add, strip, y)


def matmul_ref(w_q, w_d, x):
    """NumPy reference for one layer: u8 [O, I], f16 [O, I/32], [T, I] -> float64 [T, O]."""
    return x.astype(np.float64) @ dequantise_ref(w_q, w_d).T
