"""Feed-forward network of one token: K chosen experts and a part that every token uses, in one pass.

The part that every token uses (*common*) is the shared experts of a mixture layer, or the whole network of a dense
layer; either part can be absent. ``hidden`` holds their activations side by side: ``[K * Fe | Fs]``. A router weight
multiplies its expert's activations, so that the down projection is one sum.
SwiGLU (Shazeer, 2020): ``silu(gate) * up``; PLM uses ``relu(up)^2`` without a gate.
"""

import numpy as np
import taichi as ti

from tmla.stages.linear import dequantise_ref, row_dot_q8


@ti.func
def silu(v):
    return v / (1.0 + ti.exp(-v))


@ti.func
def activation(
    w: ti.template(),
    gate_q: ti.template(),
    gate_d: ti.template(),
    up_q: ti.template(),
    up_d: ti.template(),
    layer,
    row,
    x: ti.template(),
):
    """One activation: row `row` of gate and up against the normalised residual."""
    n_block = ti.static(up_d.shape[2])
    up = row_dot_q8(up_q, up_d, layer, row, x, 0, 0, n_block)
    out = 0.0
    if ti.static(w.gated):
        out = silu(row_dot_q8(gate_q, gate_d, layer, row, x, 0, 0, n_block)) * up
    else:
        out = ti.max(up, 0.0) * ti.max(up, 0.0)
    return out


@ti.func
def ffn_up_body(
    w: ti.template(), layer, x: ti.template(), expert: ti.template(), weight: ti.template(), hidden: ti.template()
):
    """hidden[0, i] for all K * Fe + Fs activations."""
    n_routed = ti.static(w.n_used * w.expert_ffn_dim)
    for i in range(n_routed + w.common_ffn_dim):
        if ti.static(n_routed > 0):
            if i < n_routed:
                k = i // w.expert_ffn_dim
                row = expert[0, k] * w.expert_ffn_dim + i % w.expert_ffn_dim
                a = activation(w, w.gate_exps_q, w.gate_exps_d, w.up_exps_q, w.up_exps_d, layer, row, x)
                hidden[0, i] = weight[0, k] * a
        if ti.static(w.common_ffn_dim > 0):
            if i >= n_routed:
                hidden[0, i] = activation(w, w.gate_q, w.gate_d, w.up_q, w.up_d, layer, i - n_routed, x)


@ti.func
def ffn_down_body(w: ti.template(), layer, scale, expert: ti.template(), hidden: ti.template(), x: ti.template()):
    """x[0, o] += scale * (all down projections)."""
    n_out = ti.static(x.shape[1])
    for o in range(n_out):
        acc = 0.0
        if ti.static(w.n_used > 0):
            for k in range(w.n_used):
                row = expert[0, k] * n_out + o
                acc += row_dot_q8(
                    w.down_exps_q, w.down_exps_d, layer, row, hidden, 0, k * w.expert_ffn_dim, w.down_exps_d.shape[2]
                )
        if ti.static(w.common_ffn_dim > 0):
            acc += row_dot_q8(w.down_q, w.down_d, layer, o, hidden, 0, w.n_used * w.expert_ffn_dim, w.down_d.shape[2])
        x[0, o] = x[0, o] + scale * acc


@ti.kernel
def _ffn_up(
    w: ti.template(),
    layer: ti.i32,
    x: ti.template(),
    expert: ti.template(),
    weight: ti.template(),
    hidden: ti.template(),
):
    ffn_up_body(w, layer, x, expert, weight, hidden)


@ti.kernel
def _ffn_down(
    w: ti.template(), layer: ti.i32, scale: ti.f32, expert: ti.template(), hidden: ti.template(), x: ti.template()
):
    ffn_down_body(w, layer, scale, expert, hidden, x)


def ffn_up(w, layer, x, scratch, hidden):
    """Gate and up projections with the activation: f32 [1, D] -> f32 [1, K * Fe + Fs].

    Parameters
    ----------
    w : FFNWeights
        Fields ``gate_exps``, ``up_exps`` [L, E * Fe, D], ``down_exps`` [L, E * D, Fe], ``gate``, ``up`` [L, Fs, D],
        ``down`` [L, D, Fs], each as ``_q`` (u8) and ``_d`` (f16, a 32nd as wide), and the numbers ``n_used`` (K),
        ``expert_ffn_dim`` (Fe), ``common_ffn_dim`` (Fs), ``gated``.
    scratch : RouterScratch
        ``expert`` i32 [1, K] and ``weight`` f32 [1, K].
    """
    _ffn_up(w, layer, x, scratch.expert, scratch.weight, hidden)


def ffn_down(w, layer, scale, scratch, hidden, x):
    """Down projections, added to the residual: ``x += scale * down``; x is f32 [1, D]."""
    _ffn_down(w, layer, scale, scratch.expert, hidden, x)


def ffn_up_ref(gate, up, x, *, gated):
    """NumPy reference of one network: (w_q, w_d) pairs of [F, D], x [D] -> float64 [F]."""
    x = x.astype(np.float64)
    u = dequantise_ref(*up) @ x
    if not gated:
        return np.maximum(u, 0.0) ** 2
    g = dequantise_ref(*gate) @ x
    return g / (1.0 + np.exp(-g)) * u
