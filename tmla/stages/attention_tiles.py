"""Decode attention on a GPU, for long contexts: two small matrix products per tile of rows.

A block takes a split of the context and up to 16 heads, a tile of 64 rows at a time: scores (heads x rows, over C + R)
from chunks of columns in shared memory, one softmax step per tile, then values (heads x C, over the rows). A thread
holds 4 heads x 4 rows of scores, then some heads x 4 columns of values: at most 32 sums, since bodies that need more
registers spill on Vulkan (docs/log.md). Each cached row is fetched once for the scores and once, from cache, for the
values. Threadgroup memory: 32,064 bytes of Apple's 32,768.
"""

import taichi as ti

from tmla import runtime
from tmla.stages.attention import NEG_INF, attention, split_span
from tmla.stages.attention_shape import AHEAD, BLOCK, tile
from tmla.stages.lanes import cdiv, lane_max, lane_sum, log2, width
from tmla.stages.words import first_of, half_of, pair, second_of


@ti.func
def cached(v: ti.template(), k: ti.template(), cache: ti.template(), lay, t, word, f32: ti.template()):
    """Fetch values ``4 word .. 4 word + 3`` of a cached row into slot k of v, as they are stored."""
    if ti.static(f32):
        v[2 * k] = cache[lay, t, 2 * word]
        v[2 * k + 1] = cache[lay, t, 2 * word + 1]
    else:
        v[k] = cache[lay, t, word]


@ti.func
def four(v: ti.template(), k: ti.template(), f32: ti.template()):
    """The four values of slot k, as a vector of f32."""
    r = ti.Vector([0.0 for _ in ti.static(range(4))])
    if ti.static(f32):
        r[0], r[1] = first_of(v[2 * k]), second_of(v[2 * k])
        r[2], r[3] = first_of(v[2 * k + 1]), second_of(v[2 * k + 1])
    else:
        for j in ti.static(range(4)):
            r[j] = half_of(v[k], j)
    return r


@ti.func
def _fetch_chunk(
    g: ti.template(),
    kw: ti.template(),
    qw: ti.template(),
    ch,
    tid,
    r0,
    t1,
    h0,
    w: ti.template(),
    lay,
    qa: ti.template(),
):
    """Columns ``ch * g.columns ..`` of the tile's rows and of the queries into registers; zeros outside."""
    n_words = ti.static(qa.shape[2] // 4)
    for k in ti.static(range(g.row_words)):
        e = k * BLOCK + tid
        row = e // (g.columns // 4)
        word = ch * (g.columns // 4) + e - row * (g.columns // 4)
        for j in ti.static(range(2 if w.cache_f32 else 1)):
            kw[(2 if w.cache_f32 else 1) * k + j] = ti.u64(0)
        if r0 + row < t1 and word < n_words:
            cached(kw, k, w.cache, lay, r0 + row, word, w.cache_f32)
    for k in ti.static(range(g.query_words)):
        e = k * BLOCK + tid
        h = e // (g.columns // 2)
        c = ch * g.columns + 2 * (e - h * (g.columns // 2))
        qw[k] = ti.u64(0)
        if h0 + h < qa.shape[1] and c < qa.shape[2]:
            qw[k] = pair(qa[0, h0 + h, c], qa[0, h0 + h, c + 1])


@ti.func
def _stage_chunk(
    g: ti.template(),
    kw: ti.template(),
    qw: ti.template(),
    tid,
    ks: ti.template(),
    qs: ti.template(),
    f32: ti.template(),
):
    """What was fetched into shared memory, as pairs of f32."""
    for k in ti.static(range(g.row_words)):
        e = k * BLOCK + tid
        row = e // (g.columns // 4)
        p = row * g.pair_stride + 2 * (e - row * (g.columns // 4))
        v = four(kw, k, f32)
        ks[p] = pair(v[0], v[1])
        ks[p + 1] = pair(v[2], v[3])
    for k in ti.static(range(g.query_words)):
        e = k * BLOCK + tid
        h = e // (g.columns // 2)
        if h < g.heads:
            qs[h * g.pair_stride + e - h * (g.columns // 2)] = qw[k]


@ti.func
def _add_scores(g: ti.template(), s: ti.template(), tid, ks: ti.template(), qs: ti.template()):
    """s[a, b] += the chunk's product of heads 4 hg + a and rows rg + b g.rows/4, over this thread's columns."""
    group = tid // g.score_threads
    hg, rg = tid & (g.heads // 4 - 1), (tid & (g.score_threads - 1)) // (g.heads // 4)
    for c in range(g.pairs // 2):
        p = group * g.pairs + 2 * c
        q = ti.Vector([qs[(hg * 4 + a // 2) * g.pair_stride + p + a % 2] for a in ti.static(range(8))], dt=ti.u64)
        k = ti.Vector(
            [ks[(rg + b // 2 * (g.rows // 4)) * g.pair_stride + p + b % 2] for b in ti.static(range(8))], dt=ti.u64
        )
        for u in ti.static(range(2)):
            for a in ti.static(range(4)):
                for b in ti.static(range(4)):
                    s[a * 4 + b] += first_of(q[a * 2 + u]) * first_of(k[b * 2 + u])
            for a in ti.static(range(4)):
                for b in ti.static(range(4)):
                    s[a * 4 + b] += second_of(q[a * 2 + u]) * second_of(k[b * 2 + u])


@ti.func
def _join_columns(g: ti.template(), s: ti.template(), tid, ks: ti.template(), qs: ti.template()):
    """Sum the column groups' scores: qs[h/2, row] then holds the pair of heads h, h + 1."""
    group, o = tid // g.score_threads, tid & (g.score_threads - 1)
    for a in ti.static(range(2)):
        for b in ti.static(range(4)):
            ks[(group * 8 + a * 4 + b) * g.score_threads + o] = pair(s[a * 8 + b], s[a * 8 + 4 + b])
    ti.simt.block.sync()
    for k in range(ti.static(g.score_threads * 8 // BLOCK)):
        e = k * BLOCK + tid
        even, odd = 0.0, 0.0
        for k2 in range(g.column_groups):
            word = ks[k2 * 8 * g.score_threads + e]
            even += first_of(word)
            odd += second_of(word)
        at, ab = e & (g.score_threads - 1), e // g.score_threads
        hp = (at & (g.heads // 4 - 1)) * 2 + (ab >> 2)
        qs[hp * (g.rows + 1) + at // (g.heads // 4) + (ab & 3) * (g.rows // 4)] = pair(even, odd)


@ti.func
def _softmax_step(
    g: ti.template(), run: ti.template(), hp, lane, n, ks: ti.template(), qs: ti.template(), factor: ti.template()
):
    """One warp, two heads: weights of the tile into ks, the rescale into factor. run = [top, top, total, total]."""
    x = ti.Vector([NEG_INF, NEG_INF])
    for k in ti.static(range(cdiv(g.rows, width()))):
        row = k * ti.static(width()) + lane
        if row < n:
            word = qs[hp * (g.rows + 1) + row]
            x[0] = ti.max(x[0], first_of(word))
            x[1] = ti.max(x[1], second_of(word))
    top = ti.Vector([ti.max(lane_max(x[0]), run[0]), ti.max(lane_max(x[1]), run[1])])
    total = ti.Vector([0.0, 0.0])
    for k in ti.static(range(cdiv(g.rows, width()))):
        row = k * ti.static(width()) + lane
        p = ti.Vector([0.0, 0.0])
        if row < n:
            word = qs[hp * (g.rows + 1) + row]
            p[0] = ti.exp(first_of(word) - top[0])
            p[1] = ti.exp(second_of(word) - top[1])
        total += p
        ks[row * (g.heads // 2) + hp] = pair(p[0], p[1])
    f = ti.Vector([ti.exp(run[0] - top[0]), ti.exp(run[1] - top[1])])
    run[2] = run[2] * f[0] + lane_sum(total[0])
    run[3] = run[3] * f[1] + lane_sum(total[1])
    run[0] = top[0]
    run[1] = top[1]
    if lane == 0:
        factor[hp * 2] = f[0]
        factor[hp * 2 + 1] = f[1]


@ti.func
def _fetch_values(v: ti.template(), first, t1, word, w: ti.template(), lay):
    """AHEAD rows from `first` on, clamped to the last row: those behind the end have weight 0."""
    for k in ti.static(range(AHEAD)):
        cached(v, k, w.cache, lay, ti.min(first + k, t1 - 1), word, w.cache_f32)


@ti.func
def _add_values(
    g: ti.template(),
    acc: ti.template(),
    v: ti.template(),
    r0,
    t1,
    word,
    vh,
    n_heads: ti.template(),
    ks: ti.template(),
    w: ti.template(),
    lay,
):
    """acc[a, b] += weight of head vh + a times column 4 word + b, over the tile's rows; v holds the first AHEAD."""
    for rb in range((ti.min(g.rows, t1 - r0) + (AHEAD - 1)) // AHEAD):
        nv = v
        _fetch_values(nv, r0 + (rb + 1) * AHEAD, t1, word, w, lay)
        for k in ti.static(range(AHEAD)):
            x = four(v, k, w.cache_f32)
            if ti.static(n_heads == 1):
                weights = ks[(rb * AHEAD + k) * (g.heads // 2) + (vh >> 1)]
                p = second_of(weights) if (vh & 1) == 1 else first_of(weights)
                for b in ti.static(range(4)):
                    acc[b] += p * x[b]
            else:
                for a in ti.static(range(n_heads // 2)):
                    weights = ks[(rb * AHEAD + k) * (g.heads // 2) + (vh >> 1) + a]
                    for b in ti.static(range(4)):
                        acc[a * 8 + b] += first_of(weights) * x[b]
                        acc[a * 8 + 4 + b] += second_of(weights) * x[b]
        v = nv


@ti.func
def attention_tiles(
    g: ti.template(), w: ti.template(), layer: ti.template(), pos: ti.template(), qa: ti.template(), a: ti.template()
):
    """Partial attention of every split, as :func:`tmla.stages.attention.attention` leaves it."""
    n_heads, n_latent, n_splits = ti.static(a.part.shape[1], a.part.shape[2], a.part.shape[0])
    head_groups = ti.static(cdiv(a.part.shape[1], g.heads))
    n_chunks = ti.static(cdiv(qa.shape[2], g.columns))
    threads = ti.static(g.value_threads(a.part.shape[2]))
    per_thread = ti.static(g.heads_per_thread(a.part.shape[2]))
    per_value = ti.static(2 if w.cache_f32 else 1)  # u64 that four cached values take
    ti.loop_config(block_dim=BLOCK)
    for i in range(n_splits * head_groups * BLOCK):
        ks = ti.simt.block.SharedArray(
            g.row_pairs, ti.u64
        )  # chunk of rows, partial scores, weights [g.rows, g.heads/2]
        qs = ti.simt.block.SharedArray(g.query_pairs, ti.u64)  # chunk of queries, scores [g.heads/2, g.rows + 1]
        factor = ti.simt.block.SharedArray(g.heads, ti.f32)
        tid, blk = i & (BLOCK - 1), i >> ti.static(log2(BLOCK))
        split = blk // head_groups
        h0 = (blk - split * head_groups) * g.heads
        lay = layer[0] - w.first
        n_rows = pos[0] + 1
        span = split_span(n_rows, n_splits, g.rows)
        t0 = split * span[0] * g.rows
        t1 = ti.min(t0 + span[0] * g.rows, n_rows)
        if t0 < t1:
            lane, warp = tid & ti.static(width() - 1), tid >> ti.static(log2(width()))
            word, vh = tid & (threads - 1), tid // threads * per_thread
            acc = ti.Vector([0.0 for _ in ti.static(range(per_thread * 4))])
            run = ti.Vector([NEG_INF, NEG_INF, 0.0, 0.0])
            kw = ti.Vector([ti.u64(0) for _ in ti.static(range(g.row_words * per_value))], dt=ti.u64)
            qw = ti.Vector([ti.u64(0) for _ in ti.static(range(g.query_words))], dt=ti.u64)
            v = ti.Vector([ti.u64(0) for _ in ti.static(range(AHEAD * per_value))], dt=ti.u64)
            for tile in range((t1 - t0 + (g.rows - 1)) // g.rows):
                r0 = t0 + tile * g.rows
                s = ti.Vector([0.0 for _ in ti.static(range(16))])
                for ch in range(n_chunks + 1):  # stage chunk ch - 1, fetch chunk ch, then compute with ch - 1
                    if ch > 0:
                        _stage_chunk(g, kw, qw, tid, ks, qs, w.cache_f32)
                        ti.simt.block.sync()
                    if ch < n_chunks:
                        _fetch_chunk(g, kw, qw, ch, tid, r0, t1, h0, w, lay, qa)
                    if ch > 0:
                        _add_scores(g, s, tid, ks, qs)
                        ti.simt.block.sync()
                _fetch_values(v, r0, t1, ti.min(word, n_latent // 4 - 1), w, lay)  # they come while scores are summed
                _join_columns(g, s, tid, ks, qs)
                ti.simt.block.sync()
                if warp < g.heads // 2:
                    _softmax_step(g, run, warp, lane, t1 - r0, ks, qs, factor)
                ti.simt.block.sync()
                if tile > 0:
                    for h in ti.static(range(per_thread)):
                        for b in ti.static(range(4)):
                            acc[h * 4 + b] *= factor[vh + h]
                _add_values(g, acc, v, r0, t1, ti.min(word, n_latent // 4 - 1), vh, per_thread, ks, w, lay)
                ti.simt.block.sync()
            for h in ti.static(range(per_thread)):
                for b in ti.static(range(4)):
                    if word < n_latent // 4 and h0 + vh + h < n_heads:
                        # plane b of the columns 4 word + b: neighbouring threads write side by side
                        a.part[split, h0 + vh + h, b * (n_latent // 4) + word] = acc[h * 4 + b]
            if warp < g.heads // 2 and lane == 0:
                for k in ti.static(range(2)):
                    h = h0 + warp * 2 + k
                    if h < n_heads:
                        a.top[h, split] = run[k]
                        a.total[h, split] = run[2 + k]


@ti.kernel
def _attention_tiles(
    g: ti.template(), w: ti.template(), layer: ti.template(), pos: ti.template(), qa: ti.template(), a: ti.template()
):
    attention_tiles(g, w, layer, pos, qa, a)


def attend(w, layer, pos, qa, scratch):
    """Attend from every head to the first ``pos[0] + 1`` cached rows, on any backend.

    Parameters
    ----------
    w : AttentionBank
        ``cache``, ``first``, ``row_width`` (C + R), ``cache_f32``.
    layer, pos : ti.Field, i32 [1]
    qa : ti.Field, f32 [1, H, C + R to fours]
        Fused query rows, score scale included.
    scratch : AttentionScratch
        Takes maximum, sum and latent sum of every split; GPUs write the latent in four planes (columns 4 i + b).
    """
    if runtime.caps().gpu:
        _attention_tiles(tile(), w, layer, pos, qa, scratch)
    else:
        attention(w, layer, pos, qa, scratch)
