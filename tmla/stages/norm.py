"""RMSNorm of the residual row: ``y = x / sqrt(mean(x^2) + eps) * w`` (Zhang and Sennrich, 2019).

On a GPU no row is normalised by itself: the kernels that read it fold the norm in (:mod:`tmla.stages.linear`).
"""

import numpy as np
import taichi as ti


@ti.func
def rms_norm_row(
    row,
    _end,
    x: ti.template(),
    x0: ti.template(),
    w: ti.template(),
    layer: ti.template(),
    first: ti.template(),
    eps: ti.template(),
    y: ti.template(),
):
    n = ti.static(w.shape[1])
    ss = 0.0
    for i in range(n):
        ss += x[row, x0 + i] * x[row, x0 + i]
    inv = 1.0 / ti.sqrt(ss / n + eps)
    for i in range(n):
        y[row, i] = x[row, x0 + i] * inv * w[layer[0] - first, i]


@ti.kernel
def _rms_norm(x: ti.template(), w: ti.template(), layer: ti.template(), eps: ti.f32, y: ti.template()):
    ti.loop_config(serialize=True)
    for row in range(1):
        rms_norm_row(row, 1, x, 0, w, layer, 0, eps, y)


def rms_norm(x, w, layer, eps, y):
    """Normalise one row: f32 [1, D] by f32 [L, D] at ``layer[0]`` into f32 [1, D]. Reference: :func:`rms_norm_ref`."""
    _rms_norm(x, w, layer, eps, y)


def rms_norm_ref(x, w, eps):
    """NumPy reference: [..., n] and [n] -> float64 [..., n]."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w.astype(np.float64)
