"""Greedy choice on the device: the id of the largest logit, the first of equals, and the step to the next token."""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.attention import NEG_INF
from tmla.stages.lanes import cdiv, log2
from tmla.stages.linear import Q8_BLOCK, q8_value

BLOCK = 256
NO_ID = 0x7FFFFFFF  # chosen where no logit is a number


@ti.func
def argmax_loop(logits: ti.template(), n, token: ti.template()):
    ti.loop_config(serialize=True)
    for _ in range(1):
        best, value = NO_ID, NEG_INF
        for i in range(n):
            if logits[0, i] > value:
                best, value = i, logits[0, i]
        token[0] = best


@ti.func
def _best_of_block(tid, value, index, values: ti.template(), indices: ti.template()):
    """Tree over the block's threads: afterwards ``indices[tid >> 8]`` is the first index of the largest value."""
    values[tid] = value
    indices[tid] = index
    ti.simt.block.sync()
    for s in range(ti.static(log2(BLOCK))):
        other = tid + (BLOCK >> (s + 1))
        if tid < (BLOCK >> (s + 1)):
            v, i = values[other], indices[other]
            if v > values[tid] or (v == values[tid] and i < indices[tid]):
                values[tid] = v
                indices[tid] = i
        ti.simt.block.sync()


@ti.func
def argmax_blocks(logits: ti.template(), n: ti.template(), best: ti.template(), who: ti.template()):
    """Largest logit of each of ``len(best)`` slices, and its first index."""
    n_slices = ti.static(best.shape[0])
    per_slice = ti.static(cdiv(n, best.shape[0]))
    ti.loop_config(block_dim=BLOCK)
    for i in range(n_slices * BLOCK):
        values = ti.simt.block.SharedArray(BLOCK, ti.f32)
        indices = ti.simt.block.SharedArray(BLOCK, ti.i32)
        tid, blk = i & (BLOCK - 1), i >> ti.static(log2(BLOCK))
        value, index = NEG_INF, NO_ID
        for k in range(ti.static(cdiv(cdiv(n, best.shape[0]), BLOCK))):
            e = k * BLOCK + tid
            at = blk * per_slice + e
            if e < per_slice and at < n:
                v = logits[0, at]
                if v > value:
                    value, index = v, at
        _best_of_block(tid, value, index, values, indices)
        if tid == 0:
            best[blk] = values[tid]
            who[blk] = indices[tid]


@ti.func
def _join_slices(tid, best: ti.template(), who: ti.template(), values: ti.template(), indices: ti.template()):
    """The block finds the index of the best slice; every thread gets it."""
    value, index = NEG_INF, NO_ID
    if tid < best.shape[0]:
        value, index = best[tid], who[tid]
    _best_of_block(tid, value, index, values, indices)
    return indices[tid >> ti.static(log2(BLOCK))]


@ti.func
def argmax_join(best: ti.template(), who: ti.template(), token: ti.template()):
    """The best slice's index: one block."""
    ti.loop_config(block_dim=BLOCK)
    for i in range(BLOCK):
        values = ti.simt.block.SharedArray(BLOCK, ti.f32)
        indices = ti.simt.block.SharedArray(BLOCK, ti.i32)
        t = _join_slices(i, best, who, values, indices)
        if i == 0:
            token[0] = t


@ti.func
def next_token(
    g: ti.template(),
    n: ti.template(),
    best: ti.template(),
    who: ti.template(),
    token: ti.template(),
    chosen: ti.template(),
    step: ti.template(),
    pos: ti.template(),
    layer: ti.template(),
    x: ti.template(),
):
    """One block: join the slices, keep the id in chosen[step], embed it into x; step and pos grow, the layer is 0."""
    dim = ti.static(x.shape[1])
    ti.loop_config(block_dim=BLOCK)
    for i in range(BLOCK):
        values = ti.simt.block.SharedArray(BLOCK, ti.f32)
        indices = ti.simt.block.SharedArray(BLOCK, ti.i32)
        t = _join_slices(i, best, who, values, indices)
        row = ti.min(t, n - 1)  # logits that are not numbers choose no id: Python sees that in chosen
        for k in range(ti.static(cdiv(x.shape[1], BLOCK))):
            e = k * BLOCK + i
            if e < dim:
                x[0, e] = (
                    g.embd_scale * ti.cast(g.embd_d[0, row, e // Q8_BLOCK], ti.f32) * q8_value(g.embd_q, 0, row, e)
                )
        if i == 0:
            token[0] = t
            chosen[step[0]] = t
            step[0] = step[0] + 1
            pos[0] = pos[0] + 1
            layer[0] = 0


@ti.kernel
def _argmax_loop(logits: ti.template(), n: ti.template(), token: ti.template()):
    argmax_loop(logits, n, token)


@ti.kernel
def _argmax_simt(
    logits: ti.template(), n: ti.template(), best: ti.template(), who: ti.template(), token: ti.template()
):
    argmax_blocks(logits, n, best, who)
    argmax_join(best, who, token)


def argmax(logits, n, best, who, token):
    """Write the id of the largest of the first `n` logits, f32 [1, n_vocab], to ``token`` i32 [1].

    best f32 [S], who i32 [S], S <= 256: scratch of GPUs. Reference: :func:`argmax_ref`.
    """
    if runtime.caps().gpu:
        _argmax_simt(logits, n, best, who, token)
    else:
        _argmax_loop(logits, n, token)


def argmax_ref(logits):
    """NumPy reference: the first index of the maximum."""
    return int(np.argmax(logits))
