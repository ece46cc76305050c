"""Kernels of ``tmla doctor``: small ones that say by their results what a backend does."""

import taichi as ti

from tmla.stages.lanes import lane_max, lane_sum, log2
from tmla.stages.linear import q8_value
from tmla.stages.words import SHARED_ROW_BYTES, WORD, dot_word

BLOCK = 256  # threads of a block
SHARED = SHARED_ROW_BYTES // 4  # f32 that the reduction keeps in shared memory
FACTOR = 2654435761  # word i of the large fields is i times that: no two near ones share a byte


@ti.kernel
def copy_row(source: ti.template(), target: ti.template()):
    """``target[i] = source[i]``, of one type."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@ti.kernel
def read_quants(w_q: ti.template(), out: ti.template()):
    """Quants of layer 0 as f32 [O, I], by the function that all stages read them with."""
    for o in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[o, i] = q8_value(w_q, 0, o, i)


@ti.kernel
def read_words(w_q: ti.template(), out: ti.template()):
    """Quants of layer 0 as f32 [O, I], each by a word's inner product with a unit vector."""
    for o in range(out.shape[0]):
        for i in range(w_q.shape[2]):
            word = w_q[0, o, i]
            for j in ti.static(range(WORD)):
                unit = ti.Vector([1.0 if k == j else 0.0 for k in range(WORD)])
                out[o, i * WORD + j] = dot_word(word, unit)


@ti.kernel
def read_scales(w_d: ti.template(), copy: ti.template(), value: ti.template(), written: ti.template()):
    """Scales of layer 0 three ways: copied as f16, read as f32, and that written as f16 again; each [O, I/32]."""
    for o in range(value.shape[0]):
        for b in range(value.shape[1]):
            copy[o, b] = w_d[0, o, b]
            v = ti.cast(w_d[0, o, b], ti.f32)
            value[o, b] = v
            written[o, b] = ti.cast(v, ti.f16)


@ti.kernel
def block_sums(x: ti.template(), out: ti.template()):
    """``out[b]`` = sum of the SHARED values of block b, through a shared array and barriers; f32 [B * SHARED], [B]."""
    ti.loop_config(block_dim=BLOCK)
    for i in range(ti.static(out.shape[0] * BLOCK)):
        part = ti.simt.block.SharedArray(SHARED, ti.f32)
        tid, blk = i & (BLOCK - 1), i >> ti.static(log2(BLOCK))
        for k in range(ti.static(SHARED // BLOCK)):
            part[k * BLOCK + tid] = x[blk * SHARED + k * BLOCK + tid]
        ti.simt.block.sync()
        s = 0.0
        for k in range(ti.static(SHARED // BLOCK)):
            s += part[k * BLOCK + (BLOCK - 1) - tid]  # what another thread wrote
        ti.simt.block.sync()
        part[tid] = s
        ti.simt.block.sync()
        for step in range(ti.static(log2(BLOCK))):
            half = BLOCK >> (step + 1)
            if tid < half:
                part[tid] = part[tid] + part[tid + half]
            ti.simt.block.sync()
        if tid == 0:
            out[blk] = part[tid]


@ti.kernel
def lane_results(x: ti.template(), total: ti.template(), top: ti.template()):
    """Sum and maximum over the lanes, in every lane; all f32 [n], n a multiple of BLOCK."""
    ti.loop_config(block_dim=BLOCK)
    for i in range(x.shape[0]):
        v = x[i]
        total[i] = lane_sum(v)
        top[i] = lane_max(v)


@ti.kernel
def count(n: ti.template()):
    """Add 1 to each element of an i32 field: the smallest launch."""
    for i in range(n.shape[0]):
        n[i] = n[i] + 1


@ti.kernel
def count_by(n: ti.template(), step: ti.i32):
    """Add `step` to each element: the smallest launch with an argument."""
    for i in range(n.shape[0]):
        n[i] = n[i] + step


@ti.kernel
def fill_words(f: ti.template(), n_threads: ti.template()):
    """``f[i] = i * FACTOR``, u64."""
    for t in range(n_threads):
        for k in range(ti.static(f.shape[0] // n_threads)):
            i = k * n_threads + t
            f[i] = ti.cast(i, ti.u64) * ti.u64(FACTOR)


@ti.kernel
def mark(f: ti.template(), stride: ti.i32, n: ti.i32):
    """``f[t * stride] = t + 1`` for the first `n` marks, u64."""
    for t in range(n):
        f[t * stride] = ti.cast(t + 1, ti.u64)


@ti.kernel
def read_marks(f: ti.template(), stride: ti.i32, out: ti.template()):
    """``out[t] = f[t * stride]``, u64."""
    for t in range(out.shape[0]):
        out[t] = f[t * stride]


@ti.kernel
def sum_words(f: ti.template(), out: ti.template(), side_by_side: ti.template()):
    """Sum of all words of `f`, u64, by ``len(out)`` threads that read side by side (GPU) or a stretch each (CPU)."""
    for t in range(out.shape[0]):
        n = ti.static(f.shape[0] // out.shape[0])
        s = ti.u64(0)
        for k in range(n):
            if ti.static(side_by_side):
                s += f[k * out.shape[0] + t]
            else:
                s += f[t * n + k]
        out[t] = s
