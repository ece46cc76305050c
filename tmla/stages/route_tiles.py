"""Router for a chunk of tokens on a GPU: logits by tiles, a block a token for the choice, one block for the grouping.

The grouping also cuts each expert's pairs into tiles of TILE_TOKENS: tile i has the pairs from ``tile_first[i]`` up to
``tile_end[i]``, of expert ``tile_expert[i]``, which is -1 where there is no such tile. No atomics: an expert's thread
counts its pairs itself.
"""

import taichi as ti

from tmla.stages.lanes import cdiv
from tmla.stages.router import choose_block, weight_of
from tmla.stages.tile import (
    BLOCK,
    DEPTH,
    ROW_PAIRS,
    ROWS,
    SUMS,
    TOKEN_PAIRS,
    TOKENS,
    fetch_tokens,
    multiply_tile,
    put_f32_rows,
    put_fetched_tokens,
    row_of,
    token_of,
)

TILE_TOKENS = TOKENS


@ti.kernel
def _logit_tiles(w: ti.template(), lay: ti.i32, x: ti.template(), n: ti.i32, logit: ti.template()):
    n_out, n_in = ti.static(w.router.shape[1], w.router.shape[2])
    ti.loop_config(block_dim=BLOCK)
    for i in range(ti.static(cdiv(w.router.shape[1], ROWS)) * ((n + (TOKENS - 1)) // TOKENS) * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        n_token_tiles = (n + (TOKENS - 1)) // TOKENS
        row0, t0 = blk // n_token_tiles * ROWS, blk % n_token_tiles * TOKENS
        ta, tb = ti.min(t0 + 2 * (tid >> 3), n - 1), ti.min(t0 + 2 * (tid >> 3) + 1, n - 1)
        acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
        m = ti.Vector([0.0 for _ in ti.static(range(16))])
        v = ti.Vector([0.0 for _ in ti.static(range(8))])
        for step in range(ti.static(cdiv(w.router.shape[2], DEPTH) + 1)):
            if step > 0:
                put_f32_rows(ws, m, tid)
                put_fetched_tokens(xs, v, tid)
                ti.simt.block.sync()
            if step < ti.static(cdiv(w.router.shape[2], DEPTH)):
                for s in ti.static(range(4)):
                    e = ti.min(row0 + 2 * ((tid >> 3) + 32 * (s // 2)) + s % 2, n_out - 1)
                    for q in ti.static(range(4)):  # behind the row's end tokens are 0
                        m[s * 4 + q] = w.router[lay, e, ti.min(step * DEPTH + (tid & 7) * 4 + q, n_in - 1)]
                fetch_tokens(v, x, ta, tb, 0, step * DEPTH, n_in, tid)
            if step > 0:
                multiply_tile(acc, ws, xs, tid)
                ti.simt.block.sync()
        for j in ti.static(range(4)):
            for r in ti.static(range(8)):
                t, e = t0 + token_of(tid, j), row0 + row_of(tid, r)
                if t < n and e < n_out:
                    logit[t, e] = acc[r * 4 + j]


@ti.kernel
def _choose_rows(w: ti.template(), lay: ti.i32, n: ti.i32, g: ti.template()):
    ti.loop_config(block_dim=BLOCK)
    for i in range(n * BLOCK):
        score = ti.simt.block.SharedArray(g.logit.shape[1], ti.f32)
        select = ti.simt.block.SharedArray(g.logit.shape[1], ti.f32)
        group = ti.simt.block.SharedArray(w.routing.n_groups, ti.f32)
        who = ti.simt.block.SharedArray(w.routing.n_used, ti.i32)
        tid, t = i & (BLOCK - 1), i // BLOCK
        choose_block(tid, w, lay, g.logit, t, score, select, group, who, BLOCK)
        if tid < w.n_used:
            g.expert[t * w.n_used + tid] = who[tid]
            g.weight[t * w.n_used + tid] = weight_of(w, tid, g.logit.shape[1], score, who)
        ti.simt.block.sync()


@ti.kernel
def _group(w: ti.template(), n: ti.i32, g: ti.template()):
    n_expert, n_tiles = ti.static(w.router.shape[1], g.tile_expert.shape[0])
    ti.loop_config(block_dim=BLOCK)
    for tid in range(BLOCK):
        count = ti.simt.block.SharedArray(w.router.shape[1], ti.i32)
        for k in range(ti.static(cdiv(w.router.shape[1], BLOCK))):
            e = k * BLOCK + tid
            if e < n_expert:
                c = 0
                for j in range(n * w.n_used):
                    if g.expert[j] == e:
                        c += 1
                count[e] = c
        ti.simt.block.sync()
        for k in range(ti.static(cdiv(w.router.shape[1], BLOCK))):
            e = k * BLOCK + tid
            if e < n_expert:
                at, tile = 0, 0
                for other in range(e):
                    at += count[other]
                    tile += (count[other] + (TILE_TOKENS - 1)) // TILE_TOKENS
                end = at + count[e]
                g.start[e] = at
                if e == n_expert - 1:
                    g.start[n_expert] = end
                for b in range((count[e] + (TILE_TOKENS - 1)) // TILE_TOKENS):
                    g.tile_expert[tile + b] = e
                    g.tile_first[tile + b] = at + b * TILE_TOKENS
                    g.tile_end[tile + b] = ti.min(at + (b + 1) * TILE_TOKENS, end)
                for j in range(n * w.n_used):
                    if g.expert[j] == e:
                        g.order[at] = j
                        g.place[j] = at
                        at += 1
        total = 0
        for e in range(n_expert):
            total += (count[e] + (TILE_TOKENS - 1)) // TILE_TOKENS
        for k in range(ti.static(cdiv(g.tile_expert.shape[0], BLOCK))):
            tile = k * BLOCK + tid
            if total <= tile and tile < n_tiles:
                g.tile_expert[tile] = -1


def route_rows_simt(w, lay, x, n, groups):
    """As :func:`tmla.stages.route_rows.route_rows`, and ``tile_expert``, ``tile_first``, ``tile_end`` i32 [tiles]."""
    _logit_tiles(w, lay, x, n, groups.logit)
    _choose_rows(w, lay, n, groups)
    _group(w, n, groups)
