"""Absorb: carry each head's query into the latent space, so that the cache rows themselves are the keys.

``q'[h] = w_uk[h]^T @ q_nope[h]``, then the fused row ``[q' ; q_pe]`` times the score scale. A score is then one dot
product with a cache row (DeepSeek-V2 paper, section 2.1.2, and appendix C). The two file layouts hold ``w_uk`` with
different Q8_0 blocks and are both read in place:

- *unsplit* ``attn_kv_b``  ``[H * (N + V), C]``: per head N key rows, then V value rows; blocks run along C.
- *split* ``attn_k_b``  ``[H, C, N]`` (here ``[H * C, N]``): blocks run along N.

On GPUs one dispatch also turns the pe windows and finishes the cache row: :func:`query_simt`.
"""

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.stages.cache_row import cache_row, cache_row_block
from tmla.stages.lanes import cdiv, log2, width
from tmla.stages.linear import Q8_BLOCK, dequantise_ref, q8_value, row_dot_q8
from tmla.stages.rope import rope_query, turned
from tmla.stages.threads import SPREAD, share, team
from tmla.stages.words import WORD, dot_word

BLOCK = 256


@ti.func
def absorb_unsplit_part(
    first,
    end,
    w: ti.template(),
    layer: ti.template(),
    q: ti.template(),
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
):
    n_block = ti.static(w.k_d.shape[2])
    for hb in range(first, end):
        h, b = hb // n_block, hb % n_block
        acc = ti.Vector.zero(ti.f32, Q8_BLOCK)
        for n in range(w.n_nope):
            row = h * (w.n_nope + w.n_v) + n
            s = q[0, h * (w.n_nope + w.n_rope) + n] * ti.cast(w.k_d[layer[0] - w.first, row, b], ti.f32)
            for j in range(Q8_BLOCK):  # a local vector: the store cannot alias, so LLVM vectorises
                acc[j] += s * q8_value(w.k_q, layer[0] - w.first, row, b * Q8_BLOCK + j)
        for j in range(Q8_BLOCK):
            qa[0, h, b * Q8_BLOCK + j] = acc[j] * scale[pos[0]]


@ti.func
def absorb_split_part(
    first,
    end,
    w: ti.template(),
    layer: ti.template(),
    q: ti.template(),
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
):
    for hc in range(first, end):
        h = hc // w.n_latent
        at = h * (w.n_nope + w.n_rope)
        dot = row_dot_q8(w.k_q, w.k_d, layer[0] - w.first, hc, q, 0, at, w.k_d.shape[2])
        qa[0, h, hc - h * w.n_latent] = dot * scale[pos[0]]


def absorb_count(w, n_heads: int) -> int:
    """Things that :func:`absorb_part` counts: rows of ``attn_k_b``, or a head's blocks along the latent."""
    return n_heads * (w.n_latent if w.split else w.k_d.shape[2])


@ti.func
def absorb_part(
    first,
    end,
    w: ti.template(),
    layer: ti.template(),
    q: ti.template(),
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
):
    if ti.static(w.split):
        absorb_split_part(first, end, w, layer, q, scale, pos, qa)
    else:
        absorb_unsplit_part(first, end, w, layer, q, scale, pos, qa)


@ti.func
def _absorb_unsplit_block(
    blk, tid, part: ti.template(), w: ti.template(), lay, q: ti.template(), scale, qa: ti.template()
):
    """W words of one head's latent: each warp takes some key rows, then the warps' sums are joined."""
    wd, n_warp = ti.static(width(), BLOCK // width())
    n_word = ti.static(w.k_q.shape[2])
    per_head = ti.static(cdiv(n_word, width()))
    n_rows = ti.static(cdiv(w.n_nope, n_warp))
    lane, warp = tid & ti.static(wd - 1), tid >> ti.static(log2(wd))
    h = blk // per_head
    word = ti.min((blk - h * per_head) * wd + lane, n_word - 1)
    acc = ti.Vector([0.0 for _ in ti.static(range(WORD))])
    for k0 in range(ti.static(cdiv(n_rows, 8))):
        bits = ti.Vector([ti.u64(0) for _ in ti.static(range(8))], dt=ti.u64)
        d = ti.Vector([0.0 for _ in ti.static(range(8))])
        for k in ti.static(range(8)):  # eight rows in flight
            n = (k0 * 8 + k) * n_warp + warp
            row = h * (w.n_nope + w.n_v) + ti.min(n, w.n_nope - 1)
            bits[k] = w.k_q[lay, row, word]
            d[k] = ti.cast(w.k_d[lay, row, word >> 2], ti.f32)
            x = q[0, h * (w.n_nope + w.n_rope) + ti.min(n, w.n_nope - 1)]
            d[k] = d[k] * x if n < w.n_nope else 0.0
        for k in ti.static(range(8)):
            lo, hi = ti.cast(bits[k], ti.i32), ti.cast(bits[k] >> 32, ti.i32)
            for j in ti.static(range(4)):
                acc[j] += ti.cast((lo << (24 - 8 * j)) >> 24, ti.f32) * d[k]
                acc[4 + j] += ti.cast((hi << (24 - 8 * j)) >> 24, ti.f32) * d[k]
    for j in ti.static(range(WORD)):
        part[(warp * WORD + j) * (wd + 1) + lane] = acc[j]
    ti.simt.block.sync()
    for k in range(ti.static(cdiv(width() * WORD, BLOCK))):
        e = k * BLOCK + tid
        c = (blk - h * per_head) * wd * WORD + e
        if e < wd * WORD and c < w.n_latent:
            s = 0.0
            for g in range(n_warp):
                s += part[(g * WORD + (e & (WORD - 1))) * (wd + 1) + (e >> 3)]
            qa[0, h, c] = s * scale


@ti.func
def _absorb_split_block(blk, tid, w: ti.template(), lay, q: ti.template(), scale, qa: ti.template()):
    """A thread a row: N is short, and the rows of a block lie side by side."""
    n_word = ti.static(w.k_q.shape[2])
    hc = blk * BLOCK + tid
    if hc < ti.static(qa.shape[1] * w.n_latent):
        h = hc // w.n_latent
        acc = 0.0
        for b in range(ti.static(n_word // 4)):
            part = 0.0
            for k in ti.static(range(4)):
                at = h * (w.n_nope + w.n_rope) + (b * 4 + k) * WORD
                xv = ti.Vector([q[0, at + j] for j in ti.static(range(WORD))])
                part += dot_word(w.k_q[lay, hc, b * 4 + k], xv)
            acc += ti.cast(w.k_d[lay, hc, b], ti.f32) * part
        qa[0, h, hc - h * w.n_latent] = acc * scale


@ti.func
def _query_pe_block(tid, w: ti.template(), q: ti.template(), table: ti.template(), pos, scale, qa: ti.template()):
    """Turn the pe windows of all heads; zero the padding of the fused rows."""
    n_pair, n_heads = ti.static(table.shape[1], qa.shape[1])
    n_pad = ti.static(qa.shape[2] - w.n_latent - 2 * table.shape[1])
    for k in range(ti.static(cdiv(qa.shape[1] * table.shape[1], BLOCK))):
        e = k * BLOCK + tid
        if e < n_heads * n_pair:
            h = e // n_pair
            p = e - h * n_pair
            t = turned(q, 0, h * (w.n_nope + w.n_rope) + w.n_nope, p, table, pos, w.half_pairs) * scale
            i, j = w.n_latent + 2 * p, w.n_latent + 2 * p + 1
            if ti.static(w.half_pairs):
                i, j = w.n_latent + p, w.n_latent + p + n_pair
            qa[0, h, i] = t[0]
            qa[0, h, j] = t[1]
    if ti.static(n_pad > 0):
        for k in range(ti.static(cdiv(qa.shape[1] * n_pad, BLOCK))):
            e = k * BLOCK + tid
            if e < n_heads * n_pad:
                qa[0, e // n_pad, w.n_latent + 2 * n_pair + e % n_pad] = 0.0


@ti.func
def query_simt(
    w: ti.template(),
    layer: ti.template(),
    q: ti.template(),
    proj: ti.template(),
    table: ti.template(),
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
    next_layer: ti.template(),
):
    """Fused query rows and the cache row in one dispatch: absorb blocks, then one for the pe windows, one for the row.

    `next_layer` i32 [1] takes the layer's number, for the kernels that follow.
    """
    n_absorb = ti.static(
        cdiv(qa.shape[1] * w.n_latent, BLOCK) if w.split else qa.shape[1] * cdiv(w.k_q.shape[2], width())
    )
    ti.loop_config(block_dim=BLOCK)
    for i in range((n_absorb + 2) * BLOCK):
        part = ti.simt.block.SharedArray(ti.static(BLOCK // width() * WORD * (width() + 1)), ti.f32)
        tid, blk = i & (BLOCK - 1), i >> ti.static(log2(BLOCK))
        lay = layer[0] - w.first
        if blk < n_absorb:
            if ti.static(w.split):
                _absorb_split_block(blk, tid, w, lay, q, scale[pos[0]], qa)
            else:
                _absorb_unsplit_block(blk, tid, part, w, lay, q, scale[pos[0]], qa)
        elif blk == n_absorb:
            _query_pe_block(tid, w, q, table, pos[0], scale[pos[0]], qa)
        else:
            cache_row_block(
                tid,
                part,
                proj,
                0,
                w.row0,
                w.kv_a_norm,
                lay,
                w.eps,
                table,
                w.half_pairs,
                w.cache,
                pos[0],
                w.cache_f32,
                BLOCK,
            )
            if tid == 0:
                next_layer[0] = layer[0]


@ti.kernel
def _absorb_loop(
    w: ti.template(),
    layer: ti.template(),
    q: ti.template(),
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
):
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, ti.static(absorb_count(w, qa.shape[1])))
            absorb_part(span[0], span[1], w, layer, q, scale, pos, qa)


@ti.kernel
def _query_simt(
    w: ti.template(),
    layer: ti.template(),
    q: ti.template(),
    proj: ti.template(),
    table: ti.template(),
    scale: ti.template(),
    pos: ti.template(),
    qa: ti.template(),
    next_layer: ti.template(),
):
    query_simt(w, layer, q, proj, table, scale, pos, qa, next_layer)


def absorb(w, layer, q, scale, pos, qa):
    """CPU: write the latent part of the fused query rows, times the score scale.

    Parameters
    ----------
    w : AttentionBank
        ``k_q``, ``k_d`` Q8_0 fields: unsplit [L, H * (N + V), C], split [L, H * C, N]; the numbers ``split``,
        ``n_nope`` (N), ``n_rope`` (R), ``n_v`` (V), ``n_latent`` (C).
    layer, pos : ti.Field, i32 [1]
    q : ti.Field, f32 [1, H * (N + R)]
    scale : ti.Field, f32 [T]
        Score scale of every position (softmax scale times temperature).
    qa : ti.Field, f32 [1, H, >= C + R]
        ``qa[0, :, :C]`` is written.

    Notes
    -----
    Reference: :func:`absorb_ref`. Tests compare with expanded attention, which shares no algebra with it.
    """
    _absorb_loop(w, layer, q, scale, pos, qa)


def query(w, layer, q, proj, table, scale, pos, qa, next_layer):
    """Fused query rows ``[q' ; q_pe]`` and the finished cache row, on any backend (parameters: :func:`query_simt`)."""
    if runtime.caps().gpu:
        _query_simt(w, layer, q, proj, table, scale, pos, qa, next_layer)
    else:
        absorb(w, layer, q, scale, pos, qa)
        rope_query(q, w.n_nope, table, pos, w.half_pairs, scale, qa, w.n_latent)
        cache_row(
            proj, w.row0, w.kv_a_norm, layer, w.eps, table, w.half_pairs, w.cache, pos, f32=w.cache_f32, first=w.first
        )


def w_uk_ref(w_q, w_d, n_heads, n_nope, n_v, *, split):
    """The key half of ``kv_b`` from either layout -> float64 [H, N, C]."""
    w = dequantise_ref(w_q, w_d)
    if split:
        return w.reshape(n_heads, -1, n_nope).transpose(0, 2, 1)
    return w.reshape(n_heads, n_nope + n_v, -1)[:, :n_nope]


def absorb_ref(w_q, w_d, q, n_nope, n_v, scale, *, split):
    """NumPy reference for one layer: q [H, N + R] -> float64 [H, C + R], pe windows as they are."""
    q = q.astype(np.float64)
    w_uk = w_uk_ref(w_q, w_d, q.shape[0], n_nope, n_v, split=split)
    return scale * np.concatenate([np.einsum("hn,hnc->hc", q[:, :n_nope], w_uk), q[:, n_nope:]], axis=1)
