"""Rotary embedding: pair p of a window of R values turns by ``pos * freq[p]``.

*consecutive* pairs are ``(2p, 2p+1)`` (deepseek2, plm), *half* pairs ``(p, p + R/2)`` (minicpm3). The queries turn on
their way into the fused query row, the key tail on its way into the cache (:mod:`tmla.stages.cache_row`).
Source: RoFormer (Su et al., 2021); YaRN changes the table alone.
"""

import numpy as np
import taichi as ti

from tmla.stages.threads import SPREAD, share, team


@ti.func
def turned(src: ti.template(), row, i, p, table: ti.template(), pos, half: ti.template()):
    """Pair p of the window at ``src[row, i]``, turned."""
    n_pair = ti.static(table.shape[1])
    a, b = i + 2 * p, i + 2 * p + 1
    if ti.static(half):
        a, b = i + p, i + p + n_pair
    u, v = src[row, a], src[row, b]
    cos, sin = table[pos, p, 0], table[pos, p, 1]
    return ti.Vector([u * cos - v * sin, u * sin + v * cos])


@ti.func
def rope_query_heads(
    first_head,
    end_head,
    q: ti.template(),
    n_nope: ti.template(),
    table: ti.template(),
    pos: ti.template(),
    half: ti.template(),
    scale: ti.template(),
    qa: ti.template(),
    n_latent: ti.template(),
):
    n_pair = ti.static(table.shape[1])
    for h in range(first_head, end_head):
        at = h * (n_nope + 2 * n_pair) + n_nope
        for p in range(n_pair):
            t = turned(q, 0, at, p, table, pos[0], half) * scale[pos[0]]
            i, j = n_latent + 2 * p, n_latent + 2 * p + 1
            if ti.static(half):
                i, j = n_latent + p, n_latent + p + n_pair
            qa[0, h, i] = t[0]
            qa[0, h, j] = t[1]


@ti.kernel
def _rope_query(
    q: ti.template(),
    n_nope: ti.template(),
    table: ti.template(),
    pos: ti.template(),
    half: ti.template(),
    scale: ti.template(),
    qa: ti.template(),
    n_latent: ti.template(),
):
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, qa.shape[1])
            rope_query_heads(span[0], span[1], q, n_nope, table, pos, half, scale, qa, n_latent)


def rope_query(q, n_nope, table, pos, half, scale, qa, n_latent):
    """Rotate every head's pe window into the tail of its fused query row, times the score scale.

    Parameters
    ----------
    q : ti.Field, f32 [1, >= H * (N + R)]
        Queries, head by head.
    n_nope, n_latent : int
        N and C.
    table : ti.Field, f32 [T, R/2, 2]
        Cosine and sine, from float64 (:meth:`tmla.config.MLAConfig.rope_table`).
    pos : ti.Field, i32 [1]
    half : bool
        Pairs are ``(p, p + R/2)`` instead of ``(2p, 2p+1)``.
    scale : ti.Field, f32 [T]
    qa : ti.Field, f32 [1, H, >= C + R]
        ``qa[0, :, C : C + R]`` is written. Reference: :func:`rope_ref`.
    """
    _rope_query(q, n_nope, table, pos, half, scale, qa, n_latent)


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
