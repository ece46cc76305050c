"""The tile under every matrix product of a chunk on a GPU: 128 x 64 sums, kept in registers by 256 threads.

A block walks along the sum's index k in steps of DEPTH. For each step its threads fetch what they need from memory, put
it into shared memory as pairs of f32 (rows ``2i, 2i + 1`` of the matrix side, tokens ``2j, 2j + 1`` of the token side,
one pair a u64: an access then moves eight bytes), and multiply. The next step's values are fetched before the present
ones are used. A thread has eight rows, as four pairs that lie 16 apart, and four tokens, as two pairs 16 apart: 32
sums, the most that stays in registers on every backend (docs/log.md).

Kernels differ in where their operands come from and where the sums go; the rest is here. Shared memory: 25 KB.
"""

import taichi as ti

from tmla.stages.words import first_of, pair, second_of

ROWS = 128
TOKENS = 64
DEPTH = 32
BLOCK = 256
ROW_STRIDE = ROWS // 2 + 1  # pairs from one k to the next; odd, so that a warp's stores meet few banks twice
TOKEN_STRIDE = TOKENS // 2 + 1
ROW_PAIRS = DEPTH * ROW_STRIDE
TOKEN_PAIRS = DEPTH * TOKEN_STRIDE
SUMS = 32


@ti.func
def put_pair(ws: ti.template(), k, pair_index, a, b):
    """Matrix values of rows ``2 i`` and ``2 i + 1`` at step index k."""
    ws[k * ROW_STRIDE + pair_index] = pair(a, b)


@ti.func
def put_tokens(xs: ti.template(), k, pair_index, a, b):
    """Token values of tokens ``2 j`` and ``2 j + 1`` at step index k."""
    xs[k * TOKEN_STRIDE + pair_index] = pair(a, b)


@ti.func
def multiply_tile(acc: ti.template(), ws: ti.template(), xs: ti.template(), tid):
    """acc[(2 a + u) * 4 + 2 b + v] += row pair a, half u, times token pair b, half v, over the step."""
    tx, ty = tid & 15, tid >> 4
    for k in range(DEPTH):
        w = ti.Vector([ws[k * ROW_STRIDE + ty + 16 * a] for a in ti.static(range(4))], dt=ti.u64)
        x = ti.Vector([xs[k * TOKEN_STRIDE + tx + 16 * b] for b in ti.static(range(2))], dt=ti.u64)
        for a in ti.static(range(4)):
            for b in ti.static(range(2)):
                acc[(2 * a) * 4 + 2 * b] += first_of(w[a]) * first_of(x[b])
                acc[(2 * a) * 4 + 2 * b + 1] += first_of(w[a]) * second_of(x[b])
                acc[(2 * a + 1) * 4 + 2 * b] += second_of(w[a]) * first_of(x[b])
                acc[(2 * a + 1) * 4 + 2 * b + 1] += second_of(w[a]) * second_of(x[b])


@ti.func
def row_of(tid, i):
    """Row within the tile of this thread's i-th row, 0 <= i < 8."""
    return 2 * ((tid >> 4) + 16 * (i >> 1)) + (i & 1)


@ti.func
def token_of(tid, j):
    """Token within the tile of this thread's j-th token, 0 <= j < 4."""
    return 2 * ((tid & 15) + 16 * (j >> 1)) + (j & 1)


@ti.func
def quant(word, j: ti.template()):
    """The j-th of the eight int8 in a word, as f32."""
    half = ti.cast(word >> (32 * (j // 4)), ti.i32)
    return ti.cast((half << (24 - 8 * (j % 4))) >> 24, ti.f32)


@ti.func
def fetch_word(
    bits: ti.template(), d: ti.template(), k: ti.template(), w_q: ti.template(), w_d: ti.template(), lay, row, word
):
    """Eight quants and their scale into slot k."""
    bits[k] = w_q[lay, row, word]
    d[k] = ti.cast(w_d[lay, row, word >> 2], ti.f32)


@ti.func
def put_rows(ws: ti.template(), bits: ti.template(), d: ti.template(), tid):
    """Quants of slots 0 and 1, a row pair's, along k: thread ``4 r + c`` has word c of the step for row pair r."""
    for j in ti.static(range(8)):
        put_pair(ws, (tid & 3) * 8 + j, tid >> 2, d[0] * quant(bits[0], j), d[1] * quant(bits[1], j))


@ti.func
def fetch_tokens(v: ti.template(), x: ti.template(), ta, tb, x0, k0, n_in: ti.template(), tid):
    """Four values each of two tokens: thread ``8 j + q`` has values ``k0 + 4 q`` of token pair j; zeros behind n_in."""
    for i in ti.static(range(4)):
        k = k0 + (tid & 7) * 4 + i
        if ti.static(n_in % DEPTH == 0):
            v[i] = x[ta, x0 + k]
            v[4 + i] = x[tb, x0 + k]
        else:
            v[i], v[4 + i] = 0.0, 0.0
            if k < n_in:
                v[i] = x[ta, x0 + k]
                v[4 + i] = x[tb, x0 + k]


@ti.func
def put_fetched_tokens(xs: ti.template(), v: ti.template(), tid):
    """What :func:`fetch_tokens` fetched."""
    for i in ti.static(range(4)):
        put_tokens(xs, (tid & 7) * 4 + i, tid >> 3, v[i], v[4 + i])


@ti.func
def put_f32_rows(ws: ti.template(), m: ti.template(), tid):
    """Values of a matrix in f32: thread ``8 r + q`` has four values, from ``4 q`` of the step on, of rows 2 r, 2 r + 1
    (m[0:4], m[4:8]) and of the two rows 64 behind them (m[8:16])."""
    for s in ti.static(range(2)):
        for q in ti.static(range(4)):
            put_pair(ws, (tid & 7) * 4 + q, (tid >> 3) + 32 * s, m[s * 8 + q], m[s * 8 + 4 + q])
