"""One layer, and what stands before and behind the layers: the stages in order, composed into kernels.

A layer is two kernels, MLA block and FFN: on CPU one loop over the threads each, which go through the stages of a list
(:func:`attention_works`, :func:`ffn_works`); on a GPU three to five dispatches each, and where kernels of several loops
compile badly (CUDA, :attr:`tmla.runtime.Caps.fuse`), one kernel a dispatch. No kernel
takes a number: position and layer stand in one-element fields that the kernels advance themselves, so that a launch
costs as little as Taichi allows. :mod:`tmla.layer_stages` launches every stage by itself.
"""

import taichi as ti

from tmla import runtime
from tmla.stages import (
    absorb,
    argmax,
    attention,
    attention_shape,
    attention_short,
    attention_tiles,
    cache_row,
    embed,
    ffn,
    ffn_warps,
    linear,
    norm,
    rope,
    router,
    v_combine,
)
from tmla.stages.threads import SPREAD, Work, clear, do_all, team


def attention_works(w, s) -> list[Work]:
    """The MLA block on CPU, stage by stage."""
    layer, n_heads = s.layer_attn, s.qa.shape[1]
    cache_row_args = (s.proj, w.row0, w.kv_a_norm, layer, w.first, w.eps, s.rope, w.half_pairs, w.cache, s.pos)
    works = [
        Work(1, norm.rms_norm_row, (s.x, 0, w.attn_norm, layer, w.first, w.eps, s.xn)),
        matvec_work(w.proj_q, w.proj_d, layer, w.first, s.xn, 1.0, False, s.proj),
        Work(1, cache_row.cache_row_one, cache_row_args),
    ]
    if w.has_q_lora:
        works += [
            Work(1, norm.rms_norm_row, (s.proj, 0, w.q_a_norm, layer, w.first, w.eps, s.q_low), early=True),
            matvec_work(w.q_b_q, w.q_b_d, layer, w.first, s.q_low, 1.0, False, s.q),
        ]
    rope_query = (s.q, w.n_nope, s.rope, s.pos, w.half_pairs, s.scale, s.qa, w.n_latent)
    return [
        *works,
        Work(n_heads, rope.rope_query_heads, rope_query, early=not w.has_q_lora),
        Work(absorb.absorb_count(w, n_heads), absorb.absorb_part, (w, layer, s.q, s.scale, s.pos, s.qa), early=True),
        Work(s.attn.part.shape[0], attention.attention_splits, (w, layer, s.pos, s.qa, s.attn)),
        Work(v_combine.join_count(s.attn), v_combine.join_splits_part, (s.pos, s.attn, s.mix)),
        Work(s.o.shape[1], v_combine.v_combine_part, (w, layer, s.mix, s.o)),
        matvec_work(w.attn_out_q, w.attn_out_d, layer, w.first, s.o, w.residual_scale, True, s.x),
    ]


def ffn_works(w, s) -> list[Work]:
    """The FFN on CPU, stage by stage."""
    layer, works = s.layer_ffn, []
    works.append(Work(1, norm.rms_norm_row, (s.x, 0, w.ffn_norm, layer, w.first, w.eps, s.xn)))
    if w.moe:
        works.append(Work(w.router.shape[1], router.router_logits_part, (w, layer, s.xn, s.route.logit)))
        works.append(Work(1, router.choose_row, (w, layer, s.route)))
    if w.common_ffn_dim > 0:
        works.append(Work(w.common_ffn_dim, ffn.common_up_part, (w, layer, s.xn, w.hidden), early=w.moe))
    if w.n_used > 0:
        works.append(Work(w.expert_ffn_dim, ffn.experts_up_part, (w, layer, s.xn, s.route, w.hidden)))
    works.append(Work(s.x.shape[1], ffn.down_part, (w, layer, s.route, w.hidden, s.x)))
    return works


def head_works(g, s) -> list[Work]:
    """Final norm and logits on CPU."""
    return [
        Work(1, norm.rms_norm_row, (s.x, 0, g.out_norm, s.layer_attn, 0, g.eps, s.xn)),
        matvec_work(g.head_q, g.head_d, s.layer_attn, 0, s.xn, g.logit_scale, False, s.logits),
    ]


def matvec_work(w_q, w_d, layer, first, x, scale, add, y) -> Work:
    """A matrix times a row, by rows."""
    return Work(w_d.shape[1], linear.matvec_rows, (w_q, w_d, layer, first, x, 0, scale, add, y))


@ti.kernel
def attention_cpu(w: ti.template(), s: ti.template()):
    """The MLA block: x += W_o attention(norm(x))."""
    s.layer_ffn[0] = s.layer_attn[0]
    clear(s.desk)
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            do_all(s.desk, ti.static(attention_works(w, s)))


@ti.kernel
def ffn_cpu(w: ti.template(), s: ti.template()):
    """x += FFN(norm(x)), dense or a mixture of experts."""
    s.layer_attn[0] = s.layer_ffn[0] + 1
    clear(s.desk)
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            do_all(s.desk, ti.static(ffn_works(w, s)))


ALL = -1  # every dispatch of a kernel that can also be compiled one dispatch at a time


@ti.kernel
def attention_gpu(w: ti.template(), s: ti.template(), short: ti.template(), only: ti.template()):
    """The MLA block in five dispatches (four when `short`; one more with q_lora), or one of them."""
    if ti.static(only in (ALL, 0)):
        linear.matvec_simt(
            w.proj_q,
            w.proj_d,
            s.layer_attn,
            w.first,
            s.x,
            0,
            w.attn_norm,
            w.eps,
            1.0,
            True,
            False,
            s.proj,
            w.proj_tiling,
        )
    if ti.static(w.has_q_lora and only in (ALL, 1)):
        linear.matvec_simt(
            w.q_b_q, w.q_b_d, s.layer_attn, w.first, s.proj, 0, w.q_a_norm, w.eps, 1.0, True, False, s.q, w.q_b_tiling
        )
    if ti.static(only in (ALL, 2)):
        absorb.query_simt(w, s.layer_attn, s.q, s.proj, s.rope, s.scale, s.pos, s.qa, s.layer_ffn)
    if ti.static(short and only in (ALL, 3)):
        attention_short.attention_short(w, s.layer_attn, s.pos, s.qa, s.o)
    if ti.static(not short and only in (ALL, 3)):
        attention_tiles.attention_tiles(w.tile, w, s.layer_attn, s.pos, s.qa, s.attn)
    if ti.static(not short and only in (ALL, 4)):
        v_combine.v_combine_simt(w.tile, w, s.layer_attn, s.pos, s.attn, s.o)
    if ti.static(only in (ALL, 5)):
        linear.matvec_simt(
            w.attn_out_q,
            w.attn_out_d,
            s.layer_attn,
            w.first,
            s.o,
            0,
            w.attn_norm,
            w.eps,
            w.residual_scale,
            False,
            True,
            s.x,
            w.out_tiling,
        )


def attention_dispatches(w, short: bool) -> list[int]:
    """Numbers of the dispatches that :func:`attention_gpu` has for a bank."""
    return [0] + [1] * w.has_q_lora + [2, 3] + [4] * (not short) + [5]


@ti.kernel
def ffn_gpu(w: ti.template(), s: ti.template(), only: ti.template()):
    """The FFN in two or three dispatches, or one of them: common part and router, experts, down with the residual."""
    if ti.static((w.moe or w.common_ffn_dim > 0) and only in (ALL, 0)):
        ffn_warps.ffn_common(w, s.layer_ffn, s.x, True, s.route, w.hidden, w.tiling)
    if ti.static(w.n_used > 0 and only in (ALL, 1)):
        ffn_warps.ffn_experts(w, s.layer_ffn, s.x, True, s.route, w.hidden, w.expert_tiling)
    if ti.static(only in (ALL, 2)):
        ffn_warps.ffn_down(w, s.layer_ffn, s.route, w.hidden, s.x, s.layer_attn, w.down_tiling)


def ffn_dispatches(w) -> list[int]:
    """Numbers of the dispatches that :func:`ffn_gpu` has for a bank."""
    return [0] + [1] * (w.n_used > 0) + [2]


@ti.kernel
def begin(g: ti.template(), s: ti.template(), token: ti.i32, pos: ti.i32):
    """Set the position and put the token's embedding into the residual."""
    s.pos[0] = pos
    s.layer_attn[0] = 0
    s.step[0] = 0
    embed.embed_body(g.embd_q, g.embd_d, token, g.embd_scale, s.x)


@ti.kernel
def head_cpu(g: ti.template(), s: ti.template()):
    """Final norm and logits."""
    s.layer_attn[0] = 0
    clear(s.desk)
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            do_all(s.desk, ti.static(head_works(g, s)))


@ti.kernel
def head_gpu(g: ti.template(), s: ti.template()):
    """Final norm and logits, in one dispatch; `zero` is a layer number that is always 0."""
    linear.matvec_simt(
        g.head_q, g.head_d, g.zero, 0, s.x, 0, g.out_norm, g.eps, g.logit_scale, True, False, s.logits, g.head_tiling
    )


@ti.kernel
def advance_cpu(g: ti.template(), s: ti.template()):
    """Choose greedily behind the last logits and begin the next token: nothing is read back."""
    argmax.argmax_loop(s.logits, s.n_choice, s.token)
    s.chosen[s.step[0]] = s.token[0]
    s.step[0] = s.step[0] + 1
    s.pos[0] = s.pos[0] + 1
    embed.embed_body(g.embd_q, g.embd_d, ti.min(s.token[0], s.n_choice - 1), g.embd_scale, s.x)


@ti.kernel
def advance_gpu(g: ti.template(), s: ti.template(), only: ti.template()):
    """As :func:`advance_cpu`, in two dispatches, or one of them."""
    if ti.static(only in (ALL, 0)):
        argmax.argmax_blocks(s.logits, s.n_choice, s.best, s.who)
    if ti.static(only in (ALL, 1)):
        argmax.next_token(g, s.n_choice, s.best, s.who, s.token, s.chosen, s.step, s.pos, s.layer_attn, s.x)


class Steps:
    """The kernels of one token, bound to a model's fields, ready to launch.

    Attributes
    ----------
    layers : list of list of Launch
        Launches of each layer, for contexts beyond ``attention_short.MAX_ROWS``.
    layers_short : list of list of Launch
        The same for shorter contexts (on CPU the same list).
    """

    def __init__(self, globals_, attention_banks, ffn_banks, state):
        self._g, self._s = globals_, state
        gpu = runtime.caps().gpu
        if gpu:
            _choose_tilings(globals_, attention_banks, ffn_banks, state)
        bank_of = {b.first + i: b for b in attention_banks for i in range(b.n)}
        ffn_of = {b.first + i: b for b in ffn_banks for i in range(b.n)}
        launches: dict = {}

        def bound(kernel, *args):
            key = (kernel, *(a if isinstance(a, int) else id(a) for a in args))
            if key not in launches:
                launches[key] = runtime.Launch(kernel, *args)
            return launches[key]

        def parts(numbers):
            return [ALL] if runtime.caps().fuse else numbers

        def layers(short):
            if not gpu:
                return [[bound(attention_cpu, bank_of[i], state), bound(ffn_cpu, ffn_of[i], state)] for i in bank_of]
            return [
                [
                    bound(attention_gpu, bank_of[i], state, short, p)
                    for p in parts(attention_dispatches(bank_of[i], short))
                ]
                + [bound(ffn_gpu, ffn_of[i], state, p) for p in parts(ffn_dispatches(ffn_of[i]))]
                for i in bank_of
            ]

        self.layers = layers(False)
        self.layers_short = layers(True) if gpu else self.layers
        self.head = bound(head_gpu if gpu else head_cpu, globals_, state)
        self._advance = (
            [bound(advance_gpu, globals_, state, p) for p in parts([0, 1])]
            if gpu
            else [bound(advance_cpu, globals_, state)]
        )
        self.max_short = attention_short.MAX_ROWS if gpu else 0

    def begin(self, token: int, pos: int) -> None:
        """Launch :func:`begin`."""
        begin(self._g, self._s, token, pos)
        runtime.counter.launches += 1

    def advance(self) -> None:
        """Choose greedily and begin the next token."""
        for launch in self._advance:
            launch()

    def run_layer(self, i: int, n_rows: int) -> None:
        """Launch layer `i`, which attends to `n_rows` cached rows."""
        for launch in (self.layers_short if n_rows <= self.max_short else self.layers)[i]:
            launch()

    def run_layers(self, n_rows: int) -> None:
        """Launch every layer."""
        for launches in self.layers_short if n_rows <= self.max_short else self.layers:
            for launch in launches:
                launch()


def _choose_tilings(globals_, attention_banks, ffn_banks, s) -> None:
    """Cut each matrix kernel's work: compile-time numbers of the banks."""
    for b in attention_banks:
        b.tile = attention_shape.tile()
        b.proj_tiling = linear.tiling(s.proj.shape[1], s.x.shape[1])
        b.out_tiling = linear.tiling(s.x.shape[1], s.o.shape[1])
        if b.has_q_lora:
            b.q_b_tiling = linear.tiling(s.q.shape[1], b.q_b_q.shape[2] * 8)
    for f in ffn_banks:
        f.tiling, f.expert_tiling = ffn_warps.common_tiling(), ffn_warps.expert_tiling()
        f.down_tiling = ffn_warps.down_tiling()
    globals_.head_tiling = linear.tiling(s.logits.shape[1], s.x.shape[1])
