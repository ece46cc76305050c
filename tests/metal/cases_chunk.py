"""Stages of a chunk of tokens that multiply by matrices, at odd shapes, against their NumPy references.

Rows of the chunk's buffers behind its last token are NaN where they are read, and must stay as they were where they are
written: each buffer has two rows more than the chunk has tokens.
"""

import functools
import itertools

import numpy as np
import taichi as ti

from tests.q8 import random_q8
from tmla.stages import ffn, ffn_rows, head_rows, matmul, route_rows, route_tiles, router
from tmla.stages.lanes import cdiv

from .case import Built, Expect, MetalCase
from .cases_matrix import GROUPS, NETWORK, routing
from .package import Fields, Record, close, only, start_taichi  # noqa: F401 (the export looks for the last)

SPARE = 2  # rows behind the chunk's last
UNTOUCHED = -7.0


def chunk(rng, n, width):
    """Activation rows f32 [n + SPARE, width]: NaN behind the chunk."""
    x = rng.standard_normal((n + SPARE, width), np.float32)
    x[n:] = np.nan
    return x


def target(field, n, width):
    """A field that takes rows of the chunk: NaN there, numbers behind that must stay."""
    y = np.full((n + SPARE, width), UNTOUCHED, np.float32)
    y[:n] = np.nan
    return field(y)


def rows_and_rest(ref):
    """What :func:`target` must hold, from the rows of the chunk."""
    rest = np.full((SPARE, *ref.shape[1:]), UNTOUCHED)
    return close(np.concatenate([ref, rest]))


def build_matmul(n_out, n_in, n):
    """A chunk by the matrix of layer 1, then a chunk of one token by that of layer 0, in the same buffers."""
    rng, field = np.random.default_rng(80), Fields()
    w_q, w_d = random_q8(rng, 2, n_out, n_in)
    w_d[1, n_out // 2, 0] = np.float16(3e-7)  # a subnormal scale is a number
    x = chunk(rng, n, n_in + 3)
    x[:, n_in:] = np.nan  # a buffer wider than the matrix
    w, f_x, y = field.q8(w_q, w_d), field(x), target(field, n, n_out)

    def call():
        matmul.matmul_q8(*w, 1, f_x, n, None, y, scale=0.5)
        matmul.matmul_q8(*w, 0, f_x, 1, None, y)

    ref = 0.5 * matmul.matmul_ref(w_q[1], w_d[1], x[:n, :n_in])
    ref[:1] = matmul.matmul_ref(w_q[0], w_d[0], x[:1, :n_in])
    return Built(call, field.inputs, {y: rows_and_rest(ref)})


def build_absorb(n, n_nope, n_latent, split):
    """Fused query rows; what stands behind C + R in a head's row is left as it is."""
    rng, field = np.random.default_rng(81), Fields()
    h, v, r = 3, 33, 18
    w_q, w_d = random_q8(rng, 2, *((h * n_latent, n_nope) if split else (h * (n_nope + v), n_latent)))
    k_q, k_d = field.q8(w_q, w_d)
    w = Record(k_q=k_q, k_d=k_d, split=split, n_heads=h, n_nope=n_nope, n_rope=r, n_v=v, n_latent=n_latent)
    q, width = chunk(rng, n, h * (n_nope + r)), cdiv(n_latent + r, 4) * 4
    qa = target(field, n, h * width)
    call = functools.partial(head_rows.absorb_rows, w, 1, field(q), n, None, qa)
    ref = head_rows.absorb_rows_ref(w_q[1], w_d[1], q[:n].reshape(n, h, -1), n_nope, v, split=split)
    fused = np.full((n + SPARE, h, width), UNTOUCHED)
    fused[:n, :, : n_latent + r] = ref
    known = only(fused.shape, slice(n, None)) | only(fused.shape, (slice(n), slice(None), slice(n_latent + r)))
    shape = (n + SPARE, h * width)
    return Built(call, field.inputs, {qa: close(fused.reshape(shape), where=known.reshape(shape))})


def build_values(n, n_latent, n_v, stride, offset):
    rng, field, h = np.random.default_rng(82), Fields(), 3
    w_q, w_d = random_q8(rng, 2, h * stride, n_latent)
    v_q, v_d = field.q8(w_q, w_d)
    w = Record(v_q=v_q, v_d=v_d, n_heads=h, n_v=n_v, n_latent=n_latent, v_stride=stride, v_offset=offset)
    mix, o = chunk(rng, n, h * n_latent), target(field, n, h * n_v)
    call = functools.partial(head_rows.value_rows, w, 1, field(mix), n, None, o)
    ref = head_rows.value_rows_ref(w_q[1], w_d[1], stride, offset, n_v, mix[:n].reshape(n, h, -1))
    return Built(call, field.inputs, {o: rows_and_rest(ref)})


def tiles_ref(start, n_tiles):
    """Tiles of the grouped pairs, in NumPy: expert (-1 where no tile is), first pair, end; i32 [n_tiles] each."""
    tiles = [
        (e, first, min(first + route_tiles.TILE_TOKENS, end))
        for e, (begin, end) in enumerate(itertools.pairwise(start))
        for first in range(begin, end, route_tiles.TILE_TOKENS)
    ]
    assert len(tiles) < n_tiles, "one tile at least should be empty"
    return np.array(tiles + [(-1, -1, -1)] * (n_tiles - len(tiles)), np.int32).T


def build_route(n_experts, n, dim, **changes):
    """Logits, choice and grouping; expert 1 is never chosen where there is a bias."""
    rng, field, choice = np.random.default_rng(83), Fields(), routing(**changes)
    matrix = rng.standard_normal((2, n_experts, dim), np.float32) / 4
    bias = rng.uniform(-0.5, 0.5, (2, n_experts)).astype(np.float32)
    bias[:, 1] = -10.0
    x, n_pairs, n_tiles = chunk(rng, n, dim), n * choice.n_used, cdiv(n * choice.n_used, 64) + n_experts
    bank = Record(router=field(matrix), routing=choice, n_used=choice.n_used)
    if choice.has_bias:
        bank.router_bias = field(bias)
    g = Record(
        logit=target(field, n, n_experts),
        weight=field.poisoned(n_pairs),
        start=field.poisoned(n_experts + 1, dtype=ti.i32),
        **{k: field.poisoned(n_pairs, dtype=ti.i32) for k in ("expert", "order", "place")},
        **{k: field.poisoned(n_tiles, dtype=ti.i32) for k in ("tile_expert", "tile_first", "tile_end")},
    )
    call = functools.partial(route_rows.route_rows, bank, 1, field(x), n, None, None, g)
    expert, weight = map(np.concatenate, zip(*(router.router_ref(matrix[1], bias[1], choice, row) for row in x[:n])))
    order, start = route_rows.group_ref(expert, n_experts)
    tiles = dict(zip((g.tile_expert, g.tile_first, g.tile_end), tiles_ref(start, n_tiles)))
    grouped = {g.expert: expert, g.order: order, g.place: np.argsort(order), g.start: start} | tiles
    expected = {key: Expect(array, 0, 0) for key, array in grouped.items()}
    logit = x[:n].astype(np.float64) @ matrix[1].T
    return Built(call, field.inputs, expected | {g.weight: close(weight), g.logit: rows_and_rest(logit)})


def build_ffn(n_experts, n_used, n, fe, fs, gated):
    """The network of a chunk whose pairs are grouped already; most go to expert 0 and none to expert 1."""
    rng, field, dim = np.random.default_rng(84), Fields(), 96
    w = Record(n_used=n_used, expert_ffn_dim=fe, common_ffn_dim=fs, gated=gated, residual_scale=0.5)
    arrays = {}
    shapes = {"gate_exps": (n_experts * fe, dim), "up_exps": (n_experts * fe, dim), "down_exps": (n_experts * dim, fe)}
    shapes |= {"gate": (fs, dim), "up": (fs, dim), "down": (dim, fs)}
    for name, shape in shapes.items():
        if 0 not in shape:
            arrays[name] = random_q8(rng, 2, *shape)
            for suffix, made in zip(("_q", "_d"), field.q8(*arrays[name])):
                setattr(w, name + suffix, made)
    if not gated:  # as a bank without gates has it
        w.gate_exps_q, w.gate_exps_d = w.up_exps_q, w.up_exps_d
    xn, n_pairs = chunk(rng, n, dim), n * n_used
    old = np.concatenate([rng.standard_normal((n, dim)), np.full((SPARE, dim), UNTOUCHED)]).astype(np.float32)
    x, out, g = field(old), np.zeros((n, dim)), Record()
    scratch = Record(common=field.poisoned(n + SPARE, max(1, fs)))
    if fs:
        out += [ffn.ffn_ref(*([a[1] for a in arrays[k]] for k in NETWORK), row, gated=gated) for row in xn[:n]]
    if n_experts:
        others = np.arange(n)[:, None] + np.arange(n_used - 1)
        expert = np.concatenate([np.zeros((n, 1), int), 2 + others % (n_experts - 2)], axis=1)
        weight = rng.uniform(0.1, 0.6, (n, n_used)).astype(np.float32)
        w.router = field(rng.standard_normal((2, n_experts, dim), np.float32))
        order, start = route_rows.group_ref(expert.reshape(-1), n_experts)
        tiles = tiles_ref(start, cdiv(n_pairs, 64) + n_experts)
        made = dict(order=order, place=np.argsort(order)) | dict(zip(("tile_expert", "tile_first", "tile_end"), tiles))
        vars(g).update({name: field(array.astype(np.int32)) for name, array in made.items()})
        g.weight = field(weight.reshape(-1))
        scratch.hidden, scratch.out = field.poisoned(n_pairs, fe), field.poisoned(n_pairs, dim)
        per_expert = [[a[1].reshape(n_experts, -1, a.shape[-1]) for a in arrays[k + "_exps"]] for k in NETWORK]
        for t, k in np.ndindex(n, n_used):
            parts = [[a[expert[t, k]] for a in matrix] for matrix in per_expert]
            out[t] += weight[t, k] * ffn.ffn_ref(*parts, xn[t], gated=gated)
    call = functools.partial(ffn_rows.ffn_rows, w, 1, field(xn), n, g, scratch, x)
    return Built(call, field.inputs, {x: rows_and_rest(old[:n] + 0.5 * out)})


CASES = [
    MetalCase("chunk_matmul", lambda: build_matmul(129, 96, 70)),
    MetalCase("chunk_absorb_unsplit", lambda: build_absorb(65, 50, 160, False)),
    MetalCase("chunk_absorb_split", lambda: build_absorb(2, 96, 96, True)),
    MetalCase("chunk_values", lambda: build_values(63, 160, 33, 83, 50)),
    MetalCase("chunk_route_2_tiles", lambda: build_route(5, 129, 32, n_used=2, normalise=True, has_bias=True)),
    MetalCase("chunk_route_groups", lambda: build_route(16, 65, 45, **GROUPS)),
    MetalCase("chunk_route_8_of_260", lambda: build_route(260, 3, 33, n_used=8)),
    MetalCase("chunk_ffn_mixture", lambda: build_ffn(5, 3, 65, 32, 96, True)),
    MetalCase("chunk_ffn_routed_relu2", lambda: build_ffn(4, 2, 2, 96, 0, False)),
]
