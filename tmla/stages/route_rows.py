"""Router for a chunk of tokens, and the grouping of its tokens by expert; all stays on the device.

A pair is one token's use of one expert, number ``t K + k``. ``order`` lists the pairs expert by expert, within an
expert by number, so that an expert's weights are read once for all its tokens; ``place`` is the inverse.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.matmul import strip_rows, strip_times_rows
from tmla.stages.route_tiles import route_rows_simt
from tmla.stages.router import choose
from tmla.stages.threads import SPREAD, share, team


@ti.kernel
def _logit_rows_loop(
    w: ti.template(), lay: ti.i32, x: ti.template(), n: ti.i32, strip: ti.template(), logit: ti.template()
):
    dim, n_expert = ti.static(w.router.shape[2], w.router.shape[1])
    rows = ti.static(strip_rows(w.router.shape[2]))
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, ti.static(-(-w.router.shape[1] // rows)))
            for s in range(span[0], span[1]):
                e0 = s * rows
                n_rows = ti.min(rows, n_expert - e0)
                for r in range(n_rows):
                    e, at = ti.min(e0 + r, n_expert - 1), ti.max(r * dim, 0)
                    for c in range(dim):
                        strip[i // SPREAD, at + c] = w.router[lay, e, c]
                strip_times_rows(strip, i // SPREAD, n_rows, x, 0, n, 0, dim, 1.0, False, logit, e0)


@ti.kernel
def _choose_rows_loop(w: ti.template(), lay: ti.i32, n: ti.i32, r: ti.template(), g: ti.template()):
    n_expert, n_used = ti.static(w.router.shape[1], w.n_used)
    ti.loop_config(serialize=True)
    for _ in range(1):
        for e in range(n_expert + 1):
            g.start[e] = 0
        for t in range(n):
            for e in range(n_expert):
                r.logit[0, e] = g.logit[t, e]
            choose(w, lay, r)
            for k in range(n_used):
                g.expert[t * n_used + k] = r.expert[0, k]
                g.weight[t * n_used + k] = r.weight[0, k]
                g.start[r.expert[0, k] + 1] = g.start[r.expert[0, k] + 1] + 1
        for e in range(n_expert):
            g.start[e + 1] = g.start[e + 1] + g.start[e]
            g.next[e] = g.start[e]
        for j in range(n * n_used):
            e = g.expert[j]
            g.order[g.next[e]] = j
            g.place[j] = g.next[e]
            g.next[e] = g.next[e] + 1


def route_rows(w, lay, x, n, strip, route, groups):
    """Choose the experts of `n` tokens and group the tokens by expert.

    Parameters
    ----------
    w : FFNBank
        As for :func:`tmla.stages.router.router`.
    lay : int
    x : ti.Field, f32 [T, D]
        Normalised residual.
    strip : ti.Field, f32 [threads, ...]
        CPU: scratch, as for :func:`tmla.stages.matmul.matmul_q8`.
    route : RouterScratch
        CPU: scratch of one token's choice.
    groups : ExpertGroups
        Takes ``expert`` i32 [T K] and ``weight`` f32 [T K] of every pair, ``order`` and ``place`` i32 [T K], ``start``
        i32 [E + 1]: the pairs ``order[start[e] : start[e + 1]]`` are expert e's.

    Notes
    -----
    Reference: :func:`tmla.stages.router.router_ref` a row, and :func:`group_ref`.
    """
    if runtime.caps().gpu:
        route_rows_simt(w, lay, x, n, groups)
    else:
        _logit_rows_loop(w, lay, x, n, strip, groups.logit)
        _choose_rows_loop(w, lay, n, route, groups)


def group_ref(expert, n_experts):
    """NumPy reference: expert of every pair [P] -> order [P], start [E + 1]."""
    return np.argsort(expert, kind="stable"), np.searchsorted(np.sort(expert), np.arange(n_experts + 1))
