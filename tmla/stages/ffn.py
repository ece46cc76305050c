"""Feed-forward network of one token: K chosen experts and a part that every token uses.

The part that every token uses (*common*) is the shared experts of a mixture layer, or the whole network of a dense
layer; either part can be absent. SwiGLU (Shazeer, 2020): ``silu(gate) * up``; PLM uses ``relu(up)^2`` without a gate.
This file is the CPU's: ``hidden`` [1, K * Fe + Fs] holds the activations side by side, each expert's times its router
weight, so that the down projection is one sum. :mod:`tmla.stages.ffn_warps` is the GPU's.
"""

import numpy as np
import taichi as ti

from tmla.stages.linear import dequantise_ref, row_dot_q8
from tmla.stages.threads import SPREAD, share, team


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
    lay,
    row,
    x: ti.template(),
):
    """One activation: row `row` of gate and up against the normalised residual."""
    n_block = ti.static(up_d.shape[2])
    up = row_dot_q8(up_q, up_d, lay, row, x, 0, 0, n_block)
    out = 0.0
    if ti.static(w.gated):
        out = silu(row_dot_q8(gate_q, gate_d, lay, row, x, 0, 0, n_block)) * up
    else:
        out = ti.max(up, 0.0) * ti.max(up, 0.0)
    return out


# `layer[0] - w.first` stands in the innermost loops below: from a local variable outside them, LLVM makes code half as
# fast (docs/log.md).


@ti.func
def common_up_part(first, end, w: ti.template(), layer: ti.template(), x: ti.template(), hidden: ti.template()):
    """Some activations of the part that every token uses, behind the experts' in `hidden`."""
    n_routed = ti.static(w.n_used * w.expert_ffn_dim)
    for f in range(first, end):
        hidden[0, n_routed + f] = activation(w, w.gate_q, w.gate_d, w.up_q, w.up_d, layer[0] - w.first, f, x)


@ti.func
def experts_up_part(
    first, end, w: ti.template(), layer: ti.template(), x: ti.template(), r: ti.template(), hidden: ti.template()
):
    """Some activations of every chosen expert."""
    for k in range(w.n_used):
        for f in range(first, end):
            row = r.expert[0, k] * w.expert_ffn_dim + f
            a = activation(w, w.gate_exps_q, w.gate_exps_d, w.up_exps_q, w.up_exps_d, layer[0] - w.first, row, x)
            hidden[0, k * w.expert_ffn_dim + f] = r.weight[0, k] * a


@ti.func
def down_part(
    first, end, w: ti.template(), layer: ti.template(), r: ti.template(), hidden: ti.template(), x: ti.template()
):
    """Some outputs: x[0, o] += residual_scale * (all down projections)."""
    n_out = ti.static(x.shape[1])
    n_routed = ti.static(w.n_used * w.expert_ffn_dim)
    for o in range(first, end):
        acc = 0.0
        if ti.static(w.n_used > 0):
            n_block = ti.static(w.down_exps_d.shape[2])
            for k in range(w.n_used):
                row, at = r.expert[0, k] * n_out + o, k * w.expert_ffn_dim
                acc += row_dot_q8(w.down_exps_q, w.down_exps_d, layer[0] - w.first, row, hidden, 0, at, n_block)
        if ti.static(w.common_ffn_dim > 0):
            acc += row_dot_q8(w.down_q, w.down_d, layer[0] - w.first, o, hidden, 0, n_routed, w.down_d.shape[2])
        x[0, o] = x[0, o] + w.residual_scale * acc


@ti.kernel
def _ffn_loop(
    w: ti.template(), layer: ti.template(), xn: ti.template(), r: ti.template(), hidden: ti.template(), x: ti.template()
):
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            if ti.static(w.common_ffn_dim > 0):
                span = share(i // SPREAD, w.common_ffn_dim)
                common_up_part(span[0], span[1], w, layer, xn, hidden)
            if ti.static(w.n_used > 0):
                rows = share(i // SPREAD, w.expert_ffn_dim)
                experts_up_part(rows[0], rows[1], w, layer, xn, r, hidden)
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, x.shape[1])
            down_part(span[0], span[1], w, layer, r, hidden, x)


def ffn(w, layer, xn, scratch, hidden, x):
    """CPU: the whole network of one token, added to the residual.

    Parameters
    ----------
    w : FFNBank
        Fields ``gate_exps``, ``up_exps`` [L, E * Fe, D], ``down_exps`` [L, E * D, Fe], ``gate``, ``up`` [L, Fs, D],
        ``down`` [L, D, Fs], each as ``_q`` and ``_d`` (f16, a 32nd as wide), and the numbers ``n_used`` (K),
        ``expert_ffn_dim`` (Fe), ``common_ffn_dim`` (Fs), ``gated``, ``residual_scale``.
    layer : ti.Field, i32 [1]
    xn, x : ti.Field, f32 [1, D]
        Normalised residual, and the residual that is added to.
    scratch : RouterScratch
        ``expert`` i32 [1, K] and ``weight`` f32 [1, K].
    hidden : ti.Field, f32 [1, >= K * Fe + Fs]
    """
    _ffn_loop(w, layer, xn, scratch, hidden, x)


def ffn_ref(gate, up, down, x, *, gated):
    """NumPy reference of one network: (w_q, w_d) of gate and up [F, D] and down [D, F], x [D] -> float64 [D]."""
    x = x.astype(np.float64)
    u = dequantise_ref(*up) @ x
    if gated:
        g = dequantise_ref(*gate) @ x
        act = g / (1.0 + np.exp(-g)) * u
    else:
        act = np.maximum(u, 0.0) ** 2
    return dequantise_ref(*down) @ act
