"""RMSNorm: of the residual row, and of the latent on its way into the cache.

``y = x / sqrt(mean(x^2) + eps) * w`` (Zhang and Sennrich, 2019).
"""

import numpy as np
import taichi as ti


@ti.func
def rms_norm_body(x: ti.template(), w: ti.template(), layer, eps, y: ti.template()):
    n = ti.static(w.shape[1])
    ti.loop_config(serialize=True)
    for _ in range(1):
        ss = 0.0
        for i in range(n):
            ss += x[0, i] * x[0, i]
        inv = 1.0 / ti.sqrt(ss / n + eps)
        for i in range(n):
            y[0, i] = x[0, i] * inv * w[layer, i]


@ti.func
def latent_norm_body(row: ti.template(), w: ti.template(), layer, eps, cache: ti.template(), pos: ti.template()):
    n = ti.static(w.shape[1])
    ti.loop_config(serialize=True)
    for _ in range(1):
        ss = 0.0
        for c in range(n):
            ss += row[0, 0, c] * row[0, 0, c]
        inv = 1.0 / ti.sqrt(ss / n + eps)
        for c in range(n):
            cache[layer, pos[0], c] = ti.cast(row[0, 0, c] * inv * w[layer, c], cache.dtype)


@ti.kernel
def _rms_norm(x: ti.template(), w: ti.template(), layer: ti.i32, eps: ti.f32, y: ti.template()):
    rms_norm_body(x, w, layer, eps, y)


@ti.kernel
def _latent_norm(
    row: ti.template(), w: ti.template(), layer: ti.i32, eps: ti.f32, cache: ti.template(), pos: ti.template()
):
    latent_norm_body(row, w, layer, eps, cache, pos)


def rms_norm(x, w, layer, eps, y):
    """Normalise one row: f32 [1, D] by f32 [L, D] into f32 [1, D]. Reference: :func:`rms_norm_ref`."""
    _rms_norm(x, w, layer, eps, y)


def latent_norm(row, w, layer, eps, cache, pos):
    """Normalise the latent of the kv_a projection into the cache.

    Parameters
    ----------
    row : ti.Field, f32 [1, 1, C + R]
        The kv_a projection. It is f32 so that a f16 cache rounds once: a row that is rounded, normalised in place and
        rounded again has twice the error, and moves near-ties of the router (docs/log.md).
    w : ti.Field, f32 [L, C]
    cache : ti.Field, f16 or f32 [L, T, C + R]
        ``cache[layer, pos[0], :C]`` is written.
    pos : ti.Field, i32 [1]
    """
    _latent_norm(row, w, layer, eps, cache, pos)


def rms_norm_ref(x, w, eps):
    """NumPy reference: [..., n] and [n] -> float64 [..., n]."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w.astype(np.float64)
