"""Feed-forward network of a chunk of tokens on a GPU: tiles of sums, expert by expert.

A tile of gate and up takes 64 activations: each pair of its rows is a gate row and its up row, so that both sums of an
activation meet in one thread. Routed pairs come in tiles of one expert (:mod:`tmla.stages.route_tiles`).
"""

import taichi as ti

from tmla.stages.ffn import silu
from tmla.stages.lanes import cdiv
from tmla.stages.matmul_tiles import matmul_simt
from tmla.stages.tile import (
    BLOCK,
    DEPTH,
    ROW_PAIRS,
    ROWS,
    SUMS,
    TOKEN_PAIRS,
    TOKENS,
    fetch_tokens,
    fetch_word,
    multiply_tile,
    put_fetched_tokens,
    put_rows,
    row_of,
    token_of,
)


@ti.kernel
def _up_tiles(
    w: ti.template(),
    gate_q: ti.template(),
    gate_d: ti.template(),
    up_q: ti.template(),
    up_d: ti.template(),
    routed: ti.template(),
    n_out: ti.template(),
    lay: ti.i32,
    x: ti.template(),
    n: ti.i32,
    n_tiles: ti.i32,
    g: ti.template(),
    hidden: ti.template(),
):
    """Activations of `n` tokens (common part), or of the tiles of pairs of the routed experts."""
    n_in = ti.static(up_d.shape[2] * 32)
    ti.loop_config(block_dim=BLOCK)
    for i in range(ti.static(cdiv(n_out, ROWS // 2)) * n_tiles * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        tile = blk % n_tiles  # neighbouring blocks share their matrix rows, where they are of one expert
        f0 = blk // n_tiles * (ROWS // 2)
        e, p0, end = 0, tile * TOKENS, n
        if ti.static(routed):
            e = g.tile_expert[tile]
            if e >= 0:
                p0, end = g.tile_first[tile], g.tile_end[tile]
        if e >= 0:
            pa, pb = ti.min(p0 + 2 * (tid >> 3), end - 1), ti.min(p0 + 2 * (tid >> 3) + 1, end - 1)
            if ti.static(routed):
                pa, pb = g.order[pa] // w.n_used, g.order[pb] // w.n_used
            row = e * n_out + ti.min(f0 + (tid >> 2), n_out - 1)
            acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
            bits = ti.Vector([ti.u64(0) for _ in ti.static(range(2))], dt=ti.u64)
            d = ti.Vector([0.0 for _ in ti.static(range(2))])
            v = ti.Vector([0.0 for _ in ti.static(range(8))])
            for step in range(ti.static(up_d.shape[2] + 1)):
                if step > 0:
                    put_rows(ws, bits, d, tid)
                    put_fetched_tokens(xs, v, tid)
                    ti.simt.block.sync()
                if step < ti.static(up_d.shape[2]):
                    fetch_word(bits, d, 0, gate_q, gate_d, lay, row, step * 4 + (tid & 3))
                    fetch_word(bits, d, 1, up_q, up_d, lay, row, step * 4 + (tid & 3))
                    fetch_tokens(v, x, pa, pb, 0, step * DEPTH, n_in, tid)
                if step > 0:
                    multiply_tile(acc, ws, xs, tid)
                    ti.simt.block.sync()
            for j in ti.static(range(4)):
                p = p0 + token_of(tid, j)
                if p < end:
                    factor = 1.0
                    if ti.static(routed):
                        factor = g.weight[g.order[p]]
                    for a in ti.static(range(4)):
                        f = f0 + (row_of(tid, 2 * a) >> 1)
                        if f < n_out:
                            gate, up = acc[2 * a * 4 + j], acc[(2 * a + 1) * 4 + j]
                            act = ti.max(up, 0.0) * ti.max(up, 0.0)
                            if ti.static(w.gated):
                                act = silu(gate) * up
                            hidden[p, f] = factor * act


@ti.kernel
def _down_tiles(
    w: ti.template(), lay: ti.i32, hidden: ti.template(), n_tiles: ti.i32, g: ti.template(), out: ti.template()
):
    """One row a pair: out[p] = W_down[e] @ hidden[p]."""
    n_out, n_in = ti.static(out.shape[1], w.down_exps_d.shape[2] * 32)
    ti.loop_config(block_dim=BLOCK)
    for i in range(ti.static(cdiv(out.shape[1], ROWS)) * n_tiles * BLOCK):
        ws = ti.simt.block.SharedArray(ROW_PAIRS, ti.u64)
        xs = ti.simt.block.SharedArray(TOKEN_PAIRS, ti.u64)
        tid, blk = i & (BLOCK - 1), i // BLOCK
        row0, e = blk // n_tiles * ROWS, g.tile_expert[blk % n_tiles]
        if e >= 0:
            p0, end = g.tile_first[blk % n_tiles], g.tile_end[blk % n_tiles]
            ra, rb = ti.min(row0 + 2 * (tid >> 2), n_out - 1), ti.min(row0 + 2 * (tid >> 2) + 1, n_out - 1)
            pa, pb = ti.min(p0 + 2 * (tid >> 3), end - 1), ti.min(p0 + 2 * (tid >> 3) + 1, end - 1)
            acc = ti.Vector([0.0 for _ in ti.static(range(SUMS))])
            bits = ti.Vector([ti.u64(0) for _ in ti.static(range(2))], dt=ti.u64)
            d = ti.Vector([0.0 for _ in ti.static(range(2))])
            v = ti.Vector([0.0 for _ in ti.static(range(8))])
            for step in range(ti.static(w.down_exps_d.shape[2] + 1)):
                if step > 0:
                    put_rows(ws, bits, d, tid)
                    put_fetched_tokens(xs, v, tid)
                    ti.simt.block.sync()
                if step < ti.static(w.down_exps_d.shape[2]):
                    word = step * 4 + (tid & 3)
                    fetch_word(bits, d, 0, w.down_exps_q, w.down_exps_d, lay, e * n_out + ra, word)
                    fetch_word(bits, d, 1, w.down_exps_q, w.down_exps_d, lay, e * n_out + rb, word)
                    fetch_tokens(v, hidden, pa, pb, 0, step * DEPTH, n_in, tid)
                if step > 0:
                    multiply_tile(acc, ws, xs, tid)
                    ti.simt.block.sync()
            for j in ti.static(range(4)):
                for r in ti.static(range(8)):
                    p, o = p0 + token_of(tid, j), row0 + row_of(tid, r)
                    if p < end and o < n_out:
                        out[p, o] = acc[r * 4 + j]


@ti.kernel
def _add_experts(w: ti.template(), out: ti.template(), n: ti.i32, g: ti.template(), x: ti.template()):
    dim = ti.static(x.shape[1])
    for i in range(n * dim):
        t = i // dim
        c = i - t * dim
        s = 0.0
        for k in range(w.n_used):
            s += out[g.place[t * w.n_used + k], c]
        x[t, c] = x[t, c] + w.residual_scale * s


def ffn_rows_simt(w, lay, xn, n, groups, scratch, x):
    """As :func:`tmla.stages.ffn_rows.ffn_rows`."""
    if w.common_ffn_dim:
        n_tiles = cdiv(n, TOKENS)
        matrices = (w.gate_q, w.gate_d, w.up_q, w.up_d)
        _up_tiles(w, *matrices, False, w.common_ffn_dim, lay, xn, n, n_tiles, groups, scratch.common)
        matmul_simt(w.down_q, w.down_d, lay, scratch.common, n, w.residual_scale, True, x)
    if w.n_used:
        n_tiles = min(cdiv(n * w.n_used, TOKENS) + w.router.shape[1], groups.tile_expert.shape[0])
        matrices = (w.gate_exps_q, w.gate_exps_d, w.up_exps_q, w.up_exps_d)
        _up_tiles(w, *matrices, True, w.expert_ffn_dim, lay, xn, n, n_tiles, groups, scratch.hidden)
        _down_tiles(w, lay, scratch.hidden, n_tiles, groups, scratch.out)
        _add_experts(w, scratch.out, n, groups, x)
