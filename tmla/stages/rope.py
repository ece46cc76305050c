"""Rotary embedding of the pe window, in place: of the query heads, and of the key tail of a cache row.

Both are one stage: a field ``[A, B, width]``, of which rows ``[a, b0:b0+n]`` hold a window of R values at `offset`.
Pair p of the window turns by angle ``pos * freq[p]``. *consecutive* pairs are ``(2p, 2p+1)`` (deepseek2, plm),
*half* pairs ``(p, p + R/2)`` (minicpm3). Source: RoFormer (Su et al., 2021); YaRN changes the table alone.
"""

import numpy as np
import taichi as ti


@ti.func
def rope_row(buf: ti.template(), a, b, offset, table: ti.template(), pos, half: ti.template()):
    n_pair = ti.static(table.shape[1])
    for p in range(n_pair):
        i = offset + 2 * p
        j = i + 1
        if ti.static(half):
            i = offset + p
            j = i + n_pair
        u, v = ti.cast(buf[a, b, i], ti.f32), ti.cast(buf[a, b, j], ti.f32)
        cos, sin = table[pos, p, 0], table[pos, p, 1]
        buf[a, b, i] = ti.cast(u * cos - v * sin, buf.dtype)
        buf[a, b, j] = ti.cast(u * sin + v * cos, buf.dtype)


@ti.func
def rope_body(buf: ti.template(), a, b0, n, offset, table: ti.template(), pos, half: ti.template()):
    ti.loop_config(serialize=True)
    for b in range(n):
        rope_row(buf, a, b0 + b, offset, table, pos, half)


@ti.kernel
def _rope(
    buf: ti.template(),
    a: ti.i32,
    b0: ti.i32,
    n: ti.i32,
    offset: ti.i32,
    table: ti.template(),
    pos: ti.i32,
    half: ti.template(),
):
    rope_body(buf, a, b0, n, offset, table, pos, half)


def rope(buf, a, b0, n, offset, table, pos, half=False):
    """Rotate R values from `offset` on in rows ``buf[a, b0:b0+n]`` to position `pos`.

    Parameters
    ----------
    buf : ti.Field, f32 or f16 [A, B, width]
        Queries ``[1, H, N + R]`` or the cache ``[L, T, C + R]``.
    table : ti.Field, f32 [T, R/2, 2]
        Cosine and sine, from float64 (:meth:`tmla.config.MLAConfig.rope_table`).
    half : bool
        Pairs are ``(p, p + R/2)`` instead of ``(2p, 2p+1)``.
    """
    _rope(buf, a, b0, n, offset, table, pos, half)


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
