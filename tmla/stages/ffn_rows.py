"""Feed-forward network of a chunk of tokens: each expert's weights meet all tokens that chose it (CPU).

Gate and up rows of a strip stand side by side in scratch, so that an activation is made where its two sums are. The
activations of routed experts lie in the order of :mod:`tmla.stages.route_rows`, each times its router weight; the down
projections go to one row a pair, and a last pass adds every token's rows to its residual: no sum needs an atomic.
:mod:`tmla.stages.ffn_tiles` is the GPU's.
"""

import taichi as ti

from tmla import runtime
from tmla.stages.ffn import silu
from tmla.stages.ffn_tiles import ffn_rows_simt
from tmla.stages.linear import Q8_BLOCK
from tmla.stages.matmul import TOKENS, dots, fill_row, matmul_q8, strip_rows, strip_times_rows
from tmla.stages.threads import SPREAD, share, team


@ti.func
def _activation(w: ti.template(), gate, up):
    out = 0.0
    if ti.static(w.gated):
        out = silu(gate) * up
    else:
        out = ti.max(up, 0.0) * ti.max(up, 0.0)
    return out


@ti.func
def _activate_strip(
    w: ti.template(),
    strip: ti.template(),
    slot,
    n_rows,
    x: ti.template(),
    g: ti.template(),
    first,
    end,
    n_in: ti.template(),
    routed: ti.template(),
    hidden: ti.template(),
    f0,
):
    """hidden[p, f0 + r] of pairs (or tokens) first <= p < end, from a strip of gate rows, then as many up rows."""
    half = ti.static(strip_rows(n_in) // 2)
    for tg in range((end - first + (TOKENS - 1)) // TOKENS):  # its activation rows stay in the first cache
        p0 = first + tg * TOKENS
        p1, p2 = ti.min(p0 + 1, end - 1), ti.min(p0 + 2, end - 1)
        t0, t1, t2 = p0, p1, p2
        w0, w1, w2 = 1.0, 1.0, 1.0
        if ti.static(routed):
            t0, t1, t2 = g.order[p0] // w.n_used, g.order[p1] // w.n_used, g.order[p2] // w.n_used
            w0, w1, w2 = g.weight[g.order[p0]], g.weight[g.order[p1]], g.weight[g.order[p2]]
        for r in range(n_rows):
            v = dots(strip, slot, r * n_in, slot, (half + r) * n_in, x, t0, t1, t2, 0, n_in)
            hidden[p0, f0 + r] = w0 * _activation(w, v[0], v[1])
            hidden[p1, f0 + r] = w1 * _activation(w, v[2], v[3])
            hidden[p2, f0 + r] = w2 * _activation(w, v[4], v[5])


@ti.kernel
def _up_experts_loop(
    w: ti.template(), lay: ti.i32, x: ti.template(), g: ti.template(), strip: ti.template(), hidden: ti.template()
):
    n_in, fe = ti.static(x.shape[1], w.expert_ffn_dim)
    half = ti.static(strip_rows(x.shape[1]) // 2)
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, ti.static(-(-w.expert_ffn_dim // half)))
            for e in range(ti.static(w.router.shape[1])):
                if g.start[e] < g.start[e + 1]:
                    for s in range(span[0], span[1]):
                        f0 = s * half
                        n_rows = ti.min(half, fe - f0)
                        for r in range(n_rows):
                            row = e * fe + f0 + r
                            fill_row(w.gate_exps_q, w.gate_exps_d, lay, row, strip, i // SPREAD, r * n_in)
                            fill_row(w.up_exps_q, w.up_exps_d, lay, row, strip, i // SPREAD, (half + r) * n_in)
                        _activate_strip(
                            w, strip, i // SPREAD, n_rows, x, g, g.start[e], g.start[e + 1], n_in, True, hidden, f0
                        )


@ti.kernel
def _up_common_loop(
    w: ti.template(),
    lay: ti.i32,
    x: ti.template(),
    n: ti.i32,
    g: ti.template(),
    strip: ti.template(),
    hidden: ti.template(),
):
    n_in = ti.static(x.shape[1])
    half = ti.static(strip_rows(x.shape[1]) // 2)
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, ti.static(-(-w.common_ffn_dim // half)))
            for s in range(span[0], span[1]):
                f0 = s * half
                n_rows = ti.min(half, w.common_ffn_dim - f0)
                for r in range(n_rows):
                    fill_row(w.gate_q, w.gate_d, lay, f0 + r, strip, i // SPREAD, r * n_in)
                    fill_row(w.up_q, w.up_d, lay, f0 + r, strip, i // SPREAD, (half + r) * n_in)
                _activate_strip(w, strip, i // SPREAD, n_rows, x, g, 0, n, n_in, False, hidden, f0)


@ti.kernel
def _down_experts_loop(
    w: ti.template(), lay: ti.i32, hidden: ti.template(), g: ti.template(), strip: ti.template(), out: ti.template()
):
    dim, n_in = ti.static(out.shape[1], w.down_exps_d.shape[2] * Q8_BLOCK)
    rows = ti.static(strip_rows(w.down_exps_d.shape[2] * Q8_BLOCK))
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, ti.static(-(-out.shape[1] // rows)))
            for e in range(ti.static(w.router.shape[1])):
                if g.start[e] < g.start[e + 1]:
                    for s in range(span[0], span[1]):
                        o0 = s * rows
                        n_rows = ti.min(rows, dim - o0)
                        for r in range(n_rows):
                            row = e * dim + o0 + r
                            fill_row(w.down_exps_q, w.down_exps_d, lay, row, strip, i // SPREAD, r * n_in)
                        strip_times_rows(
                            strip,
                            i // SPREAD,
                            n_rows,
                            hidden,
                            g.start[e],
                            g.start[e + 1],
                            0,
                            n_in,
                            1.0,
                            False,
                            out,
                            o0,
                        )


@ti.kernel
def _add_experts_loop(w: ti.template(), out: ti.template(), n: ti.i32, g: ti.template(), x: ti.template()):
    dim = ti.static(x.shape[1])
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n)
            for token in range(span[0], span[1]):
                t = ti.min(token, n - 1)
                for k in range(w.n_used):
                    p = g.place[t * w.n_used + k]
                    for c in range(dim):
                        x[t, c] = x[t, c] + w.residual_scale * out[p, c]


def ffn_rows(w, lay, xn, n, groups, scratch, x):
    """The whole network of `n` tokens, added to the residual.

    Parameters
    ----------
    w : FFNBank
        As for :func:`tmla.stages.ffn.ffn`.
    lay : int
    xn, x : ti.Field, f32 [T, D]
        Normalised residual, and the residual that is added to.
    n : int
    groups : ExpertGroups
        As :func:`tmla.stages.route_rows.route_rows` left it (mixture layers).
    scratch : ChunkScratch
        ``strip`` [threads, ...], ``hidden`` [T K, Fe], ``out`` [T K, D], ``common`` [T, Fs], all f32.
    """
    if runtime.caps().gpu:
        ffn_rows_simt(w, lay, xn, n, groups, scratch, x)
        return
    if w.common_ffn_dim:
        _up_common_loop(w, lay, xn, n, groups, scratch.strip, scratch.common)
        matmul_q8(w.down_q, w.down_d, lay, scratch.common, n, scratch.strip, x, scale=w.residual_scale, add=True)
    if w.n_used:
        _up_experts_loop(w, lay, xn, groups, scratch.strip, scratch.hidden)
        _down_experts_loop(w, lay, scratch.hidden, groups, scratch.strip, scratch.out)
        _add_experts_loop(w, scratch.out, n, groups, x)
