"""The cache row of this position, ``[latent C ; k_pe R]``: latent norm and key rope, from the kv_a projection.

The projection is f32 and both read it, so that a f16 cache rounds once. (A row that is rounded, normalised in place
and rounded again has twice the error, and flipped near-ties of the router: docs/log.md.)
GPUs keep the cache in words: u64 [L, T, ceil((C + R) / 4)] of four f16, or twice as many of two f32.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.lanes import cdiv, width
from tmla.stages.norm import rms_norm_ref
from tmla.stages.rope import rope_ref, turned
from tmla.stages.words import halves, pair, rms_factor

BLOCK = 256


@ti.func
def write_row(
    proj: ti.template(),
    row,
    row0: ti.template(),
    w: ti.template(),
    lay,
    eps,
    table: ti.template(),
    half: ti.template(),
    cache: ti.template(),
    pos,
):
    """One thread: the cache row of position `pos` from row `row` of the projections."""
    n, n_pair = ti.static(w.shape[1], table.shape[1])
    ss = 0.0
    for c in range(n):
        ss += proj[row, row0 + c] * proj[row, row0 + c]
    inv = 1.0 / ti.sqrt(ss / n + eps)
    for c in range(n):
        cache[lay, pos, c] = ti.cast(proj[row, row0 + c] * inv * w[lay, c], cache.dtype)
    for p in range(n_pair):
        t = turned(proj, row, row0 + n, p, table, pos, half)
        i, j = n + 2 * p, n + 2 * p + 1
        if ti.static(half):
            i, j = n + p, n + p + n_pair
        cache[lay, pos, i] = ti.cast(t[0], cache.dtype)
        cache[lay, pos, j] = ti.cast(t[1], cache.dtype)


@ti.func
def row_value(
    proj: ti.template(), row, i, c, inv, w: ti.template(), lay, table: ti.template(), pos, half: ti.template()
):
    """Value c of the finished row, 0 behind its end; the projection starts at ``proj[row, i]``."""
    n, n_pair = ti.static(w.shape[1], table.shape[1])
    v = 0.0
    if c < n:
        v = proj[row, i + c] * inv * w[lay, c]
    elif c < n + 2 * n_pair:
        r = c - n
        p = r >> 1
        second = (r & 1) == 1
        if ti.static(half):
            second = r >= n_pair
            p = r - n_pair if second else r
        t = turned(proj, row, i + n, p, table, pos, half)
        v = t[1] if second else t[0]
    return v


@ti.func
def cache_row_block(
    tid,
    part: ti.template(),
    proj: ti.template(),
    row,
    row0: ti.template(),
    w: ti.template(),
    lay,
    eps: ti.template(),
    table: ti.template(),
    half: ti.template(),
    cache: ti.template(),
    pos,
    f32: ti.template(),
    block: ti.template(),
):
    """One block writes the row; part is shared f32 of at least ``block / W`` values."""
    n = ti.static(w.shape[1])
    sq = 0.0
    for k in range(ti.static(cdiv(n, block))):
        c = k * block + tid
        if c < n:
            sq += proj[row, row0 + c] * proj[row, row0 + c]
    inv = rms_factor(sq, part, 0, tid, n, eps, block)
    for k in range(ti.static(cdiv(cache.shape[2], block))):
        word = k * block + tid
        if word < cache.shape[2]:
            if ti.static(f32):
                a = row_value(proj, row, row0, 2 * word, inv, w, lay, table, pos, half)
                b = row_value(proj, row, row0, 2 * word + 1, inv, w, lay, table, pos, half)
                cache[lay, pos, word] = pair(a, b)
            else:
                v = ti.Vector([0.0 for _ in ti.static(range(4))])
                for j in ti.static(range(4)):
                    v[j] = row_value(proj, row, row0, 4 * word + j, inv, w, lay, table, pos, half)
                cache[lay, pos, word] = halves(v)


@ti.func
def cache_row_one(
    row,
    _end,
    proj: ti.template(),
    row0: ti.template(),
    w: ti.template(),
    layer: ti.template(),
    first: ti.template(),
    eps: ti.template(),
    table: ti.template(),
    half: ti.template(),
    cache: ti.template(),
    pos: ti.template(),
):
    at = ti.min(pos[0], ti.static(cache.shape[1] - 1))  # what it is: one term of the address, see row_dot_q8
    write_row(proj, row, row0, w, layer[0] - first, eps, table, half, cache, at)


@ti.kernel
def _cache_row_loop(
    proj: ti.template(),
    row0: ti.template(),
    w: ti.template(),
    layer: ti.template(),
    first: ti.template(),
    eps: ti.f32,
    table: ti.template(),
    half: ti.template(),
    cache: ti.template(),
    pos: ti.template(),
):
    ti.loop_config(serialize=True)
    for row in range(1):
        cache_row_one(row, 1, proj, row0, w, layer, first, eps, table, half, cache, pos)


@ti.kernel
def _cache_row_simt(
    proj: ti.template(),
    row0: ti.template(),
    w: ti.template(),
    layer: ti.template(),
    first: ti.template(),
    eps: ti.template(),
    table: ti.template(),
    half: ti.template(),
    cache: ti.template(),
    pos: ti.template(),
    f32: ti.template(),
):
    ti.loop_config(block_dim=BLOCK)
    for i in range(BLOCK):
        part = ti.simt.block.SharedArray(ti.static(BLOCK // width()), ti.f32)
        cache_row_block(i, part, proj, 0, row0, w, layer[0] - first, eps, table, half, cache, pos[0], f32, BLOCK)


def cache_row(proj, row0, w, layer, eps, table, half, cache, pos, *, f32, first=0):
    """Write ``cache[layer[0] - first, pos[0]]``.

    Parameters
    ----------
    proj : ti.Field, f32 [1, >= row0 + C + R]
        The kv_a projection stands at `row0`.
    w : ti.Field, f32 [L, C]
        Norm weight of the latent.
    table : ti.Field, f32 [T, R/2, 2]
    half : bool
        Rope pairs, see :mod:`tmla.stages.rope`.
    cache : ti.Field
        f16 or f32 [L, T, C + R]; words on GPUs (:func:`cache_shape`).
    f32 : bool
        The words hold f32 (GPUs).
    """
    if runtime.caps().gpu:
        _cache_row_simt(proj, row0, w, layer, first, eps, table, half, cache, pos, f32)
    else:
        _cache_row_loop(proj, row0, w, layer, first, eps, table, half, cache, pos)


def cache_field(n_layers, n_ctx, row_width, dtype, layout):
    """Type and shape of the cache of some layers: rows as values ("bytes"), or as words ("words")."""
    if layout == "bytes":
        return {"f16": ti.f16, "f32": ti.f32}[dtype], (n_layers, n_ctx, row_width)
    return ti.u64, (n_layers, n_ctx, cdiv(row_width, 4) * {"f16": 1, "f32": 2}[dtype])


def cache_numpy(cache, row_width, dtype):
    """A cache field's rows as an array, f32 [L, T, C + R]."""
    rows = cache.to_numpy()
    if cache.dtype == ti.u64:
        rows = rows.view({"f16": np.float16, "f32": np.float32}[dtype])[..., :row_width]
    return rows.astype(np.float32)


def cache_from_numpy(cache, rows, dtype):
    """Fill a cache field from an array [L, T, C + R]; the padding of words becomes zero."""
    if cache.dtype == ti.u64:
        out = np.zeros(
            (*cache.shape[:2], cache.shape[2] * 8 // {"f16": 2, "f32": 4}[dtype]),
            {"f16": np.float16, "f32": np.float32}[dtype],
        )
        out[..., : rows.shape[2]] = rows
        cache.from_numpy(out.view(np.uint64))
    else:
        cache.from_numpy(rows)


def cache_row_ref(proj, w, eps, table_row, half=False):
    """NumPy reference: projection [C + R], [C], table row [R/2, 2] -> float64 [C + R]."""
    n = len(w)
    return np.concatenate([rms_norm_ref(proj[:n], w, eps), rope_ref(proj[n:], table_row, half)])
