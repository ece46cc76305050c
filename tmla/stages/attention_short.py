"""Decode attention on a GPU, for short contexts: one block a head, from the scores to the V values.

With few cached rows there is nothing to split: a warp takes a row at a time for the scores, the softmax is one pass,
threads take columns for the latent mix, and the same block multiplies by the head's value rows. One dispatch instead
of two; every head fetches the rows by itself, which no longer pays beyond :data:`MAX_ROWS`.
"""

import taichi as ti

from tmla.stages.attention import NEG_INF
from tmla.stages.attention_tiles import cached, four
from tmla.stages.lanes import cdiv, lane_max, lane_sum, log2, pow2, width
from tmla.stages.v_combine import fetch_value_rows, value_rows
from tmla.stages.words import lane_place, shared_len

BLOCK = 512
MAX_ROWS = 192  # cached rows up to which this is faster than tiles and combine (measured: docs/log.md)
AHEAD = 2  # rows a warp has in flight for the scores
ROWS_AHEAD = 4  # rows of w_uv a warp has in flight
VALUES_AHEAD = 8  # rows a thread has in flight for the values


@ti.func
def attention_short(w: ti.template(), layer: ti.template(), pos: ti.template(), qa: ti.template(), o: ti.template()):
    """o[0, h * V + v] for every head, from at most MAX_ROWS cached rows."""
    wd = ti.static(width())
    n_word, n_latent = ti.static(cdiv(w.row_width, 4), w.n_latent)
    n_warp = ti.static(BLOCK // width())
    q_words = ti.static(cdiv(cdiv(w.row_width, 4), width()))  # words of a row that a lane takes
    n_fetch = ti.static(ROWS_AHEAD * cdiv(w.v_q.shape[2], width()))
    per_value = ti.static(2 if w.cache_f32 else 1)  # u64 that four cached values take
    threads = ti.static(min(pow2(w.n_latent // 4), BLOCK))  # threads that cover the latent, 4 columns each
    groups = ti.static(BLOCK // min(pow2(w.n_latent // 4), BLOCK))  # groups of them take rows in turn
    passes = ti.static(cdiv(w.n_latent // 4, min(pow2(w.n_latent // 4), BLOCK)))
    n_shared = ti.static(shared_len(cdiv(w.v_q.shape[2], width()) * width()))
    ti.loop_config(block_dim=BLOCK)
    for i in range(ti.static(qa.shape[1] * BLOCK)):
        score = ti.simt.block.SharedArray(MAX_ROWS, ti.f32)
        weight = ti.simt.block.SharedArray(MAX_ROWS, ti.f32)
        part = ti.simt.block.SharedArray(BLOCK * 4, ti.f32)
        xs = ti.simt.block.SharedArray(n_shared, ti.f32)
        tid, h = i & (BLOCK - 1), i >> ti.static(log2(BLOCK))
        lane, warp = tid & ti.static(wd - 1), tid >> ti.static(log2(wd))
        lay, n_rows = layer[0] - w.first, pos[0] + 1
        q = ti.Vector([0.0 for _ in ti.static(range(4 * q_words))])
        kw = ti.Vector([ti.u64(0) for _ in ti.static(range(AHEAD * q_words * per_value))], dt=ti.u64)
        v = ti.Vector([ti.u64(0) for _ in ti.static(range(VALUES_AHEAD * per_value))], dt=ti.u64)
        bits = ti.Vector([ti.u64(0) for _ in ti.static(range(n_fetch))], dt=ti.u64)
        d = ti.Vector([ti.cast(0.0, ti.f16) for _ in ti.static(range(n_fetch))], dt=ti.f16)
        for k in ti.static(range(q_words)):
            if k * wd + lane < n_word:
                for j in ti.static(range(4)):
                    q[4 * k + j] = qa[0, h, (k * wd + lane) * 4 + j]
        for rb in range((n_rows + (n_warp * AHEAD - 1)) // (n_warp * AHEAD)):
            for u in ti.static(range(AHEAD)):
                t = (rb * AHEAD + u) * n_warp + warp
                for k in ti.static(range(q_words)):
                    word = ti.min(k * wd + lane, n_word - 1)
                    cached(kw, u * q_words + k, w.cache, lay, ti.min(t, n_rows - 1), word, w.cache_f32)
            for u in ti.static(range(AHEAD)):
                t = (rb * AHEAD + u) * n_warp + warp
                s = 0.0
                for k in ti.static(range(q_words)):
                    x = four(kw, u * q_words + k, w.cache_f32)
                    for j in ti.static(range(4)):
                        s += q[4 * k + j] * x[j]
                s = lane_sum(s)
                if lane == 0 and t < n_rows:
                    score[t] = s
        for k in range(ti.static(cdiv(n_shared, BLOCK))):
            if k * BLOCK + tid < n_shared:
                xs[k * BLOCK + tid] = 0.0  # lanes behind the row's end read these
        ti.simt.block.sync()
        top = NEG_INF
        for k in range((n_rows + (wd - 1)) >> ti.static(log2(wd))):
            top = ti.max(top, score[ti.min(k * wd + lane, n_rows - 1)])
        top = lane_max(top)
        total = 0.0
        for k in range((n_rows + (wd - 1)) >> ti.static(log2(wd))):
            t = k * wd + lane
            if t < n_rows:
                p = ti.exp(score[t] - top)
                total += p
                if warp == k % n_warp:
                    weight[t] = p
        total = lane_sum(total)
        ti.simt.block.sync()
        fetch_value_rows(bits, d, warp * ROWS_AHEAD, w.n_v, h, lane, w, lay, ROWS_AHEAD)
        for c in range(passes):
            word, g = c * threads + (tid & (threads - 1)), tid // threads
            acc = ti.Vector([0.0 for _ in ti.static(range(4))])
            for rb in range((n_rows + (groups * VALUES_AHEAD - 1)) // (groups * VALUES_AHEAD)):
                for u in ti.static(range(VALUES_AHEAD)):
                    t = ti.min((rb * VALUES_AHEAD + u) * groups + g, n_rows - 1)
                    cached(v, u, w.cache, lay, t, ti.min(word, n_latent // 4 - 1), w.cache_f32)
                for u in ti.static(range(VALUES_AHEAD)):
                    t = (rb * VALUES_AHEAD + u) * groups + g
                    p = weight[ti.min(t, n_rows - 1)] if t < n_rows else 0.0
                    acc += p * four(v, u, w.cache_f32)
            if c > 0:
                ti.simt.block.sync()
            for b in ti.static(range(4)):
                part[b * BLOCK + tid] = acc[b]
            ti.simt.block.sync()
            for k in range(ti.static(cdiv(4 * min(pow2(w.n_latent // 4), BLOCK), BLOCK))):
                e = k * BLOCK + tid
                if e < 4 * threads:
                    b, at = e // threads, e & (threads - 1)
                    if c * threads + at < n_latent // 4:
                        s = 0.0
                        for g2 in range(groups):
                            s += part[b * BLOCK + g2 * threads + at]
                        xs[lane_place((c * threads + at) * 4 + b)] = s / total
        ti.simt.block.sync()
        value_rows(bits, d, tid, 0, w.n_v, h, xs, w, lay, ROWS_AHEAD, BLOCK, o)


@ti.kernel
def _attention_short(w: ti.template(), layer: ti.template(), pos: ti.template(), qa: ti.template(), o: ti.template()):
    attention_short(w, layer, pos, qa, o)
