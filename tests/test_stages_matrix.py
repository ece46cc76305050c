"""Stages that multiply by Q8_0 matrices: projections, kv_a, absorb, v-combine, FFN, embedding."""

import types

import numpy as np
import pytest
import taichi as ti

from tests.q8 import close, q8_fields, random_q8
from tmla.stages import absorb, embed, ffn, linear, router, v_combine
from tmla.stages.absorb import w_uk_ref


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 32), (7, 96), (127, 64), (65, 1024), (40, 2080)])
def test_matvec_q8(field, rng, n_out, n_in):
    w_q, w_d = random_q8(rng, 2, n_out, n_in)
    x, y = rng.standard_normal((1, n_in), np.float32), field.poisoned(1, n_out)
    linear.matvec_q8(*q8_fields(field, w_q, w_d), 1, field(x), y)
    close(y.to_numpy()[0], linear.matvec_q8_ref(w_q[1], w_d[1], x[0]))


def test_matvec_q8_heads_and_add(field, rng):
    w_q, w_d = random_q8(rng, 3, 15, 64)
    x, w = rng.standard_normal((1, 64), np.float32), q8_fields(field, w_q, w_d)
    ref = linear.matvec_q8_ref(w_q[2], w_d[2], x[0])
    heads = field.poisoned(1, 3, 5)
    linear.matvec_q8_heads(*w, 2, field(x), heads)
    close(heads.to_numpy()[0], ref.reshape(3, 5))
    old = rng.standard_normal((1, 15), np.float32)
    y = field(old)
    linear.matvec_q8_add(*w, 2, 0.5, field(x), y)
    close(y.to_numpy()[0], old[0] + 0.5 * ref)


def test_extreme_quants_and_subnormal_scales(field):
    """-128, 127, and scales below f16's normal range (6.1e-5) are values like any other."""
    w_q = np.array([[[-128, 127, 1, -1] * 8]], np.int8).view(np.uint8)
    w_d = np.array([[[2.0**-24]]], np.float16)  # the smallest f16
    x, y = np.zeros((1, 32), np.float32), field.poisoned(1, 1)
    x[0, :4] = [2.0**24, 0.0, 0.0, 2.0**24]
    linear.matvec_q8(*q8_fields(field, w_q, w_d), 0, field(x), y)
    assert y.to_numpy()[0, 0] == -129.0


@pytest.mark.parametrize(("n_vocab", "dim"), [(1, 32), (127, 96)])
def test_embed(field, rng, n_vocab, dim):
    w_q, w_d = random_q8(rng, 1, n_vocab, dim)
    x = field.poisoned(1, dim)
    embed.embed(*q8_fields(field, w_q, w_d), n_vocab - 1, 3.0, x)
    close(x.to_numpy()[0], embed.embed_ref(w_q[0], w_d[0], n_vocab - 1, 3.0))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("h", "n", "v", "c", "r"), [(1, 32, 32, 32, 16), (3, 64, 96, 32, 32), (5, 96, 32, 160, 64)])
def test_absorb_gives_the_scores_of_expanded_attention(field, rng, split, h, n, v, c, r):
    """q . k with expanded keys k = [w_uk c_kv ; k_pe] in float64: another algebra than the kernel's."""
    shape = (2, h * c, n) if split else (2, h * (n + v), c)
    w_q, w_d = random_q8(rng, *shape)
    q, row = rng.standard_normal((1, h, n + r), np.float32), rng.standard_normal(c + r)
    scale, pos = rng.uniform(0.05, 0.2, 8).astype(np.float32), field(np.array([5], np.int32))
    qa = field.poisoned(1, h, c + r)
    absorb.absorb(*q8_fields(field, w_q, w_d), 1, field(q), n, v, field(scale), pos, qa, split=split)
    got = qa.to_numpy()[0]
    close(got, absorb.absorb_ref(w_q[1], w_d[1], q[0], n, v, scale[5], split=split))
    k_nope = w_uk_ref(w_q[1], w_d[1], h, n, v, split=split) @ row[:c]  # [H, N]
    expanded = scale[5] * (np.einsum("hn,hn->h", q[0, :, :n].astype(np.float64), k_nope) + q[0, :, n:] @ row[c:])
    close(got @ row, expanded)


@pytest.mark.parametrize(
    ("h", "v", "c", "stride", "offset"), [(1, 32, 32, 32, 0), (3, 96, 64, 160, 64), (5, 33, 32, 65, 32)]
)
def test_v_combine(field, rng, h, v, c, stride, offset):
    w_q, w_d = random_q8(rng, 2, h * stride, c)
    mix, o = rng.standard_normal((h, c), np.float32), field.poisoned(1, h * v)
    v_combine.v_combine(*q8_fields(field, w_q, w_d), 1, stride, offset, field(mix), o)
    close(o.to_numpy()[0], v_combine.v_combine_ref(w_q[1], w_d[1], stride, offset, v, mix))


def ffn_case(field, rng, *, n_experts, n_used, fe, fs, dim, gated):
    """Weights of one FFN as the stage wants them, and the same as arrays."""
    w = types.SimpleNamespace(n_used=n_used, expert_ffn_dim=fe, common_ffn_dim=fs, gated=gated)
    w._data_oriented = True
    arrays = {}
    shapes = {"gate_exps": (n_experts * fe, dim), "up_exps": (n_experts * fe, dim), "down_exps": (n_experts * dim, fe)}
    shapes |= {"gate": (fs, dim), "up": (fs, dim), "down": (dim, fs)}
    for name, shape in shapes.items():
        if 0 not in shape:
            arrays[name] = random_q8(rng, 2, *shape)
            q, d = q8_fields(field, *arrays[name])
            setattr(w, name + "_q", q)
            setattr(w, name + "_d", d)
    return w, arrays


class FFNWeights(types.SimpleNamespace):
    """Fields and numbers, as a kernel argument."""

    _data_oriented = True
    __hash__ = object.__hash__


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("n_experts", "n_used", "fe", "fs"), [(7, 3, 32, 96), (5, 5, 64, 0), (0, 0, 0, 96), (2, 1, 96, 32)]
)
def test_ffn(field, rng, n_experts, n_used, fe, fs, gated):
    dim = 64
    w, arrays = ffn_case(field, rng, n_experts=n_experts, n_used=n_used, fe=fe, fs=fs, dim=dim, gated=gated)
    w = FFNWeights(**vars(w))
    chosen = rng.permutation(n_experts)[:n_used].astype(np.int32)
    weight = rng.uniform(0.1, 1.0, n_used).astype(np.float32)
    route = types.SimpleNamespace(
        expert=field(chosen[None] if n_used else np.zeros((1, 1), np.int32)),
        weight=field(weight[None] if n_used else np.zeros((1, 1), np.float32)),
    )
    xn, x0 = 3.0 * rng.standard_normal((1, dim), np.float32), rng.standard_normal((1, dim), np.float32)
    hidden, x = field.poisoned(1, n_used * fe + fs), field(x0)
    ffn.ffn_up(w, 1, field(xn), route, hidden)
    ffn.ffn_down(w, 1, 0.5, route, hidden, x)
    parts, out = [], np.zeros(dim)
    for e, p in zip(chosen, weight):
        gate, up, down = (
            [a[1].reshape(n_experts, -1, a.shape[-1])[e] for a in arrays[k]]
            for k in ("gate_exps", "up_exps", "down_exps")
        )
        act = p * ffn.ffn_up_ref(gate, up, xn[0], gated=gated)
        parts.append(act)
        out += linear.dequantise_ref(*down) @ act
    if fs:
        gate, up, down = ([a[1] for a in arrays[k]] for k in ("gate", "up", "down"))
        act = ffn.ffn_up_ref(gate, up, xn[0], gated=gated)
        parts.append(act)
        out += linear.dequantise_ref(*down) @ act
    close(hidden.to_numpy()[0], np.concatenate(parts))
    close(x.to_numpy()[0], x0[0] + 0.5 * out)


def test_ffn_intermediates_beyond_f16(field, rng):
    """Activations of 1e5 and more stay finite and right: nothing between the stages is f16."""
    w, arrays = ffn_case(field, rng, n_experts=0, n_used=0, fe=0, fs=64, dim=32, gated=True)
    w = FFNWeights(**vars(w))
    route = types.SimpleNamespace(expert=field(np.zeros((1, 1), np.int32)), weight=field(np.zeros((1, 1), np.float32)))
    xn, hidden = 1e3 * rng.standard_normal((1, 32), np.float32), field.poisoned(1, 64)
    ffn.ffn_up(w, 1, field(xn), route, hidden)
    ref = ffn.ffn_up_ref([a[1] for a in arrays["gate"]], [a[1] for a in arrays["up"]], xn[0], gated=True)
    assert np.abs(ref).max() > 1e5
    np.testing.assert_allclose(hidden.to_numpy()[0], ref, rtol=1e-4, atol=1.0)


def routing_case(**changes):
    base = dict(
        n_used=3, sigmoid=False, n_groups=1, n_groups_used=1, normalise=False, scale=1.0, has_bias=False, min_sum=1e-20
    )
    return router.Routing(**(base | changes))


ROUTINGS = {
    "softmax": (8, routing_case()),
    "one_of_one": (1, routing_case(n_used=1)),
    "all_of_seven": (7, routing_case(n_used=7, normalise=True)),
    "sigmoid_bias": (12, routing_case(sigmoid=True, normalise=True, scale=2.5, has_bias=True)),
    "groups": (16, routing_case(sigmoid=True, normalise=True, has_bias=True, n_groups=4, n_groups_used=2, n_used=4)),
    "softmax_groups": (15, routing_case(n_groups=5, n_groups_used=3, n_used=6, scale=16.0)),
    "k16_of_384": (384, routing_case(n_used=16, sigmoid=True, normalise=True, has_bias=True)),
}


def run_router(field, w, bias, routing, x):
    e = w.shape[1]
    weights = FFNWeights(router=field(w), routing=routing)
    if routing.has_bias:
        weights.router_bias = field(bias)
    r = FFNWeights(
        score=field.poisoned(1, e),
        select=field.poisoned(1, e),
        group=field.poisoned(1, routing.n_groups),
        expert=field.poisoned(1, routing.n_used, dtype=ti.i32),
        weight=field.poisoned(1, routing.n_used),
    )
    router.router(weights, 1, field(x), r)
    return r.expert.to_numpy()[0], r.weight.to_numpy()[0]


@pytest.mark.parametrize("name", ROUTINGS)
def test_router(field, rng, name):
    n_experts, routing = ROUTINGS[name]
    w = rng.standard_normal((2, n_experts, 64), np.float32) / 4
    bias = rng.uniform(-0.5, 0.5, (2, n_experts)).astype(np.float32)
    x = rng.standard_normal((1, 64), np.float32)
    expert, weight = run_router(field, w, bias, routing, x)
    ref_expert, ref_weight = router.router_ref(w[1], bias[1], routing, x[0])
    assert expert.tolist() == ref_expert.tolist()
    np.testing.assert_allclose(weight, ref_weight, rtol=1e-4, atol=1e-6)
    if routing.has_bias:  # the bias must matter, or the test proves nothing
        free, _ = router.router_ref(w[1], 0 * bias[1], routing, x[0])
        assert free.tolist() != ref_expert.tolist()


def test_router_ties_take_the_first(field):
    w, x = np.zeros((2, 6, 32), np.float32), np.ones((1, 32), np.float32)
    expert, weight = run_router(field, w, None, routing_case(n_used=4, normalise=True), x)
    assert expert.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(weight, 0.25, rtol=1e-6)


def test_router_with_all_scores_zero_stays_finite(field):
    w, x = np.full((2, 4, 32), -30.0, np.float32), np.ones((1, 32), np.float32)  # sigmoid(-960) is 0 in f32
    expert, weight = run_router(field, w, None, routing_case(n_used=2, sigmoid=True, normalise=True), x)
    assert expert.tolist() == [0, 1]
    assert np.isfinite(weight).all()
    assert np.abs(weight).max() == 0.0
