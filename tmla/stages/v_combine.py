"""v-combine: join the splits of the attention, then carry each head's latent mix back to its V values.

``o[h] = w_uv[h] @ mix[h]``. The value rows of head h stand at ``h * v_stride + v_offset`` of the matrix: unsplit
``kv_b`` has stride N + V and offset N, split ``attn_v_b`` stride V and offset 0; blocks run along C in both.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.attention import CHUNK, NEG_INF, TILE, split_span
from tmla.stages.attention_shape import tile
from tmla.stages.lanes import cdiv, lane_max, lane_sum, log2, width
from tmla.stages.linear import dequantise_ref, row_dot_q8
from tmla.stages.threads import SPREAD, share, team
from tmla.stages.words import WORD, dot_word, lane_place, shared_len

BLOCK = 512
VALUES_AHEAD = 2  # value rows a warp has in flight
VALUE_BLOCKS = 4  # blocks that share a head's value rows (each joins the splits again)


def join_count(a) -> int:
    """Things that :func:`join_splits_part` counts: chunks of every head's latent."""
    return a.part.shape[1] * (a.part.shape[2] // CHUNK)


@ti.func
def join_splits_part(first, end, pos: ti.template(), a: ti.template(), mix: ti.template()):
    n_chunk = ti.static(a.part.shape[2] // CHUNK)
    n_split = split_span(pos[0] + 1, a.part.shape[0], TILE)[1]
    for hb in range(first, end):
        h, b = hb // n_chunk, hb % n_chunk
        m = a.top[h, 0]
        for s in range(1, n_split):
            m = ti.max(m, a.top[h, s])
        total = 0.0
        acc = ti.Vector.zero(ti.f32, CHUNK)
        for s in range(n_split):
            weight = ti.exp(a.top[h, s] - m)
            total += weight * a.total[h, s]
            for j in range(CHUNK):
                acc[j] += weight * a.part[s, h, b * CHUNK + j]
        for j in range(CHUNK):
            mix[h, b * CHUNK + j] = acc[j] / total


@ti.func
def v_combine_part(first, end, w: ti.template(), layer: ti.template(), mix: ti.template(), o: ti.template()):
    for k in range(first, end):
        h = k // w.n_v
        row = h * w.v_stride + w.v_offset + k % w.n_v
        o[0, k] = row_dot_q8(w.v_q, w.v_d, layer[0] - w.first, row, mix, h, 0, w.v_d.shape[2])


@ti.func
def fetch_value_rows(
    bits: ti.template(), d: ti.template(), first, v1, h, lane, w: ti.template(), lay, ahead: ti.template()
):
    """Words and scales of value rows ``first .. first + ahead`` of head h (the last one below v1 repeated)."""
    n_word = ti.static(w.v_q.shape[2])
    for k in ti.static(range(ahead * cdiv(w.v_q.shape[2], width()))):
        col = ti.min(k // ahead * ti.static(width()) + lane, n_word - 1)
        row = h * w.v_stride + w.v_offset + ti.min(first + k % ahead, v1 - 1)
        bits[k] = w.v_q[lay, row, col]
        d[k] = w.v_d[lay, row, col >> 2]


@ti.func
def value_rows(
    bits: ti.template(),
    d: ti.template(),
    tid,
    v0,
    v1,
    h,
    xs: ti.template(),
    w: ti.template(),
    lay,
    ahead: ti.template(),
    block: ti.template(),
    o: ti.template(),
):
    """o[h * V + v] for v0 <= v < v1: each warp takes `ahead` rows of w_uv at a time, times the mix in lane order.

    bits and d hold the warp's first rows already: they were fetched while the mix was made.
    """
    wd = ti.static(width())
    lane, warp = tid & ti.static(wd - 1), tid >> ti.static(log2(wd))
    n_warp = ti.static(block // width())
    for vb in range((v1 - v0 + (n_warp * ahead - 1)) // (n_warp * ahead)):
        first = v0 + (vb * n_warp + warp) * ahead
        if vb > 0:
            fetch_value_rows(bits, d, first, v1, h, lane, w, lay, ahead)
        y = ti.Vector([0.0 for _ in ti.static(range(ahead))])
        for u in ti.static(range(cdiv(w.v_q.shape[2], width()))):
            xv = ti.Vector([xs[(u * WORD + j) * (wd + 4) + lane] for j in ti.static(range(WORD))])
            for r in ti.static(range(ahead)):
                y[r] += ti.cast(d[u * ahead + r], ti.f32) * dot_word(bits[u * ahead + r], xv)
        for r in ti.static(range(ahead)):
            s = lane_sum(y[r])
            if lane == 0 and first + r < v1:
                o[0, h * w.n_v + first + r] = s


@ti.func
def v_combine_simt(
    g: ti.template(), w: ti.template(), layer: ti.template(), pos: ti.template(), a: ti.template(), o: ti.template()
):
    """Join the splits that :mod:`tmla.stages.attention_tiles` left, then the value rows: VALUE_BLOCKS blocks a head."""
    wd = ti.static(width())
    n_heads, n_latent, n_splits = ti.static(a.part.shape[1], a.part.shape[2], a.part.shape[0])
    n_shared = ti.static(shared_len(cdiv(w.v_q.shape[2], width()) * width()))
    n_fetch = ti.static(VALUES_AHEAD * cdiv(w.v_q.shape[2], width()))
    per_block = ti.static(cdiv(w.n_v, VALUE_BLOCKS))
    ti.loop_config(block_dim=BLOCK)
    for i in range(n_heads * VALUE_BLOCKS * BLOCK):
        xs = ti.simt.block.SharedArray(n_shared, ti.f32)
        ws = ti.simt.block.SharedArray(n_splits, ti.f32)
        tid, blk = i & (BLOCK - 1), i >> ti.static(log2(BLOCK))
        h = blk // VALUE_BLOCKS
        lay = layer[0] - w.first
        v0 = (blk - h * VALUE_BLOCKS) * per_block
        v1 = ti.min(v0 + per_block, w.n_v)
        lane, warp = tid & ti.static(wd - 1), tid >> ti.static(log2(wd))
        bits = ti.Vector([ti.u64(0) for _ in ti.static(range(n_fetch))], dt=ti.u64)
        d = ti.Vector([ti.cast(0.0, ti.f16) for _ in ti.static(range(n_fetch))], dt=ti.f16)
        fetch_value_rows(bits, d, v0 + warp * VALUES_AHEAD, v1, h, lane, w, lay, VALUES_AHEAD)
        n = split_span(pos[0] + 1, n_splits, g.rows)[1]
        top = NEG_INF
        for k in range((n + (wd - 1)) >> ti.static(log2(wd))):
            top = ti.max(top, a.top[h, ti.min(k * wd + lane, n - 1)])
        top = lane_max(top)
        total = 0.0
        for k in range((n + (wd - 1)) >> ti.static(log2(wd))):
            s = k * wd + lane
            if s < n:
                f = ti.exp(a.top[h, s] - top)
                total += f * a.total[h, s]
                if warp == 0:
                    ws[s] = f
        total = lane_sum(total)
        for k in range(ti.static(cdiv(n_shared, BLOCK))):
            if k * BLOCK + tid < n_shared:
                xs[k * BLOCK + tid] = 0.0  # lanes behind the row's end read these
        ti.simt.block.sync()
        for k in range(ti.static(cdiv(a.part.shape[2], BLOCK))):
            e = k * BLOCK + tid
            if e < n_latent:
                acc = ti.Vector([0.0 for _ in ti.static(range(8))])
                for s in range(n >> 3):
                    for u in ti.static(range(8)):
                        acc[u] += ws[s * 8 + u] * a.part[s * 8 + u, h, e]
                last = 0.0
                for s in range(n & ~7, n):
                    last += ws[s] * a.part[s, h, e]
                plane = e // (n_latent // 4)
                xs[lane_place((e - plane * (n_latent // 4)) * 4 + plane)] = (acc.sum() + last) / total
        ti.simt.block.sync()
        value_rows(bits, d, tid, v0, v1, h, xs, w, lay, VALUES_AHEAD, BLOCK, o)


@ti.kernel
def _join_and_combine(
    w: ti.template(), layer: ti.template(), pos: ti.template(), a: ti.template(), mix: ti.template(), o: ti.template()
):
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, ti.static(join_count(a)))
            join_splits_part(span[0], span[1], pos, a, mix)
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, o.shape[1])
            v_combine_part(span[0], span[1], w, layer, mix, o)


@ti.kernel
def _v_combine_simt(
    g: ti.template(), w: ti.template(), layer: ti.template(), pos: ti.template(), a: ti.template(), o: ti.template()
):
    v_combine_simt(g, w, layer, pos, a, o)


def v_combine(w, layer, pos, scratch, mix, o):
    """Join the splits of ``pos[0] + 1`` rows and multiply each head's mix by its value rows.

    Parameters
    ----------
    w : AttentionBank
        ``v_q``, ``v_d`` Q8_0 fields [L, H * v_stride, C]; ``v_stride``, ``v_offset``, ``n_v`` (V).
    layer, pos : ti.Field, i32 [1]
    scratch : AttentionScratch
        As the attention of the same backend left it (GPUs: columns in four planes).
    mix : ti.Field, f32 [H, C]
        CPU: takes the joined latent mix.
    o : ti.Field, f32 [1, H * V]
    """
    if runtime.caps().gpu:
        _v_combine_simt(tile(), w, layer, pos, scratch, o)
    else:
        _join_and_combine(w, layer, pos, scratch, mix, o)


def v_combine_ref(w_q, w_d, stride, offset, n_v, mix):
    """NumPy reference for one layer: mix [H, C] -> float64 [H * V]."""
    w = dequantise_ref(w_q, w_d).reshape(mix.shape[0], stride, -1)[:, offset : offset + n_v]
    return np.einsum("hvc,hc->hv", w, mix.astype(np.float64)).reshape(-1)
