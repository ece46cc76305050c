"""Words: how GPUs hold Q8_0 quants and cached rows, and the inner product over them.

Quants: u64 of eight int8, the first lowest, ``[L, O, I/8]``; scales stay f16 ``[L, O, I/32]``. Cache: u64 of four f16
or two f32. A thread then fetches 8 bytes at a time; bytes one by one reached 410 to 2,300 GB/s where words reach 3,700
(docs/log.md).

A matrix row is read by the lanes of a warp side by side: lane i takes words ``i, i + W, i + 2W ...``. The activation
row lies in shared memory in *lane order*, the j-th values of W consecutive words together, padded so that neither the
writes nor the reads meet in one bank.
"""

import dataclasses

import taichi as ti

from tmla.stages.lanes import cdiv, lane_sum, log2, total_of, width

WORD = 8  # quants in a word
SHARED_ROW_BYTES = 24 << 10  # largest part of an activation row kept in shared memory (Apple has 32 KiB in all)


@ti.func
def dot_word(word, xv: ti.template()):
    """Sum of the eight int8 of a word times xv."""
    lo, hi = ti.cast(word, ti.i32), ti.cast(word >> 32, ti.i32)
    p = 0.0
    for j in ti.static(range(4)):
        p += ti.cast((lo << (24 - 8 * j)) >> 24, ti.f32) * xv[j]
    for j in ti.static(range(4)):
        p += ti.cast((hi << (24 - 8 * j)) >> 24, ti.f32) * xv[4 + j]
    return p


def row_parts(n_word: int, step: int) -> tuple[int, int, int]:
    """How a row of `n_word` words is walked, `step` words of it at a time.

    Returns
    -------
    n_parts, n_steps, n_shared
        Parts staged one after another, steps in a part, and f32 of shared memory for one part.
    """
    n_steps = cdiv(n_word, step)
    per_part = max(1, SHARED_ROW_BYTES // (4 * shared_len(step)))
    n_parts = cdiv(n_steps, per_part)
    per_part = cdiv(n_steps, n_parts)
    return n_parts, per_part, shared_len(step * per_part)


def shared_len(n_word: int) -> int:
    """Length in f32 of the shared array for `n_word` words (a multiple of W) of an activation row."""
    return n_word // width() * WORD * (width() + 4)


@ti.func
def lane_place(e):
    """Where value e of a row sits in the shared array."""
    w = ti.static(width())
    word = e >> 3
    return ((word >> ti.static(log2(w))) * WORD + (e & (WORD - 1))) * (w + 4) + (word & (w - 1))


@ti.func
def stage_row(
    xs: ti.template(),
    x: ti.template(),
    x0,
    gain: ti.template(),
    lay,
    first,
    tid,
    n: ti.template(),
    n_in: ti.template(),
    block: ti.template(),
    norm: ti.template(),
):
    """Put ``x[0, x0 + first : x0 + first + n]``, times gain[lay] where `norm`, into shared memory; zeros behind n_in.

    Returns this thread's share of the sum of squares (0 without `norm`).
    """
    sq = 0.0
    for k in range(ti.static(cdiv(n, block))):
        e = k * block + tid
        v = 0.0
        if e < n and first + e < n_in:
            v = x[0, x0 + first + e]
            if ti.static(norm):
                sq += v * v
                v *= gain[lay, first + e]
        if e < n:
            xs[lane_place(e)] = v
    return sq


@ti.func
def fetch(
    w: ti.template(),
    d: ti.template(),
    w_q: ti.template(),
    w_d: ti.template(),
    lay,
    rows: ti.template(),
    col0,
    stride: ti.template(),
    n_rows: ti.template(),
    n_ahead: ti.template(),
):
    """Load `n_ahead` words of each row, `stride` apart from col0 on, and their scales, into the vectors w and d.

    Words behind the row's end repeat its last: the activations there are zero.
    """
    n_word = ti.static(w_q.shape[2])
    for k in ti.static(range(n_rows * n_ahead)):
        col = ti.min(col0 + k // n_rows * stride, n_word - 1)
        w[k] = w_q[lay, rows[k % n_rows], col]
        d[k] = w_d[lay, rows[k % n_rows], col >> 2]


@ti.func
def multiply(
    acc: ti.template(),
    w: ti.template(),
    d: ti.template(),
    xs: ti.template(),
    word0,
    stride: ti.template(),
    n_rows: ti.template(),
    n_ahead: ti.template(),
):
    """acc[r] += the fetched words of row r times the shared row, from word `word0` of it on."""
    w_pad = ti.static(width() + 4)
    lw = ti.static(log2(width()))
    for u in ti.static(range(n_ahead)):
        word = word0 + u * stride
        base = (word >> lw) * WORD * w_pad + (word & ti.static(width() - 1))
        xv = ti.Vector([xs[base + j * w_pad] for j in ti.static(range(WORD))])
        for r in ti.static(range(n_rows)):
            acc[r] += ti.cast(d[u * n_rows + r], ti.f32) * dot_word(w[u * n_rows + r], xv)


@ti.func
def half_of(word, j: ti.template()):
    """The j-th of the four f16 in a word, as f32."""
    return ti.cast(ti.bit_cast(ti.cast(word >> (16 * j), ti.u16), ti.f16), ti.f32)


@ti.func
def first_of(word):
    """The first of the two f32 in a word."""
    return ti.bit_cast(ti.cast(word, ti.u32), ti.f32)


@ti.func
def second_of(word):
    """The second of the two f32 in a word."""
    return ti.bit_cast(ti.cast(word >> 32, ti.u32), ti.f32)


@ti.func
def pair(a, b):
    """A word of two f32."""
    return ti.cast(ti.bit_cast(a, ti.u32), ti.u64) | (ti.cast(ti.bit_cast(b, ti.u32), ti.u64) << 32)


@ti.func
def halves(v: ti.template()):
    """A word of four f16, from a vector of four f32."""
    r = ti.u64(0)
    for j in ti.static(range(4)):
        r |= ti.cast(ti.bit_cast(ti.cast(v[j], ti.f16), ti.u16), ti.u64) << (16 * j)
    return r


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a matrix kernel cuts its work: compile-time numbers, each a power of two but `rows` and `ahead`.

    Attributes
    ----------
    rows : int
        Matrix rows a warp works on at once.
    split : int
        Warps that share the columns of a row.
    block : int
        Threads of a block.
    ahead : int
        Words of a row that are fetched together.
    prefetch : bool
        Fetch the next words before the present ones are used.
    """

    rows: int
    split: int
    block: int
    ahead: int
    prefetch: bool = False

    @property
    def groups(self) -> int:
        """Groups of rows in a block."""
        return self.block // width() // self.split


@ti.func
def rows_dot(
    acc: ti.template(),
    w_q: ti.template(),
    w_d: ti.template(),
    v_q: ti.template(),
    v_d: ti.template(),
    two: ti.template(),
    lay,
    rows: ti.template(),
    x: ti.template(),
    x0,
    gain: ti.template(),
    gain_lay,
    norm: ti.template(),
    tid,
    xs: ti.template(),
    part: ti.template(),
    t: ti.template(),
):
    """Lane sums of `t.rows` matrix rows times an activation row; the whole block takes part.

    acc holds t.rows sums of w, then (if `two`) as many of v. With `norm` the row is multiplied by `gain`; returned is
    this thread's share of its sum of squares. xs is shared memory of :func:`row_parts`.
    """
    w = ti.static(width())
    n_word = ti.static(w_q.shape[2])
    stride = ti.static(w * t.split)
    step = ti.static(w * t.split * t.ahead)
    n_parts, n_steps, _ = ti.static(row_parts(n_word, step))
    n_fetch = ti.static(t.rows * t.ahead)
    lane = ((tid >> ti.static(log2(w))) & ti.static(t.split - 1)) * w + (tid & ti.static(w - 1))
    w_now = ti.Vector([ti.u64(0) for _ in ti.static(range(n_fetch))], dt=ti.u64)
    d_now = ti.Vector([ti.cast(0.0, ti.f16) for _ in ti.static(range(n_fetch))], dt=ti.f16)
    v_now = ti.Vector([ti.u64(0) for _ in ti.static(range(n_fetch if two else 1))], dt=ti.u64)
    e_now = ti.Vector([ti.cast(0.0, ti.f16) for _ in ti.static(range(n_fetch if two else 1))], dt=ti.f16)
    fetch(w_now, d_now, w_q, w_d, lay, rows, lane, stride, t.rows, t.ahead)  # before the row is staged: both are slow
    if ti.static(two):
        fetch(v_now, e_now, v_q, v_d, lay, rows, lane, stride, t.rows, t.ahead)
    sq = 0.0
    acc_w = ti.Vector([0.0 for _ in ti.static(range(t.rows))])
    acc_v = ti.Vector([0.0 for _ in ti.static(range(t.rows))])
    for p in range(n_parts):
        if ti.static(n_parts > 1):
            ti.simt.block.sync()
        sq += stage_row(
            xs,
            x,
            x0,
            gain,
            gain_lay,
            p * (n_steps * step * WORD),
            tid,
            n_steps * step * WORD,
            n_word * WORD,
            t.block,
            norm,
        )
        ti.simt.block.sync()
        for c in range(n_steps):
            w_next, d_next, v_next, e_next = w_now, d_now, v_now, e_now
            col = (p * n_steps + c + (1 if t.prefetch else 0)) * step + lane
            if ti.static(n_parts * n_steps > 1):
                if (col < n_word) if ti.static(t.prefetch) else (p + c > 0):
                    fetch(w_next, d_next, w_q, w_d, lay, rows, col, stride, t.rows, t.ahead)
                    if ti.static(two):
                        fetch(v_next, e_next, v_q, v_d, lay, rows, col, stride, t.rows, t.ahead)
            if ti.static(not t.prefetch):
                w_now, d_now, v_now, e_now = w_next, d_next, v_next, e_next
            multiply(acc_w, w_now, d_now, xs, c * step + lane, stride, t.rows, t.ahead)
            if ti.static(two):
                multiply(acc_v, v_now, e_now, xs, c * step + lane, stride, t.rows, t.ahead)
            if ti.static(t.prefetch):
                w_now, d_now, v_now, e_now = w_next, d_next, v_next, e_next
    for r in ti.static(range(t.rows)):
        acc[r] = lane_sum(acc_w[r])
        if ti.static(two):
            acc[t.rows + r] = lane_sum(acc_v[r])
    return sq


@ti.func
def rms_factor(sq, part: ti.template(), place, tid, n: ti.template(), eps, block: ti.template()):
    """Join the threads' sums of squares of a row of n values: 1 / sqrt(mean + eps), in every thread of the block."""
    w = ti.static(width())
    s = lane_sum(sq)
    if (tid & ti.static(w - 1)) == 0:
        part[place + (tid >> ti.static(log2(w)))] = s
    ti.simt.block.sync()
    return 1.0 / ti.sqrt(total_of(part, place, block // w) / n + eps)
