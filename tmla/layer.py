"""One layer: the stages in order, composed twice from the same bodies.

:func:`layer_fused` is one kernel, one Python launch a layer. :func:`layer_stages` launches every stage by itself, for
those who want to look at what lies between, and for the tests that compare the two.
"""

import taichi as ti

from tmla.stages import absorb, argmax, attention, ffn, linear, norm, rope, router, v_combine
from tmla.stages.embed import embed_body


@ti.func
def attention_block(w: ti.template(), s: ti.template(), layer):
    """The MLA block: x += W_o attention(norm(x))."""
    norm.rms_norm_body(s.x, w.attn_norm, layer, w.eps, s.xn)
    if ti.static(w.has_q_lora):
        linear.matvec_q8_body(w.q_a_q, w.q_a_d, layer, s.xn, s.q_low)
        norm.rms_norm_body(s.q_low, w.q_a_norm, layer, w.eps, s.q_low_n)
        linear.matvec_q8_heads_body(w.q_q, w.q_d, layer, s.q_low_n, s.q)
    else:
        linear.matvec_q8_heads_body(w.q_q, w.q_d, layer, s.xn, s.q)
    rope.rope_heads_body(s.q, w.n_nope, s.rope, s.pos, w.half_pairs)
    linear.matvec_q8_heads_body(w.kv_a_q, w.kv_a_d, layer, s.xn, s.row)
    norm.latent_norm_body(s.row, w.kv_a_norm, layer, w.eps, w.cache, s.pos)
    rope.rope_cache_body(s.row, w.cache, layer, w.n_latent, s.rope, s.pos, w.half_pairs)
    if ti.static(w.split):
        absorb.absorb_split_body(w.k_q, w.k_d, layer, s.q, w.n_latent, s.scale, s.pos, s.qa)
    else:
        absorb.absorb_unsplit_body(w.k_q, w.k_d, layer, s.q, w.n_nope, w.n_v, s.scale, s.pos, s.qa)
    absorb.absorb_pe_body(s.q, w.n_nope, w.n_latent, s.scale, s.pos, s.qa)
    attention.attention_body(
        w.cache, layer, s.pos, s.qa, s.attn.scores, s.attn.part_m, s.attn.part_l, s.attn.part_r, s.attn.part
    )
    v_combine.join_splits_body(s.pos, s.attn.part_m, s.attn.part_l, s.attn.part, s.mix)
    v_combine.v_combine_body(w.v_q, w.v_d, layer, w.v_stride, w.v_offset, s.mix, s.o)
    linear.matvec_q8_add_body(w.attn_out_q, w.attn_out_d, layer, w.residual_scale, s.o, s.x)


@ti.func
def ffn_block(w: ti.template(), s: ti.template(), layer):
    """x += FFN(norm(x)), dense or a mixture of experts."""
    norm.rms_norm_body(s.x, w.ffn_norm, layer, w.eps, s.xn)
    if ti.static(w.moe):
        router.router_body(w, layer, s.xn, s.route)
    ffn.ffn_up_body(w, layer, s.xn, s.route.expert, s.route.weight, s.hidden)
    ffn.ffn_down_body(w, layer, w.residual_scale, s.route.expert, s.hidden, s.x)


@ti.kernel
def layer_fused(w: ti.template(), s: ti.template(), layer: ti.i32):
    attention_block(w, s, layer)
    ffn_block(w, s, layer)


@ti.kernel
def begin(g: ti.template(), s: ti.template(), token: ti.i32, pos: ti.i32):
    """Set the position and put the token's embedding into the residual."""
    s.pos[0] = pos
    embed_body(g.embd_q, g.embd_d, token, g.embd_scale, s.x)


@ti.kernel
def begin_next(g: ti.template(), s: ti.template(), keep: ti.i32):
    """As :func:`begin`, for the greedy choice behind the last logits; the id is kept in ``s.chosen[keep]``."""
    argmax.argmax_body(s.logits, s.n_choice, s.token)
    s.chosen[keep] = s.token[0]
    s.pos[0] = s.pos[0] + 1
    embed_body(g.embd_q, g.embd_d, s.token[0], g.embd_scale, s.x)


@ti.kernel
def choose(s: ti.template(), keep: ti.i32):
    """Greedy choice alone: the last of a run of tokens is chosen and not decoded."""
    argmax.argmax_body(s.logits, s.n_choice, s.token)
    s.chosen[keep] = s.token[0]


@ti.kernel
def head(g: ti.template(), s: ti.template()):
    """Final norm and logits."""
    norm.rms_norm_body(s.x, g.out_norm, 0, g.eps, s.xn)
    for o in range(s.logits.shape[1]):
        s.logits[0, o] = g.logit_scale * linear.row_dot_q8(g.head_q, g.head_d, 0, o, s.xn, 0, 0, g.head_d.shape[2])


def layer_stages(w, s, layer):
    """The same layer, one kernel per stage."""
    norm.rms_norm(s.x, w.attn_norm, layer, w.eps, s.xn)
    if w.has_q_lora:
        linear.matvec_q8(w.q_a_q, w.q_a_d, layer, s.xn, s.q_low)
        norm.rms_norm(s.q_low, w.q_a_norm, layer, w.eps, s.q_low_n)
        linear.matvec_q8_heads(w.q_q, w.q_d, layer, s.q_low_n, s.q)
    else:
        linear.matvec_q8_heads(w.q_q, w.q_d, layer, s.xn, s.q)
    rope.rope_heads(s.q, w.n_nope, s.rope, s.pos, w.half_pairs)
    linear.matvec_q8_heads(w.kv_a_q, w.kv_a_d, layer, s.xn, s.row)
    norm.latent_norm(s.row, w.kv_a_norm, layer, w.eps, w.cache, s.pos)
    rope.rope_cache(s.row, w.cache, layer, w.n_latent, s.rope, s.pos, w.half_pairs)
    absorb.absorb(w.k_q, w.k_d, layer, s.q, w.n_nope, w.n_v, s.scale, s.pos, s.qa, split=w.split)
    attention.attention(w.cache, layer, s.pos, s.qa, s.attn)
    v_combine.join_splits(s.pos, s.attn, s.mix)
    v_combine.v_combine(w.v_q, w.v_d, layer, w.v_stride, w.v_offset, s.mix, s.o)
    linear.matvec_q8_add(w.attn_out_q, w.attn_out_d, layer, w.residual_scale, s.o, s.x)
    norm.rms_norm(s.x, w.ffn_norm, layer, w.eps, s.xn)
    if w.moe:
        router.router(w, layer, s.xn, s.route)
    ffn.ffn_up(w, layer, s.xn, s.route, s.hidden)
    ffn.ffn_down(w, layer, w.residual_scale, s.route, s.hidden, s.x)
