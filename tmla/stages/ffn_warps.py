"""Feed-forward network of one token on a GPU, three dispatches: common part and router, experts, down.

1. :func:`ffn_common`: gate and up of the part every token uses, with the norm folded in; blocks in front of it
   compute the router's logits.
2. :func:`ffn_experts`: gate and up of the chosen experts; every block finds the choice again from the logits.
3. :func:`ffn_down`: all down projections and the residual: a block takes a few rows, each warp one *segment* of the
   activations (one expert, or an equal slice of the common part), so that no sum needs an atomic.

Activations lie in ``hidden`` [segments, :func:`segment_len`] in lane order: the lanes that read them side by side.
"""

import taichi as ti

from tmla import runtime
from tmla.stages.ffn import ffn as ffn_cpu
from tmla.stages.ffn import silu
from tmla.stages.lanes import cdiv, lane_sum, log2, pow2, width
from tmla.stages.router import choose_block, weight_of
from tmla.stages.words import WORD, Tiling, dot_word, rms_factor, row_parts, rows_dot

ROUTER_WARPS = 8  # warps that share an expert's router row
MAX_THREADS = 1024


def segment_len(n: int, lanes: int | None = None) -> int:
    """Length in lane order of a segment of n activations, for groups of `lanes` threads (default: the backend's)."""
    per_group = WORD * (lanes or width())
    return cdiv(n, per_group) * per_group


def segment_size(n_used: int, expert_ffn_dim: int, common_ffn_dim: int) -> int:
    """Activations in a segment: an expert's; in a dense layer an eighth of the network, in whole Q8_0 blocks."""
    return expert_ffn_dim if n_used else cdiv(cdiv(common_ffn_dim, 32), 8) * 32


def common_tiling() -> Tiling:
    """Tiling of gate and up of the common part (measured on V2-Lite's shapes: docs/log.md)."""
    return Tiling(rows=1, split=1, block=8 * width(), ahead=2 if runtime.caps().lane_ops == "warp" else 4)


def expert_tiling() -> Tiling:
    """Tiling of gate and up of the experts: blocks as large as one wave of them wants."""
    return Tiling(rows=2, split=1, block=16 * width(), ahead=2)


def down_tiling() -> Tiling:
    """Tiling of the down projection: rows of a block and words in flight."""
    warp = runtime.caps().lane_ops == "warp"
    return Tiling(rows=8 if warp else 4, split=1, block=width(), ahead=1 if warp else 2)


@ti.func
def _store(w: ti.template(), acc: ti.template(), factor, seg0, f0, n_f, t: ti.template(), hidden: ti.template()):
    """Activations f0 .. of a network into their segments."""
    size = ti.static(w.segment)
    for r in ti.static(range(t.rows)):
        f = f0 + r
        if f < n_f:
            a = 0.0
            if ti.static(w.gated):
                a = silu(acc[t.rows + r] * factor) * (acc[r] * factor)
            else:
                u = ti.max(acc[r] * factor, 0.0)
                a = u * u
            seg = f // size
            e = f - seg * size
            word = e >> 3
            at = ((word >> ti.static(log2(width()))) * WORD + (e & (WORD - 1))) * width() + (
                word & ti.static(width() - 1)
            )
            hidden[seg0 + seg, at] = a


@ti.func
def ffn_common(
    w: ti.template(),
    layer: ti.template(),
    x: ti.template(),
    norm: ti.template(),
    r: ti.template(),
    hidden: ti.template(),
    t: ti.template(),
):
    """Router logits (mixture layers), then gate and up of the common part (where there is one); x is not normalised."""
    wd, n_warp = ti.static(width(), t.block // width())
    dim = ti.static(x.shape[1])
    per_block = ti.static(max(1, t.block // width() // ROUTER_WARPS))
    share = ti.static(min(ROUTER_WARPS, t.block // width()))
    router_blocks = ti.static(cdiv(r.logit.shape[1], per_block) if w.moe else 0)
    ffn_blocks = ti.static(cdiv(w.common_ffn_dim, t.rows * t.block // width()))
    n_shared = ti.static(row_parts(x.shape[1] // WORD, width() * t.ahead)[2])
    ti.loop_config(block_dim=t.block)
    for i in range((router_blocks + ffn_blocks) * t.block):
        xs = ti.simt.block.SharedArray(n_shared, ti.f32)
        part = ti.simt.block.SharedArray(n_warp * 2, ti.f32)
        tid, blk = i & ti.static(t.block - 1), i >> ti.static(log2(t.block))
        lane, warp = tid & ti.static(wd - 1), tid >> ti.static(log2(wd))
        lay = layer[0] - w.first
        if ti.static(w.moe):
            if blk < router_blocks:
                n_expert = ti.static(r.logit.shape[1])
                e = ti.min(blk * per_block + warp // share, n_expert - 1)
                s, sq = 0.0, 0.0
                for k in range(ti.static(cdiv(x.shape[1], width() * share))):
                    c = (k * share + warp % share) * wd + lane
                    if c < dim:
                        v = x[0, c]
                        sq += v * v
                        if ti.static(norm):
                            v *= w.ffn_norm[lay, c]
                        s += w.router[lay, e, c] * v
                s = lane_sum(s)
                sq = lane_sum(sq)
                if lane == 0:
                    part[warp] = s
                    part[n_warp + warp] = sq
                ti.simt.block.sync()
                if tid < per_block and blk * per_block + tid < n_expert:
                    total, squares = 0.0, 0.0
                    for k in range(share):
                        total += part[tid * share + k]
                        squares += part[n_warp + tid * share + k]
                    factor = 1.0 / ti.sqrt(squares / dim + w.eps) if ti.static(norm) else 1.0
                    r.logit[0, blk * per_block + tid] = total * factor
        if ti.static(w.common_ffn_dim > 0):
            if blk >= router_blocks:
                f0 = ((blk - router_blocks) * n_warp + warp) * t.rows
                rows = ti.Vector([ti.min(f0 + k, w.common_ffn_dim - 1) for k in ti.static(range(t.rows))])
                acc = ti.Vector([0.0 for _ in ti.static(range(2 * t.rows))])
                sq = rows_dot(
                    acc,
                    w.up_q,
                    w.up_d,
                    w.gate_q,
                    w.gate_d,
                    w.gated,
                    lay,
                    rows,
                    x,
                    0,
                    w.ffn_norm,
                    lay,
                    norm,
                    tid,
                    xs,
                    part,
                    t,
                )
                factor = 1.0
                if ti.static(norm):
                    factor = rms_factor(sq, part, 0, tid, dim, w.eps, t.block)
                if lane == 0:
                    _store(w, acc, factor, w.n_used, f0, w.common_ffn_dim, t, hidden)


@ti.func
def ffn_experts(
    w: ti.template(),
    layer: ti.template(),
    x: ti.template(),
    norm: ti.template(),
    r: ti.template(),
    hidden: ti.template(),
    t: ti.template(),
):
    """Gate and up of the chosen experts; the first block leaves the choice in r.expert and r.weight."""
    wd, n_warp = ti.static(width(), t.block // width())
    per_expert = ti.static(cdiv(w.expert_ffn_dim, t.rows))
    n_expert = ti.static(r.logit.shape[1])
    n_shared = ti.static(row_parts(x.shape[1] // WORD, width() * t.ahead)[2])
    ti.loop_config(block_dim=t.block)
    for i in range(ti.static(cdiv(w.n_used * per_expert, n_warp) * t.block)):
        xs = ti.simt.block.SharedArray(n_shared, ti.f32)
        part = ti.simt.block.SharedArray(n_warp, ti.f32)
        score = ti.simt.block.SharedArray(n_expert, ti.f32)
        select = ti.simt.block.SharedArray(n_expert, ti.f32)
        group = ti.simt.block.SharedArray(w.routing.n_groups, ti.f32)
        who = ti.simt.block.SharedArray(w.n_used, ti.i32)
        tid, blk = i & ti.static(t.block - 1), i >> ti.static(log2(t.block))
        lane, warp = tid & ti.static(wd - 1), tid >> ti.static(log2(wd))
        lay = layer[0] - w.first
        choose_block(tid, w, lay, r.logit, 0, score, select, group, who, t.block)
        if blk == 0 and tid < w.n_used:
            r.expert[0, tid] = who[tid]
            r.weight[0, tid] = weight_of(w, tid, n_expert, score, who)
        g = ti.min(blk * n_warp + warp, w.n_used * per_expert - 1)
        slot = g // per_expert
        f0 = (g - slot * per_expert) * t.rows
        row0 = who[slot] * w.expert_ffn_dim
        rows = ti.Vector([row0 + ti.min(f0 + k, w.expert_ffn_dim - 1) for k in ti.static(range(t.rows))])
        acc = ti.Vector([0.0 for _ in ti.static(range(2 * t.rows))])
        sq = rows_dot(
            acc,
            w.up_exps_q,
            w.up_exps_d,
            w.gate_exps_q,
            w.gate_exps_d,
            w.gated,
            lay,
            rows,
            x,
            0,
            w.ffn_norm,
            lay,
            norm,
            tid,
            xs,
            part,
            t,
        )
        factor = 1.0
        if ti.static(norm):
            factor = rms_factor(sq, part, 0, tid, x.shape[1], w.eps, t.block)
        if lane == 0:
            _store(w, acc, factor, slot, f0, w.expert_ffn_dim, t, hidden)


@ti.func
def _segment_dot(
    acc: ti.template(),
    w_q: ti.template(),
    w_d: ti.template(),
    lay,
    row0,
    n_row,
    col0,
    seg,
    lane,
    w: ti.template(),
    hidden: ti.template(),
    t: ti.template(),
):
    """acc[r] += row row0 + r (below n_row), words from col0 on, times one segment."""
    wd = ti.static(width())
    n_word = ti.static(w.segment // WORD)
    for c in range(ti.static(cdiv(cdiv(w.segment // WORD, width()), t.ahead))):
        bits = ti.Vector([ti.u64(0) for _ in ti.static(range(t.rows * t.ahead))], dt=ti.u64)
        d = ti.Vector([0.0 for _ in ti.static(range(t.rows * t.ahead))])
        for k in ti.static(range(t.rows * t.ahead)):
            word = (c * t.ahead + k // t.rows) * wd + lane
            col = ti.min(col0 + ti.min(word, n_word - 1), w_q.shape[2] - 1)
            row = ti.min(row0 + k % t.rows, n_row - 1)
            bits[k] = w_q[lay, row, col]
            d[k] = ti.cast(w_d[lay, row, col >> 2], ti.f32)
        for u in ti.static(range(t.ahead)):
            word = (c * t.ahead + u) * wd + lane
            if word < n_word and col0 + word < w_q.shape[2]:
                at = (c * t.ahead + u) * wd * WORD + lane
                xv = ti.Vector([hidden[seg, at + j * wd] for j in ti.static(range(WORD))])
                for k in ti.static(range(t.rows)):
                    acc[k] += d[u * t.rows + k] * dot_word(bits[u * t.rows + k], xv)


@ti.func
def ffn_down(
    w: ti.template(),
    layer: ti.template(),
    r: ti.template(),
    hidden: ti.template(),
    x: ti.template(),
    next_layer: ti.template(),
    t: ti.template(),
):
    """x += residual_scale * (all down projections); `next_layer` i32 [1] takes the layer's number plus one."""
    wd, n_out = ti.static(width(), x.shape[1])
    block = ti.static(pow2(w.n_segments * width()))  # Metal takes powers of two alone
    ti.loop_config(block_dim=block)
    for i in range(ti.static(cdiv(x.shape[1], t.rows) * block)):
        part = ti.simt.block.SharedArray(w.n_segments * t.rows, ti.f32)
        tid, blk = i & (block - 1), i >> ti.static(log2(pow2(w.n_segments * width())))
        lane = tid & ti.static(wd - 1)
        seg = ti.min(tid >> ti.static(log2(wd)), w.n_segments - 1)  # spare warps of narrow lanes repeat the last one
        lay = layer[0] - w.first
        row0 = blk * t.rows
        acc = ti.Vector([0.0 for _ in ti.static(range(t.rows))])
        factor = ti.cast(ti.static(w.residual_scale), ti.f32)
        if ti.static(w.n_used > 0):
            if seg < w.n_used:
                e0 = r.expert[0, seg] * n_out
                factor *= r.weight[0, seg]
                _segment_dot(acc, w.down_exps_q, w.down_exps_d, lay, e0 + row0, e0 + n_out, 0, seg, lane, w, hidden, t)
        if ti.static(w.common_ffn_dim > 0):
            if seg >= w.n_used:
                col0 = (seg - w.n_used) * (w.segment // WORD)
                _segment_dot(acc, w.down_q, w.down_d, lay, row0, n_out, col0, seg, lane, w, hidden, t)
        for k in ti.static(range(t.rows)):
            s = lane_sum(acc[k]) * factor
            if lane == 0:
                part[seg * t.rows + k] = s
        ti.simt.block.sync()
        if tid < t.rows:
            if row0 + tid < n_out:
                s = x[0, row0 + tid]
                for k in range(ti.static(w.n_segments)):
                    s += part[k * t.rows + tid]
                x[0, row0 + tid] = s
        if i == 0:
            next_layer[0] = layer[0] + 1


@ti.kernel
def _ffn_warps(
    w: ti.template(),
    layer: ti.template(),
    xn: ti.template(),
    r: ti.template(),
    hidden: ti.template(),
    x: ti.template(),
    next_layer: ti.template(),
    t: ti.template(),
    te: ti.template(),
    td: ti.template(),
):
    if ti.static(w.moe or w.common_ffn_dim > 0):
        ffn_common(w, layer, xn, False, r, hidden, t)
    if ti.static(w.n_used > 0):
        ffn_experts(w, layer, xn, False, r, hidden, te)
    ffn_down(w, layer, r, hidden, x, next_layer, td)


def ffn(w, layer, xn, scratch, hidden, x, next_layer):
    """Network of one token, from the normalised residual, added to the residual, on any backend.

    Parameters as :func:`tmla.stages.ffn.ffn`; on GPUs also ``w.segment``, ``w.n_segments``, the router is run again,
    `hidden` is f32 [n_segments, segment_len(segment)], and `next_layer` i32 [1] takes ``layer[0] + 1``.
    """
    if runtime.caps().gpu:
        _ffn_warps(w, layer, xn, scratch, hidden, x, next_layer, common_tiling(), expert_tiling(), down_tiling())
    else:
        ffn_cpu(w, layer, xn, scratch, hidden, x)
