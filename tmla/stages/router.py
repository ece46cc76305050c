"""Router: a score per expert, the choice of K, their weights; all stays on the device.

Scores are a softmax over all experts (V2) or sigmoids (V3). A bias, where the file has one, takes part in the choice
and not in the weights. With expert groups, only the best groups' experts can be chosen; a group's score is the sum of
its two best biased scores. Weights are the chosen scores, normalised where the file says so, times a constant.
Sources: DeepSeek-V2 paper, section 2.1.3; DeepSeek-V3 paper, section 2.1.2 (its equation 16).
"""

import dataclasses

import numpy as np
import taichi as ti

DROPPED = -3.0e38  # below every score: an expert that can't be chosen any more


@dataclasses.dataclass(frozen=True)
class Routing:
    """What the file says about routing: compile-time constants of the router kernel."""

    n_used: int
    sigmoid: bool
    n_groups: int
    n_groups_used: int
    normalise: bool
    scale: float
    has_bias: bool
    min_sum: float  # smallest divisor when weights are normalised: guards 0/0


@ti.func
def router_logits_body(w: ti.template(), layer, x: ti.template(), score: ti.template()):
    for e in range(w.shape[1]):
        acc = 0.0
        for i in range(w.shape[2]):
            acc += w[layer, e, i] * x[0, i]
        score[0, e] = acc


@ti.func
def router_scores(score: ti.template(), sigmoid: ti.template()):
    """Logits to scores, in place."""
    n = ti.static(score.shape[1])
    if ti.static(sigmoid):
        for e in range(n):
            score[0, e] = 1.0 / (1.0 + ti.exp(-score[0, e]))
    else:
        m = score[0, 0]
        for e in range(1, n):
            m = ti.max(m, score[0, e])
        total = 0.0
        for e in range(n):
            p = ti.exp(score[0, e] - m)
            score[0, e] = p
            total += p
        for e in range(n):
            score[0, e] = score[0, e] / total


@ti.func
def drop_groups(select: ti.template(), n_groups: ti.template(), n_groups_used: ti.template(), group: ti.template()):
    """Make the experts of all but the best groups unselectable."""
    size = ti.static(select.shape[1] // n_groups)
    for g in range(n_groups):
        best, second = DROPPED, DROPPED
        for e in range(g * size, (g + 1) * size):
            v = select[0, e]
            if v > best:
                best, second = v, best
            elif v > second:
                second = v
        group[0, g] = best + second
    for _ in range(n_groups_used):
        pick, value = 0, 2.0 * DROPPED
        for g in range(n_groups):
            if group[0, g] > value:
                pick, value = g, group[0, g]
        group[0, pick] = -ti.math.inf  # kept
    for e in range(select.shape[1]):
        if group[0, e // size] > 2.0 * DROPPED:
            select[0, e] = DROPPED


@ti.func
def router_choose_body(
    score: ti.template(),
    bias: ti.template(),
    layer,
    routing: ti.template(),
    select: ti.template(),
    group: ti.template(),
    expert: ti.template(),
    weight: ti.template(),
):
    ti.loop_config(serialize=True)
    for _ in range(1):
        router_scores(score, routing.sigmoid)
        for e in range(score.shape[1]):
            select[0, e] = score[0, e]
            if ti.static(routing.has_bias):
                select[0, e] = score[0, e] + bias[layer, e]
        if ti.static(routing.n_groups > 1):
            drop_groups(select, routing.n_groups, routing.n_groups_used, group)
        total = 0.0
        for k in range(routing.n_used):
            pick, value = 0, 2.0 * DROPPED
            for e in range(score.shape[1]):  # the first of equals wins, as in a stable sort
                if select[0, e] > value:
                    pick, value = e, select[0, e]
            select[0, pick] = 2.0 * DROPPED
            expert[0, k] = pick
            weight[0, k] = score[0, pick]
            total += score[0, pick]
        factor = ti.cast(ti.static(routing.scale), ti.f32)
        if ti.static(routing.normalise):
            factor = factor / ti.max(total, ti.static(routing.min_sum))
        for k in range(routing.n_used):
            weight[0, k] = weight[0, k] * factor


@ti.func
def router_body(w: ti.template(), layer, x: ti.template(), r: ti.template()):
    router_logits_body(w.router, layer, x, r.score)
    if ti.static(w.routing.has_bias):
        router_choose_body(r.score, w.router_bias, layer, w.routing, r.select, r.group, r.expert, r.weight)
    else:
        router_choose_body(r.score, r.score, layer, w.routing, r.select, r.group, r.expert, r.weight)


@ti.kernel
def _router(w: ti.template(), layer: ti.i32, x: ti.template(), r: ti.template()):
    router_body(w, layer, x, r)


def router(w, layer, x, scratch):
    """Choose the experts of one token.

    Parameters
    ----------
    w : RouterWeights
        Fields ``router`` f32 [L, E, D] and, when ``w.routing.has_bias``, ``router_bias`` f32 [L, E] (``exp_probs_b``);
        ``routing`` a :class:`Routing`.
    x : ti.Field, f32 [1, D]
        Normalised residual.
    scratch : RouterScratch
        ``score``, ``select`` f32 [1, E], ``group`` f32 [1, G]; results ``expert`` i32 [1, K], best first, and
        ``weight`` f32 [1, K].

    Notes
    -----
    Reads ``4 E D`` bytes. Reference: :func:`router_ref`.
    """
    _router(w, layer, x, scratch)


def router_ref(w, bias, routing, x):
    """NumPy reference: [E, D], [E] or None, [D] -> experts int [K] (best first), weights float64 [K]."""
    logit = w.astype(np.float64) @ x.astype(np.float64)
    if routing.sigmoid:
        score = 1.0 / (1.0 + np.exp(-logit))
    else:
        score = np.exp(logit - logit.max())
        score /= score.sum()
    select = score + bias if routing.has_bias else score.copy()
    if routing.n_groups > 1:
        groups = select.reshape(routing.n_groups, -1)
        two_best = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        dropped = np.argsort(-two_best, kind="stable")[routing.n_groups_used :]
        groups[dropped] = -np.inf
    expert = np.argsort(-select, kind="stable")[: routing.n_used]
    weight = score[expert]
    if routing.normalise:
        weight = weight / max(weight.sum(), routing.min_sum)
    return expert, weight * routing.scale
