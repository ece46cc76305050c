"""Rotary embedding of the pe window: of the query heads in place, and of the key tail on its way into the cache.

Both are one stage: :func:`rope_row` turns the R values at `offset` of one row into another.
Pair p of the window turns by angle ``pos * freq[p]``. *consecutive* pairs are ``(2p, 2p+1)`` (deepseek2, plm),
*half* pairs ``(p, p + R/2)`` (minicpm3). Source: RoFormer (Su et al., 2021); YaRN changes the table alone.
"""

import numpy as np
import taichi as ti


@ti.func
def rope_row(
    src: ti.template(),
    src_a,
    src_b,
    dst: ti.template(),
    dst_a,
    dst_b,
    offset,
    table: ti.template(),
    pos: ti.template(),
    half: ti.template(),
):
    n_pair = ti.static(table.shape[1])
    for p in range(n_pair):
        i = offset + 2 * p
        j = i + 1
        if ti.static(half):
            i = offset + p
            j = i + n_pair
        u, v = src[src_a, src_b, i], src[src_a, src_b, j]
        cos, sin = table[pos[0], p, 0], table[pos[0], p, 1]
        dst[dst_a, dst_b, i] = ti.cast(u * cos - v * sin, dst.dtype)
        dst[dst_a, dst_b, j] = ti.cast(u * sin + v * cos, dst.dtype)


@ti.func
def rope_heads_body(q: ti.template(), offset, table: ti.template(), pos: ti.template(), half: ti.template()):
    ti.loop_config(serialize=True)
    for h in range(q.shape[1]):
        rope_row(q, 0, h, q, 0, h, offset, table, pos, half)


@ti.func
def rope_cache_body(
    row: ti.template(),
    cache: ti.template(),
    layer,
    offset,
    table: ti.template(),
    pos: ti.template(),
    half: ti.template(),
):
    ti.loop_config(serialize=True)
    for _ in range(1):
        rope_row(row, 0, 0, cache, layer, pos[0], offset, table, pos, half)


@ti.kernel
def _rope_heads(q: ti.template(), offset: ti.i32, table: ti.template(), pos: ti.template(), half: ti.template()):
    rope_heads_body(q, offset, table, pos, half)


@ti.kernel
def _rope_cache(
    row: ti.template(),
    cache: ti.template(),
    layer: ti.i32,
    offset: ti.i32,
    table: ti.template(),
    pos: ti.template(),
    half: ti.template(),
):
    rope_cache_body(row, cache, layer, offset, table, pos, half)


def rope_heads(q, offset, table, pos, half=False):
    """Rotate R values from `offset` on in every head's row.

    Parameters
    ----------
    q : ti.Field, f32 [1, H, N + R]
    offset : int
        N.
    table : ti.Field, f32 [T, R/2, 2]
        Cosine and sine, from float64 (:meth:`tmla.config.MLAConfig.rope_table`).
    pos : ti.Field, i32 [1]
    half : bool
        Pairs are ``(p, p + R/2)`` instead of ``(2p, 2p+1)``.
    """
    _rope_heads(q, offset, table, pos, half)


def rope_cache(row, cache, layer, offset, table, pos, half=False):
    """Rotate the tail of the kv_a projection into the cache.

    Parameters
    ----------
    row : ti.Field, f32 [1, 1, C + R]
    cache : ti.Field, f16 or f32 [L, T, C + R]
        ``cache[layer, pos[0], C:]`` is written.
    offset : int
        C.
    """
    _rope_cache(row, cache, layer, offset, table, pos, half)


def rope_ref(x, table, half=False):
    """NumPy reference: [..., R] rotated by one table row [R/2, 2] -> float64 [..., R]."""
    x, table = x.astype(np.float64), table.astype(np.float64)
    out = np.empty_like(x)
    n = x.shape[-1] // 2
    i, j = (slice(0, n), slice(n, None)) if half else (slice(0, None, 2), slice(1, None, 2))
    cos, sin = table[..., 0], table[..., 1]
    out[..., i] = x[..., i] * cos - x[..., j] * sin
    out[..., j] = x[..., i] * sin + x[..., j] * cos
    return out
