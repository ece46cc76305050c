"""RMSNorm: of the residual row, and of the latent part of a cache row in place.

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
def latent_norm_body(cache: ti.template(), layer, pos: ti.template(), w: ti.template(), eps):
    n = ti.static(w.shape[1])
    ti.loop_config(serialize=True)
    for _ in range(1):
        ss = 0.0
        for c in range(n):
            v = ti.cast(cache[layer, pos[0], c], ti.f32)
            ss += v * v
        inv = 1.0 / ti.sqrt(ss / n + eps)
        for c in range(n):
            cache[layer, pos[0], c] = ti.cast(ti.cast(cache[layer, pos[0], c], ti.f32) * inv * w[layer, c], cache.dtype)


@ti.kernel
def _rms_norm(x: ti.template(), w: ti.template(), layer: ti.i32, eps: ti.f32, y: ti.template()):
    rms_norm_body(x, w, layer, eps, y)


@ti.kernel
def _latent_norm(cache: ti.template(), layer: ti.i32, pos: ti.template(), w: ti.template(), eps: ti.f32):
    latent_norm_body(cache, layer, pos, w, eps)


def rms_norm(x, w, layer, eps, y):
    """Normalise one row: f32 [1, D] by f32 [L, D] into f32 [1, D]. Reference: :func:`rms_norm_ref`."""
    _rms_norm(x, w, layer, eps, y)


def latent_norm(cache, layer, pos, w, eps):
    """Normalise the first C values of cache row ``pos[0]`` in place.

    Parameters
    ----------
    cache : ti.Field, f16 or f32 [L, T, C + R]
    pos : ti.Field, i32 [1]
    w : ti.Field, f32 [L, C]
    """
    _latent_norm(cache, layer, pos, w, eps)


def rms_norm_ref(x, w, eps):
    """NumPy reference: [..., n] and [n] -> float64 [..., n]."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w.astype(np.float64)
