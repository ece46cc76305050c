"""Router: a score per expert, the choice of K, their weights; all stays on the device.

Scores are a softmax over all experts (V2) or sigmoids (V3). A bias, where the file has one, takes part in the choice
and not in the weights. With expert groups, only the best groups' experts can be chosen; a group's score is the sum of
its two best biased scores. Weights are the chosen scores, normalised where the file says so, times a constant.
Sources: DeepSeek-V2 paper, section 2.1.3; DeepSeek-V3 paper, section 2.1.2 (its equation 16).

On a GPU the logits come from :mod:`tmla.stages.ffn_warps`, and every block that runs an expert finds the choice again:
cheaper than one more dispatch.
"""

import dataclasses

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.lanes import cdiv
from tmla.stages.threads import SPREAD, share, team

DROPPED = -1.0e38  # below every score: an expert whose group is out
TAKEN = -2.0e38  # below that: one that is chosen already
KEPT = -3.0e38  # below that: a group whose experts stay
BLOCK = 256


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

    @property
    def by_logit(self) -> bool:
        """Does the order of the logits decide alone?"""
        return not self.has_bias and self.n_groups == 1


@ti.func
def _logit(w: ti.template(), layer: ti.template(), e, x: ti.template()):
    acc = 0.0
    for i in range(w.router.shape[2]):
        acc += w.router[layer[0] - w.first, e, i] * x[0, i]
    return acc


@ti.func
def router_logits_part(first, end, w: ti.template(), layer: ti.template(), x: ti.template(), logit: ti.template()):
    for e in range(first, end):
        logit[0, e] = _logit(w, layer, e, x)


@ti.func
def _scores(r: ti.template(), sigmoid: ti.template()):
    n = ti.static(r.logit.shape[1])
    if ti.static(sigmoid):
        for e in range(n):
            r.score[0, e] = 1.0 / (1.0 + ti.exp(-r.logit[0, e]))
    else:
        m = TAKEN  # from logit[0, 0], Taichi 1.7.4 takes what stood there before it was written for this token
        for e in range(n):
            m = ti.max(m, r.logit[0, e])
        total = 0.0
        for e in range(n):
            p = ti.exp(r.logit[0, e] - m)
            r.score[0, e] = p
            total += p
        for e in range(n):
            r.score[0, e] = r.score[0, e] / total


@ti.func
def _two_best(select: ti.template(), first, n):
    best, second = DROPPED, DROPPED
    for e in range(first, first + n):
        v = select[e]
        if v > best:
            best, second = v, best
        elif v > second:
            second = v
    return best + second


@ti.func
def _drop_groups(r: ti.template(), n_groups: ti.template(), n_groups_used: ti.template()):
    """Make the experts of all but the best groups unselectable."""
    size = ti.static(r.select.shape[0] // n_groups)
    for g in range(n_groups):
        r.group[g] = _two_best(r.select, g * size, size)
    for _ in range(n_groups_used):
        pick, value = 0, KEPT
        for g in range(n_groups):
            if r.group[g] > value:
                pick, value = g, r.group[g]
        r.group[pick] = KEPT
    for e in range(r.select.shape[0]):
        if r.group[e // size] > KEPT:
            r.select[e] = DROPPED


@ti.func
def choose(w: ti.template(), lay, r: ti.template()):
    """From r.logit to r.expert and r.weight, on one thread."""
    _scores(r, w.routing.sigmoid)
    for e in range(r.logit.shape[1]):
        r.select[e] = r.score[0, e]
        if ti.static(w.routing.has_bias):
            r.select[e] = r.score[0, e] + w.router_bias[lay, e]
    if ti.static(w.routing.n_groups > 1):
        _drop_groups(r, w.routing.n_groups, w.routing.n_groups_used)
    total = 0.0
    for k in range(w.routing.n_used):
        pick, value = 0, TAKEN
        for e in range(r.logit.shape[1]):  # the first of equals wins, as in a stable sort
            if r.select[e] > value:
                pick, value = e, r.select[e]
        r.select[pick] = TAKEN
        r.expert[0, k] = pick
        r.weight[0, k] = r.score[0, pick]
        total += r.score[0, pick]
    factor = ti.cast(ti.static(w.routing.scale), ti.f32)
    if ti.static(w.routing.normalise):
        factor = factor / ti.max(total, ti.static(w.routing.min_sum))
    for k in range(w.routing.n_used):
        r.weight[0, k] = r.weight[0, k] * factor


@ti.func
def choose_row(_row, _end, w: ti.template(), layer: ti.template(), r: ti.template()):
    choose(w, layer[0] - w.first, r)


@ti.func
def choose_block(
    tid,
    w: ti.template(),
    lay,
    logit: ti.template(),
    row,
    score: ti.template(),
    select: ti.template(),
    group: ti.template(),
    who: ti.template(),
    block: ti.template(),
):
    """The whole block finds the K best experts by ``logit[row]``: an expert's place is the number of better ones.

    score, select [E], group [G] f32 and who [K] i32 are shared arrays; score then holds the scores (by_logit: the
    logits) and who the chosen, best first. Of equal experts the lower number is better. Ends with a barrier.
    """
    n = ti.static(logit.shape[1])
    if tid < w.routing.n_used:
        who[tid] = 0  # scores that are not numbers are better than none: no expert then gets these places
    for k in range(ti.static(cdiv(logit.shape[1], block))):
        e = k * block + tid
        if e < n:
            v = logit[row, e]
            if ti.static(w.routing.sigmoid):
                v = 1.0 / (1.0 + ti.exp(-v))
            score[e] = v
    ti.simt.block.sync()
    if ti.static(not w.routing.sigmoid and not w.routing.by_logit):
        top, total = DROPPED, 0.0
        for e in range(n):
            top = ti.max(top, score[e])
        for e in range(n):
            total += ti.exp(score[e] - top)
        ti.simt.block.sync()
        for k in range(ti.static(cdiv(logit.shape[1], block))):
            e = k * block + tid
            if e < n:
                score[e] = ti.exp(score[e] - top) / total
        ti.simt.block.sync()
    for k in range(ti.static(cdiv(logit.shape[1], block))):
        e = k * block + tid
        if e < n:
            v = score[e]
            if ti.static(w.routing.has_bias):
                v += w.router_bias[lay, e]
            select[e] = v
    ti.simt.block.sync()
    if ti.static(w.routing.n_groups > 1):
        size = ti.static(logit.shape[1] // w.routing.n_groups)
        if tid < w.routing.n_groups:
            group[tid] = _two_best(select, tid * size, size)
        ti.simt.block.sync()
        for k in range(ti.static(cdiv(logit.shape[1], block))):
            e = k * block + tid
            if e < n:
                mine, better = group[e // size], 0
                for g in range(ti.static(w.routing.n_groups)):
                    if group[g] > mine or (group[g] == mine and g < e // size):
                        better += 1
                if better >= w.routing.n_groups_used:
                    select[e] = DROPPED
        ti.simt.block.sync()
    for k in range(ti.static(cdiv(logit.shape[1], block))):
        e = k * block + tid
        if e < n:
            mine, better = select[e], 0
            for j in range(n):
                if select[j] > mine or (select[j] == mine and j < e):
                    better += 1
            if better < w.routing.n_used:
                who[better] = e
    ti.simt.block.sync()


@ti.func
def weight_of(w: ti.template(), slot, n: ti.template(), score: ti.template(), who: ti.template()):
    """Final weight of the expert in `slot`, after :func:`choose_block`."""
    mine = score[who[slot]]
    if ti.static(not w.routing.sigmoid and w.routing.by_logit):
        top, total = DROPPED, 0.0
        for e in range(n):
            top = ti.max(top, score[e])
        for e in range(n):
            total += ti.exp(score[e] - top)
        mine = ti.exp(mine - top) / total
        if ti.static(w.routing.normalise):
            chosen = 0.0
            for k in range(ti.static(w.routing.n_used)):
                chosen += ti.exp(score[who[k]] - top) / total
            mine /= ti.max(chosen, ti.static(w.routing.min_sum))
    else:
        if ti.static(w.routing.normalise):
            chosen = 0.0
            for k in range(ti.static(w.routing.n_used)):
                chosen += score[who[k]]
            mine /= ti.max(chosen, ti.static(w.routing.min_sum))
    return mine * ti.static(w.routing.scale)


@ti.kernel
def _router_loop(w: ti.template(), layer: ti.template(), x: ti.template(), r: ti.template()):
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, w.router.shape[1])
            router_logits_part(span[0], span[1], w, layer, x, r.logit)
    ti.loop_config(serialize=True)
    for row in range(1):
        choose_row(row, 1, w, layer, r)


@ti.kernel
def _router_simt(w: ti.template(), layer: ti.template(), x: ti.template(), r: ti.template()):
    for e in range(w.router.shape[1]):
        r.logit[0, e] = _logit(w, layer, e, x)
    ti.loop_config(block_dim=BLOCK)
    for i in range(BLOCK):
        score = ti.simt.block.SharedArray(r.logit.shape[1], ti.f32)
        select = ti.simt.block.SharedArray(r.logit.shape[1], ti.f32)
        group = ti.simt.block.SharedArray(w.routing.n_groups, ti.f32)
        who = ti.simt.block.SharedArray(w.routing.n_used, ti.i32)
        choose_block(i, w, layer[0] - w.first, r.logit, 0, score, select, group, who, BLOCK)
        if i < w.routing.n_used:
            r.expert[0, i] = who[i]
            r.weight[0, i] = weight_of(w, i, r.logit.shape[1], score, who)


def router(w, layer, x, scratch):
    """Choose the experts of one token.

    Parameters
    ----------
    w : FFNBank
        Fields ``router`` f32 [L, E, D] and, when ``w.routing.has_bias``, ``router_bias`` f32 [L, E] (``exp_probs_b``);
        ``routing`` a :class:`Routing`.
    layer : ti.Field, i32 [1]
    x : ti.Field, f32 [1, D]
        Normalised residual.
    scratch : RouterScratch
        ``logit``, ``score`` f32 [1, E], ``select`` f32 [E], ``group`` f32 [G]; results ``expert`` i32 [1, K], best
        first, and ``weight`` f32 [1, K].

    Notes
    -----
    Reads ``4 E D`` bytes. Reference: :func:`router_ref`.
    """
    kernel = _router_simt if runtime.caps().gpu else _router_loop
    kernel(w, layer, x, scratch)


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
