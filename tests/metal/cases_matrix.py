"""Stages that multiply by Q8_0 matrices, at odd shapes, against their NumPy references."""

import functools

import numpy as np
import taichi as ti

from tests.q8 import random_q8
from tmla.stages import absorb, embed, ffn, ffn_warps, linear, router
from tmla.stages.cache_row import cache_row_ref
from tmla.stages.norm import rms_norm_ref
from tmla.stages.rope import rope_ref
from tmla.upload import Writer

from .case import Built, Expect, MetalCase
from .package import Fields, Record, close, only, rope_table, start_taichi  # noqa: F401 (the export looks for the last)


def build_matvec(n_out, n_in, add):
    rng, field = np.random.default_rng(20), Fields()
    w_q, w_d = random_q8(rng, 2, n_out, n_in)
    w_d[1, n_out // 2, 0] = np.float16(3e-7)  # a subnormal scale is a number
    x, old = rng.standard_normal((1, n_in), np.float32), rng.standard_normal((1, n_out), np.float32)
    y = field(old) if add else field.poisoned(1, n_out)
    w, layer, f_x = field.q8(w_q, w_d), field.number(1), field(x)
    call = functools.partial(linear.matvec_q8, *w, layer, f_x, y, scale=0.5, add=add)
    return Built(call, field.inputs, {y: close(old * add + 0.5 * linear.matvec_q8_ref(w_q[1], w_d[1], x[0]))})


def build_norm_matvec():
    rng, field = np.random.default_rng(21), Fields()
    w_q, w_d = random_q8(rng, 2, 37, 96)
    x, gain = 3 * rng.standard_normal((1, 96), np.float32), rng.uniform(0.5, 1.5, (2, 96)).astype(np.float32)
    w, layer, y = field.q8(w_q, w_d), field.number(1), field.poisoned(1, 37)
    call = functools.partial(linear.norm_matvec_q8, *w, layer, field(x), field(gain), 1e-5, y)
    ref = linear.matvec_q8_ref(w_q[1], w_d[1], rms_norm_ref(x[0], gain[1], 1e-5))
    return Built(call, field.inputs, {y: close(ref[None])})


def build_embed():
    rng, field = np.random.default_rng(22), Fields()
    w_q, w_d = random_q8(rng, 1, 127, 96)
    w, x = field.q8(w_q, w_d), field.poisoned(1, 96)
    call = functools.partial(embed.embed, *w, 126, 3.0, x)
    return Built(call, field.inputs, {x: close(embed.embed_ref(w_q[0], w_d[0], 126, 3.0)[None])})


def build_query(split, half, dtype):
    """Fused query rows, and the cache row of the position, from one dispatch."""
    rng, field = np.random.default_rng(24), Fields()
    h, n, v, c, r, pos, n_ctx = 3, 64, 96, 96, 18, 5, 7
    w_q, w_d = random_q8(rng, 2, *((h * c, n) if split else (h * (n + v), c)))
    k_q, k_d = field.q8(w_q, w_d)
    proj = rng.standard_normal((1, h * (n + r) + c + r), np.float32)
    gain, scale = rng.uniform(0.5, 1.5, (2, c)).astype(np.float32), rng.uniform(0.05, 0.2, n_ctx).astype(np.float32)
    table, width = rope_table(n_ctx, r), -(-(c + r) // 4) * 4
    cache = field.poisoned(2, n_ctx, width * dtype().itemsize // 8, dtype=ti.u64)
    w = Record(k_q=k_q, k_d=k_d, kv_a_norm=field(gain), cache=cache, cache_f32=dtype == np.float32, first=1, eps=1e-6)
    vars(w).update(
        split=split, n_nope=n, n_rope=r, n_v=v, n_latent=c, half_pairs=half, row0=h * (n + r), row_width=c + r
    )
    layer, following, f_proj = field.number(2), field.poisoned(1, dtype=ti.i32), field(proj)
    qa = field.poisoned(1, h, width)
    tables = field(table), field(scale), field.number(pos)
    call = functools.partial(absorb.query, w, layer, f_proj, f_proj, *tables, qa, following)
    q = proj[0, : h * (n + r)].reshape(h, n + r)
    fused = np.zeros((1, h, width))
    fused[0, :, : c + r] = absorb.absorb_ref(w_q[1], w_d[1], q, n, v, scale[pos], split=split)
    fused[0, :, c : c + r] = scale[pos] * rope_ref(q[:, n:], table[pos], half)
    row = np.zeros((2, n_ctx, width))
    row[1, pos, : c + r] = cache_row_ref(proj[0, h * (n + r) :], gain[1], 1e-6, table[pos], half)
    written = only(row.shape, (1, pos))
    expected = {
        qa: close(fused),
        cache: Expect(row, 1e-3 if dtype == np.float16 else 1e-5, 1e-5, written, dtype),
        following: Expect(np.array([2]), 0, 0),
    }
    return Built(call, field.inputs, expected)


def build_ffn(n_experts, n_used, fe, fs, gated):
    rng, field, dim = np.random.default_rng(26), Fields(), 96
    segment = ffn_warps.segment_size(n_used, fe, fs)
    w = Record(n_used=n_used, expert_ffn_dim=fe, common_ffn_dim=fs, gated=gated, moe=n_experts > 0, first=0, eps=1e-6)
    vars(w).update(segment=segment, n_segments=n_used + -(-fs // segment), residual_scale=0.5)
    arrays = {}
    shapes = {"gate_exps": (n_experts * fe, dim), "up_exps": (n_experts * fe, dim), "down_exps": (n_experts * dim, fe)}
    shapes |= {"gate": (fs, dim), "up": (fs, dim), "down": (dim, fs)}
    for name, shape in shapes.items():
        if 0 not in shape:
            arrays[name] = random_q8(rng, 2, *shape)
            for suffix, made in zip(("_q", "_d"), field.q8(*arrays[name])):
                setattr(w, name + suffix, made)
    if not gated:  # as a bank without gates has it
        w.gate_q, w.gate_d = w.up_q, w.up_d
    w_router = rng.standard_normal((2, max(1, n_experts), dim), np.float32) / 4
    w.router = field(w_router)
    w.ffn_norm = field(np.full((2, dim), np.nan, np.float32))  # the row is normalised already
    w.routing = routing(n_used=n_used)
    scratch = Record(
        logit=field.poisoned(1, max(1, n_experts)),
        expert=field.poisoned(1, max(1, n_used), dtype=ti.i32),
        weight=field.poisoned(1, max(1, n_used)),
    )
    xn, old = 3.0 * rng.standard_normal((1, dim), np.float32), rng.standard_normal((1, dim), np.float32)
    hidden, x = field.poisoned(w.n_segments, ffn_warps.segment_len(segment)), field(old)
    following = field.poisoned(1, dtype=ti.i32)
    call = functools.partial(ffn_warps.ffn, w, field.number(1), field(xn), scratch, hidden, x, following)
    out, expected = np.zeros(dim), {following: Expect(np.array([2]), 0, 0)}
    if n_experts:
        chosen, share = router.router_ref(w_router[1], None, w.routing, xn[0])
        expected |= {scratch.expert: Expect(chosen[None], 0, 0), scratch.weight: close(share[None])}
        for e, p in zip(chosen, share):
            parts = [[a[1].reshape(n_experts, -1, a.shape[-1])[e] for a in arrays[k + "_exps"]] for k in NETWORK]
            out += p * ffn.ffn_ref(*parts, xn[0], gated=gated)
    if fs:
        out += ffn.ffn_ref(*([a[1] for a in arrays[k]] for k in NETWORK), xn[0], gated=gated)
    return Built(call, field.inputs, expected | {x: close(old + 0.5 * out)})


def build_router(n_experts, **changes):
    rng, field, choice = np.random.default_rng(34), Fields(), routing(**changes)
    w = rng.standard_normal((2, n_experts, 64), np.float32) / 4
    bias = rng.uniform(-0.5, 0.5, (2, n_experts)).astype(np.float32)
    x = rng.standard_normal((1, 64), np.float32)
    bank = Record(router=field(w), routing=choice, first=0)
    if choice.has_bias:
        bank.router_bias = field(bias)
    scratch = Record(
        logit=field.poisoned(1, n_experts),
        expert=field.poisoned(1, choice.n_used, dtype=ti.i32),
        weight=field.poisoned(1, choice.n_used),
    )
    call = functools.partial(router.router, bank, field.number(1), field(x), scratch)
    expert, weight = router.router_ref(w[1], bias[1], choice, x[0])
    return Built(call, field.inputs, {scratch.expert: Expect(expert[None], 0, 0), scratch.weight: close(weight[None])})


def routing(**changes):
    plain = dict(n_used=3, sigmoid=False, n_groups=1, n_groups_used=1, normalise=False, scale=1.0, has_bias=False)
    return router.Routing(**(plain | changes), min_sum=1e-20)


def build_put():
    """The upload of a matrix: host blocks into words, in a stack whose other layer is not touched."""
    rng, field = np.random.default_rng(27), Fields()
    w_q, w_d = random_q8(rng, 5, 96)
    blocks = np.empty((5, 3, 34), np.uint8)
    blocks[..., :2], blocks[..., 2:] = w_d[..., None].view(np.uint8), w_q.reshape(5, 3, 32)
    f_q, f_d = field.poisoned(2, 7, 12, dtype=ti.u64), field.poisoned(2, 7, 3, dtype=ti.f16)
    quants, scales = np.zeros((2, 7, 96)), np.zeros((2, 7, 3))
    quants[1, 1:6], scales[1, 1:6] = w_q.view(np.int8), w_d
    written = (1, slice(1, 6))
    expected = {
        f_q: Expect(quants, 0, 0, only(quants.shape, written), np.int8),
        f_d: Expect(scales, 0, 0, only(scales.shape, written)),
    }
    return Built(lambda: Writer([]).put_q8(blocks, f_q, f_d, 1, 1), field.inputs, expected)


NETWORK = ("gate", "up", "down")
GROUPS = dict(sigmoid=True, normalise=True, has_bias=True, n_groups=4, n_groups_used=2, n_used=4, scale=2.5)
CASES = [
    MetalCase("matvec_q8", lambda: build_matvec(37, 96, False)),
    MetalCase("matvec_q8_long_rows_add", lambda: build_matvec(5, 2080, True)),
    MetalCase("norm_matvec_q8", build_norm_matvec),
    MetalCase("embed", build_embed),
    MetalCase("query_unsplit_f16", lambda: build_query(False, False, np.float16)),
    MetalCase("query_split_half_f32", lambda: build_query(True, True, np.float32)),
    MetalCase("ffn_mixture", lambda: build_ffn(7, 3, 32, 96, True)),
    MetalCase("ffn_routed_only", lambda: build_ffn(5, 2, 64, 0, True)),
    MetalCase("ffn_dense_relu2", lambda: build_ffn(0, 0, 0, 96, False)),
    MetalCase("router_softmax", lambda: build_router(7)),
    MetalCase("router_softmax_normalised", lambda: build_router(7, normalise=True, scale=16.0)),
    MetalCase("router_groups", lambda: build_router(16, **GROUPS)),
    MetalCase("router_16_of_96", lambda: build_router(96, n_used=16, sigmoid=True, normalise=True, has_bias=True)),
    MetalCase("put_q8", build_put),
]
