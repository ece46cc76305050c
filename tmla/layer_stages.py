"""One layer by single stages, each a kernel of its own: for those who look at what lies between, or time or compare it.

:mod:`tmla.layer` composes the same stages into the kernels that decoding runs.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tmla import runtime
from tmla.stages import absorb, attention_tiles, ffn_warps, linear, norm, router, v_combine


def single_stages(a: Any, f: Any, s: Any, layer: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every stage of a layer in order, a kernel of its own each: its name, and what launches it.

    Each must be launched before the next is taken: the number in ``s.layer_attn`` or ``s.layer_ffn`` is the layer's for
    some, its place in the bank's fields for others.
    """
    s.layer_attn[0] = layer - a.first
    if runtime.caps().gpu:
        launch = partial(linear.norm_matvec_q8, a.proj_q, a.proj_d, s.layer_attn, s.x, a.attn_norm, a.eps, s.proj)
        yield "norm, q and kv_a projections", launch
    else:
        yield "norm before attention", partial(norm.rms_norm, s.x, a.attn_norm, s.layer_attn, a.eps, s.xn)
        yield "q and kv_a projections", partial(linear.matvec_q8, a.proj_q, a.proj_d, s.layer_attn, s.xn, s.proj)
    if a.has_q_lora:
        launch = partial(norm.rms_norm, s.proj, a.q_a_norm, s.layer_attn, a.eps, s.q_low)
        yield "norm of the low-rank query", launch
        yield "q_b projection", partial(linear.matvec_q8, a.q_b_q, a.q_b_d, s.layer_attn, s.q_low, s.q)
    s.layer_attn[0] = layer
    launch = partial(absorb.query, a, s.layer_attn, s.q, s.proj, s.rope, s.scale, s.pos, s.qa, s.layer_ffn)
    yield "ropes, cache row, absorb", launch
    yield "attention over the rows", partial(attention_tiles.attend, a, s.layer_attn, s.pos, s.qa, s.attn)
    yield "join, v-combine", partial(v_combine.v_combine, a, s.layer_attn, s.pos, s.attn, s.mix, s.o)
    s.layer_attn[0] = layer - a.first
    launch = partial(linear.matvec_q8, a.attn_out_q, a.attn_out_d, s.layer_attn, s.o, s.x)
    yield "output projection", partial(launch, scale=a.residual_scale, add=True)
    s.layer_ffn[0] = layer - f.first
    yield "norm before FFN", partial(norm.rms_norm, s.x, f.ffn_norm, s.layer_ffn, f.eps, s.xn)
    s.layer_ffn[0] = layer
    if f.moe:
        yield "router", partial(router.router, f, s.layer_ffn, s.xn, s.route)
    launch = partial(ffn_warps.ffn, f, s.layer_ffn, s.xn, s.route, f.hidden, s.x, s.layer_attn)
    yield "FFN, mixture" if f.moe else "FFN, dense", launch
    s.layer_attn[0] = layer + 1


def layer_stages(a: Any, f: Any, s: Any) -> None:
    """The layer of ``s.layer_attn[0]`` by single stages (:func:`single_stages`); then the next layer's turn."""
    for _, launch in single_stages(a, f, s, int(s.layer_attn[0])):
        launch()
