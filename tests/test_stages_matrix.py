"""Stages that multiply by Q8_0 matrices: projections, embedding, FFN; and the router."""

import numpy as np
import pytest
import taichi as ti

from tests.q8 import Bank, close, number, q8_fields, random_q8, routing
from tmla import runtime
from tmla.stages import argmax, embed, ffn, ffn_warps, linear, router


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 32), (7, 96), (127, 64), (65, 1024), (40, 2080), (9, 14336)])
def test_matvec_q8(field, rng, n_out, n_in):
    w_q, w_d = random_q8(rng, 2, n_out, n_in)
    w, layer = q8_fields(field, w_q, w_d), number(field, 1)
    x, y = rng.standard_normal((1, n_in), np.float32), field.poisoned(1, n_out)
    linear.matvec_q8(*w, layer, field(x), y)
    close(y.to_numpy()[0], linear.matvec_q8_ref(w_q[1], w_d[1], x[0]))


def test_matvec_q8_add_and_scale(field, rng):
    w_q, w_d = random_q8(rng, 3, 15, 64)
    x, old = rng.standard_normal((1, 64), np.float32), rng.standard_normal((1, 15), np.float32)
    y = field(old)
    linear.matvec_q8(*q8_fields(field, w_q, w_d), number(field, 2), field(x), y, scale=0.5, add=True)
    close(y.to_numpy()[0], old[0] + 0.5 * linear.matvec_q8_ref(w_q[2], w_d[2], x[0]))


@pytest.mark.parametrize(("n_out", "n_in"), [(33, 96), (5, 2048), (4, 14336)])
def test_norm_folded_into_the_projection(field, rng, arch, n_out, n_in):
    if not runtime.caps().gpu:
        pytest.skip("a CPU normalises first: there is nothing to fold")
    w_q, w_d = random_q8(rng, 2, n_out, n_in)
    x, gain = rng.standard_normal((1, n_in), np.float32), rng.uniform(0.5, 1.5, (2, n_in)).astype(np.float32)
    y = field.poisoned(1, n_out)
    linear.norm_matvec_q8(*q8_fields(field, w_q, w_d), number(field, 1), field(x), field(gain), 1e-6, y)
    normed = x[0].astype(np.float64) / np.sqrt(np.mean(x[0].astype(np.float64) ** 2) + 1e-6) * gain[1]
    close(y.to_numpy()[0], linear.matvec_q8_ref(w_q[1], w_d[1], normed))


def test_extreme_quants_and_subnormal_scales(field):
    """-128, 127, and scales below f16's normal range (6.1e-5) are values like any other."""
    w_q = np.array([[[-128, 127, 1, -1] * 8]], np.int8).view(np.uint8)
    w_d = np.array([[[2.0**-24]]], np.float16)  # the smallest f16
    x, y = np.zeros((1, 32), np.float32), field.poisoned(1, 1)
    x[0, :4] = [2.0**24, 0.0, 0.0, 2.0**24]
    linear.matvec_q8(*q8_fields(field, w_q, w_d), number(field, 0), field(x), y)
    assert y.to_numpy()[0, 0] == -129.0


def test_both_layouts_hold_the_same_bits(field, rng):
    """Every quant, by the reader that knows both layouts."""
    w_q = np.arange(256, dtype=np.uint8).reshape(1, 8, 32)
    seen = field.poisoned(8, 32)

    @ti.kernel
    def read(w: ti.template()):
        for o in range(8):
            for i in range(32):
                seen[o, i] = linear.q8_value(w, 0, o, i)

    for layout in ("bytes", "words"):
        seen.fill(np.nan)
        read(q8_fields(field, w_q, np.ones((1, 8, 1), np.float16), layout)[0])
        np.testing.assert_array_equal(seen.to_numpy(), w_q[0].view(np.int8))


@pytest.mark.parametrize(("n_vocab", "dim"), [(1, 32), (127, 96)])
def test_embed(field, rng, n_vocab, dim):
    w_q, w_d = random_q8(rng, 1, n_vocab, dim)
    x = field.poisoned(1, dim)
    embed.embed(*q8_fields(field, w_q, w_d), n_vocab - 1, 3.0, x)
    close(x.to_numpy()[0], embed.embed_ref(w_q[0], w_d[0], n_vocab - 1, 3.0))


def ffn_bank(field, rng, *, n_experts, n_used, fe, fs, dim, gated):
    """One FFN of two layers, the first being layer 3, as the stage wants it, and its matrices as arrays."""
    segment = ffn_warps.segment_size(n_used, fe, fs)
    bank = Bank(
        first=3, moe=n_used > 0, n_used=n_used, expert_ffn_dim=fe, common_ffn_dim=fs, gated=gated, residual_scale=0.5,
        segment=segment, n_segments=n_used + -(-fs // segment), eps=1e-6, ffn_norm=field(np.ones((2, dim), np.float32)),
        routing=routing(n_used=n_used),
    )  # fmt: skip
    shapes = {"gate_exps": (n_experts * fe, dim), "up_exps": (n_experts * fe, dim), "down_exps": (n_experts * dim, fe)}
    shapes |= {"gate": (fs, dim), "up": (fs, dim), "down": (dim, fs)}
    arrays = {name: random_q8(rng, 2, *shape) for name, shape in shapes.items() if 0 not in shape}
    bank.add(field, **arrays)
    return bank, arrays


def route_fields(field, n_experts, n_used, n_groups=1):
    """Scratch of the router, poisoned."""
    return Bank(
        logit=field.poisoned(1, max(1, n_experts)),
        score=field.poisoned(1, max(1, n_experts)),
        select=field.poisoned(max(1, n_experts)),
        group=field.poisoned(n_groups),
        expert=field.poisoned(1, max(1, n_used), dtype=ti.i32),
        weight=field.poisoned(1, max(1, n_used)),
    )


def hidden_field(field, bank):
    """The activations' scratch, poisoned."""
    if runtime.caps().gpu:
        return field.poisoned(bank.n_segments, ffn_warps.segment_len(bank.segment))
    return field.poisoned(1, bank.n_used * bank.expert_ffn_dim + bank.common_ffn_dim)


def run_ffn(field, rng, bank, n_experts, xn, x0):
    """Router (where there are experts) and network of layer 4: residual, experts, weights, router matrix."""
    route = route_fields(field, n_experts, bank.n_used)
    layer, following, hidden, x = number(field, 4), number(field, -1), hidden_field(field, bank), field(x0)
    w_router, xn_field = rng.standard_normal((2, max(1, n_experts), xn.shape[1]), np.float32) / 4, field(xn)
    if bank.moe:
        bank.router = field(w_router)
        router.router(bank, layer, xn_field, route)
    ffn_warps.ffn(bank, layer, xn_field, route, hidden, x, following)
    if runtime.caps().gpu:
        assert following[0] == 5
    return x.to_numpy()[0], route.expert.to_numpy()[0], route.weight.to_numpy()[0], w_router


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("n_experts", "n_used", "fe", "fs"),
    [(7, 3, 32, 96), (5, 5, 64, 0), (0, 0, 0, 288), (2, 1, 96, 32), (40, 16, 32, 64)],
)
def test_ffn(field, rng, n_experts, n_used, fe, fs, gated):
    dim = 64
    bank, arrays = ffn_bank(field, rng, n_experts=n_experts, n_used=n_used, fe=fe, fs=fs, dim=dim, gated=gated)
    xn, x0 = 3.0 * rng.standard_normal((1, dim), np.float32), rng.standard_normal((1, dim), np.float32)
    got, expert, _, w_router = run_ffn(field, rng, bank, n_experts, xn, x0)
    ref = np.zeros(dim)
    if n_used:
        ref_expert, ref_weight = router.router_ref(w_router[1], None, bank.routing, xn[0])
        assert expert.tolist() == ref_expert.tolist()
        for e, p in zip(ref_expert, ref_weight):
            one = [
                [a[1].reshape(n_experts, -1, a.shape[-1])[e] for a in arrays[k + "_exps"]]
                for k in ("gate", "up", "down")
            ]
            ref += p * ffn.ffn_ref(*one, xn[0], gated=gated)
    if fs:
        ref += ffn.ffn_ref(*([a[1] for a in arrays[k]] for k in ("gate", "up", "down")), xn[0], gated=gated)
    close(got, x0[0] + 0.5 * ref)


def test_ffn_intermediates_beyond_f16(field, rng):
    """Activations of 1e5 and more stay finite and right: nothing between the stages is f16."""
    bank, arrays = ffn_bank(field, rng, n_experts=0, n_used=0, fe=0, fs=64, dim=32, gated=True)
    xn, x0 = 1e3 * rng.standard_normal((1, 32), np.float32), np.zeros((1, 32), np.float32)
    got, *_ = run_ffn(field, rng, bank, 0, xn, x0)
    matrices = [[a[1] for a in arrays[k]] for k in ("gate", "up", "down")]
    act = linear.dequantise_ref(*matrices[1]) @ xn[0] * (linear.dequantise_ref(*matrices[0]) @ xn[0])
    assert np.abs(act).max() > 1e5
    np.testing.assert_allclose(got, 0.5 * ffn.ffn_ref(*matrices, xn[0], gated=True), rtol=1e-3, atol=10.0)


ROUTINGS = {
    "softmax": (8, routing()),
    "one_of_one": (1, routing(n_used=1)),
    "all_of_seven": (7, routing(n_used=7, normalise=True)),
    "sigmoid_bias": (12, routing(sigmoid=True, normalise=True, scale=2.5, has_bias=True)),
    "softmax_bias": (9, routing(normalise=True, has_bias=True)),
    "groups": (16, routing(sigmoid=True, normalise=True, has_bias=True, n_groups=4, n_groups_used=2, n_used=4)),
    "softmax_groups": (15, routing(n_groups=5, n_groups_used=3, n_used=6, scale=16.0)),
    "k16_of_384": (384, routing(n_used=16, sigmoid=True, normalise=True, has_bias=True)),
}


def run_router(field, w, bias, rule, x):
    bank = Bank(first=2, router=field(w), routing=rule)
    if rule.has_bias:
        bank.router_bias = field(bias)
    r = route_fields(field, w.shape[1], rule.n_used, rule.n_groups)
    router.router(bank, number(field, 3), field(x), r)
    return r.expert.to_numpy()[0], r.weight.to_numpy()[0]


@pytest.mark.parametrize("name", ROUTINGS)
def test_router(field, rng, name):
    n_experts, rule = ROUTINGS[name]
    w = rng.standard_normal((2, n_experts, 64), np.float32) / 4
    bias = rng.uniform(-0.5, 0.5, (2, n_experts)).astype(np.float32)
    x = rng.standard_normal((1, 64), np.float32)
    expert, weight = run_router(field, w, bias, rule, x)
    ref_expert, ref_weight = router.router_ref(w[1], bias[1], rule, x[0])
    assert expert.tolist() == ref_expert.tolist()
    np.testing.assert_allclose(weight, ref_weight, rtol=1e-4, atol=1e-6)
    if rule.has_bias:  # the bias must matter, or the test proves nothing
        free, _ = router.router_ref(w[1], 0 * bias[1], rule, x[0])
        assert free.tolist() != ref_expert.tolist()


def test_router_ties_take_the_first(field):
    w, x = np.zeros((2, 6, 32), np.float32), np.ones((1, 32), np.float32)
    expert, weight = run_router(field, w, None, routing(n_used=4, normalise=True), x)
    assert expert.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(weight, 0.25, rtol=1e-6)


def test_router_with_all_scores_zero_stays_finite(field):
    w, x = np.full((2, 4, 32), -30.0, np.float32), np.ones((1, 32), np.float32)  # sigmoid(-960) is 0 in f32
    expert, weight = run_router(field, w, None, routing(n_used=2, sigmoid=True, normalise=True), x)
    assert expert.tolist() == [0, 1]
    assert np.abs(weight).max() == 0.0


@pytest.mark.parametrize("sigmoid", [False, True])
def test_router_of_nan_stays_among_the_experts(field, sigmoid):
    """Whatever is chosen, its number must index the weights."""
    w, x = np.ones((2, 70, 32), np.float32), np.full((1, 32), np.nan, np.float32)
    expert, _ = run_router(field, w, None, routing(n_used=6, sigmoid=sigmoid), x)
    assert ((expert >= 0) & (expert < 70)).all()


def run_argmax(field, logits, n):
    token = field.poisoned(1, dtype=ti.i32)
    argmax.argmax(field(logits), n, field.poisoned(256), field.poisoned(256, dtype=ti.i32), token)
    return int(token[0])


@pytest.mark.parametrize(("n_vocab", "n"), [(1, 1), (127, 127), (512, 500), (70000, 69999)])
def test_argmax(field, rng, n_vocab, n):
    logits = rng.standard_normal((1, n_vocab)).astype(np.float32)
    logits[0, n:] = 100.0  # padding ids are never chosen
    assert run_argmax(field, logits, n) == argmax.argmax_ref(logits[0, :n])


def test_argmax_takes_the_first_of_equals_and_sees_nan(field):
    logits = np.zeros((1, 300), np.float32)
    logits[0, [37, 130, 299]] = 1.0
    assert run_argmax(field, logits, 300) == 37
    assert run_argmax(field, np.full_like(logits, np.nan), 300) == argmax.NO_ID
