"""Stages of a chunk of tokens against their NumPy references, a row of a chunk at a time.

Buffers hold more rows than a chunk has; what is behind its tokens starts as NaN, is not read, and stays NaN. One set of
fields serves all chunk sizes of a test, since new fields are new kernels.
"""

import types

import numpy as np
import pytest
import taichi as ti

from tests.q8 import Bank, close, q8_fields, random_q8, routing
from tests.test_stages_attention import attention_bank, table
from tests.test_stages_matrix import ROUTINGS, ffn_bank, route_fields
from tmla import chunk_state, runtime
from tmla.stages import (
    cache_row,
    chunk_attention,
    chunk_attention_tiles,
    embed,
    ffn,
    ffn_rows,
    head_rows,
    matmul,
    norm,
    rope,
    route_rows,
    router,
    rows,
    threads,
)

SIZES = [1, 2, 47, 48, 49, 95]  # tokens of a chunk: around a CPU thread's 48 queries, no multiple of a GPU's 64
T = 97  # rows of the buffers
LAY = 1  # the bank's second layer is the one that is run


def put(f, array, n):
    """The first `n` rows of an array into a field, NaN behind them and beside them."""
    out = np.full(f.shape, np.nan, np.float32)
    out[:n, : array.shape[1]] = array[:n]
    f.from_numpy(out)


def taken(f, n, width=None):
    """The first `n` rows of a field; all else must be as it was."""
    got = f.to_numpy()
    width = got.shape[1] if width is None else width
    assert np.isnan(got[n:]).all(), "a row behind the chunk was written"
    assert np.isnan(got[:n, width:]).all(), "a value beside the row was written"
    return got[:n, :width]


def strip_field(field, length):
    return field.poisoned(threads.slots(), length)


def poison(of):
    """Fill every field of an object of the package with what no kernel may use."""
    for f in vars(of).values():
        if hasattr(f, "fill"):
            f.fill(np.nan if f.dtype == ti.f32 else -7777)
    return of


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 32), (129, 96), (33, 2080), (5, 14336)])
def test_matmul(field, rng, n_out, n_in):
    w_q, w_d = random_q8(rng, 2, n_out, n_in)
    w, x = q8_fields(field, w_q, w_d), rng.standard_normal((T, n_in), np.float32)
    xf, y = field.poisoned(T, n_in + 3), field.poisoned(T, n_out + 2)
    strip, ref = strip_field(field, matmul.strip_len(n_in)), matmul.matmul_ref(w_q[LAY], w_d[LAY], x)
    for n in SIZES:
        put(xf, x, n)
        y.fill(np.nan)
        matmul.matmul_q8(*w, LAY, xf, n, strip, y)
        close(taken(y, n, n_out), ref[:n])


def test_matmul_add_and_scale(field, rng):
    w_q, w_d = random_q8(rng, 2, 15, 96)
    w, x, old = q8_fields(field, w_q, w_d), rng.standard_normal((T, 96), np.float32), rng.standard_normal((T, 15))
    xf, y, strip = field.poisoned(T, 96), field.poisoned(T, 15), strip_field(field, matmul.strip_len(96))
    for n in SIZES:
        put(xf, x, n)
        put(y, old, n)
        matmul.matmul_q8(*w, LAY, xf, n, strip, y, scale=0.5, add=True)
        close(taken(y, n), old[:n] + 0.5 * matmul.matmul_ref(w_q[LAY], w_d[LAY], x)[:n])


@pytest.mark.parametrize("dim", [31, 96, 2048])
def test_norm_rows(field, rng, dim):
    x, w = rng.standard_normal((T, dim), np.float32), rng.uniform(0.5, 1.5, (2, dim)).astype(np.float32)
    xf, wf, y = field.poisoned(T, dim + 5), field(w), field.poisoned(T, dim)
    for n in SIZES:
        put(xf, x, n)
        y.fill(np.nan)
        rows.norm_rows(xf, wf, LAY, n, 1e-6, y)
        close(taken(y, n), np.stack([norm.rms_norm_ref(row, w[LAY], 1e-6) for row in x[:n]]), 1e-5)


def test_embed_rows(field, rng):
    w_q, w_d = random_q8(rng, 1, 127, 96)
    w, tokens = q8_fields(field, w_q, w_d), rng.integers(0, 127, T).astype(np.int32)
    tokens[:2] = 126, 0
    tf, x = field(tokens), field.poisoned(T, 96)
    ref = np.stack([embed.embed_ref(w_q[0], w_d[0], t, 3.0) for t in tokens])
    for n in SIZES:
        x.fill(np.nan)
        rows.embed_rows(*w, tf, n, 3.0, x)
        close(taken(x, n), ref[:n])


def test_copy_rows(field, rng):
    x = rng.standard_normal((T, 33), np.float32)
    xf, y = field(x), field.poisoned(5, 33)
    rows.copy_rows(xf, 94, 2, y)
    np.testing.assert_array_equal(taken(y, 2), x[94:96])


@pytest.mark.parametrize(("dtype", "tol"), [("f32", 1e-5), ("f16", 5e-4)])
@pytest.mark.parametrize("half", [False, True])
def test_cache_rows(field, rng, dtype, tol, half):
    """Each position's row and no other is written, rounded once."""
    h, n_nope, c, r, n_ctx = 3, 32, 96, 30, 200
    bank, _ = attention_bank(field, rng, h=h, n=n_nope, v=32, c=c, r=r, split=True, dtype=dtype, n_ctx=n_ctx, half=half)
    proj, angles = rng.standard_normal((T, bank.row0 + c + r), np.float32), table(n_ctx, r)
    proj[:, bank.row0 : bank.row0 + c] *= 1e5  # the latent before its norm is beyond f16
    pf, tf, gain = field.poisoned(*proj.shape), field(angles), bank.kv_a_norm.to_numpy()[LAY]
    empty = np.full((2, n_ctx, c + r), np.nan, {"f16": np.float16, "f32": np.float32}[dtype])
    for n, pos0 in [(1, 0), (2, 7), (49, 100), (95, 105)]:
        put(pf, proj, n)
        cache_row.cache_from_numpy(bank.cache, empty, dtype)
        rows.cache_rows(bank, LAY, pf, tf, pos0, n)
        got = cache_row.cache_numpy(bank.cache, c + r, dtype)
        one = cache_row.cache_row_ref
        ref = np.stack([one(proj[t, bank.row0 :], gain, 1e-6, angles[pos0 + t], half) for t in range(n)])
        close(got[LAY, pos0 : pos0 + n], ref, tol)
        got[LAY, pos0 : pos0 + n] = np.nan
        assert np.isnan(got).all(), "a row of another position or layer was written"


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("h", "n_nope", "r"), [(3, 32, 30), (1, 64, 2)])
def test_turn_queries(field, rng, half, h, n_nope, r):
    """In place; what stands behind the queries in their rows stays."""
    bank, width = Bank(n_heads=h, n_nope=n_nope, n_rope=r, half_pairs=half), h * (n_nope + r)
    q, angles = rng.standard_normal((T, width + 7), np.float32), table(200, r)
    scale = rng.uniform(0.5, 2.0, 200).astype(np.float32)
    qf, tf, sf = field.poisoned(*q.shape), field(angles), field(scale)
    for n, pos0 in [(1, 0), (2, 3), (95, 105)]:
        put(qf, q, n)
        rows.turn_queries(bank, qf, tf, sf, pos0, n)
        got = taken(qf, n)
        ref = q[:n, :width].reshape(n, h, n_nope + r).astype(np.float64)
        for t in range(n):
            ref[t, :, n_nope:] = rope.rope_ref(ref[t, :, n_nope:], angles[pos0 + t], half)
            ref[t] *= scale[pos0 + t]
        close(got[:, :width], ref.reshape(n, -1), 1e-5)
        np.testing.assert_array_equal(got[:, width:], q[:n, width:])


HEADS = [(3, 64, 40, 96, 30), (1, 32, 32, 32, 2)]  # H, N, V, C, R


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("h", "n_nope", "v", "c", "r"), HEADS)
def test_absorb_and_value_rows(field, rng, split, h, n_nope, v, c, r):
    bank, kv = attention_bank(field, rng, h=h, n=n_nope, v=v, c=c, r=r, split=split, dtype="f32", n_ctx=1)
    bank.n_heads = h
    keys, values = ([a[LAY] for a in matrices] for matrices in kv)
    strip = strip_field(field, head_rows.strip_len(n_nope, c))
    width = -(-(c + r) // 4) * 4
    q, mix = rng.standard_normal((T, h * (n_nope + r)), np.float32), rng.standard_normal((T, h * c), np.float32)
    qf, qa = field.poisoned(T, q.shape[1] + 9), field.poisoned(T, h * width)
    mf, o = field.poisoned(T, h * c), field.poisoned(T, h * v)
    heads = q.reshape(T, h, n_nope + r)
    for n in SIZES:
        put(qf, q, n)
        qa.fill(np.nan)
        head_rows.absorb_rows(bank, LAY, qf, n, strip, qa)
        got = taken(qa, n).reshape(n, h, width)[..., : c + r]
        close(got, head_rows.absorb_rows_ref(*keys, heads[:n], n_nope, v, split=split))
        put(mf, mix, n)
        o.fill(np.nan)
        head_rows.value_rows(bank, LAY, mf, n, strip, o)
        three = mix[:n].reshape(n, h, c)
        close(taken(o, n), head_rows.value_rows_ref(*values, bank.v_stride, bank.v_offset, v, three))


def attention_fields(field, bank, h, c, r, v, beside):
    """Buffers of the chunk's attention, scratch as the model makes it: queries, strip, scratch, qa, mix, o."""
    cfg = types.SimpleNamespace(
        n_heads=h, kv_lora_rank=c, cache_row_width=c + r, v_head_dim=v, qk_head_dim=bank.n_nope + r
    )
    scratch = chunk_state.ChunkAttentionScratch(field.pool, cfg, T, runtime.caps())
    strip = strip_field(field, head_rows.strip_len(bank.n_nope, c))
    qa, mix = field.poisoned(T, h * (-(-(c + r) // 4) * 4)), field.poisoned(T, h * c)
    return (
        field.poisoned(T, h * (bank.n_nope + r) + beside),
        strip,
        poison(scratch),
        qa,
        mix,
        field.poisoned(T, h * v),
    )


def attention_values_ref(bank, kv, cached, q, pos0, h, v):
    """Absorb, attend, v-combine by their references: queries [T, H (N + R)] -> values [T, H V]."""
    keys, values = ([a[LAY] for a in matrices] for matrices in kv)
    heads = q.reshape(len(q), h, -1)
    qa = head_rows.absorb_rows_ref(*keys, heads, bank.n_nope, v, split=bank.split)
    mix = chunk_attention.attend_rows_ref(cached, qa, pos0, bank.n_latent)
    return head_rows.value_rows_ref(*values, bank.v_stride, bank.v_offset, v, mix)


# position of the first token, tokens: around 48 queries, and ends around the segments' 256 and 512 rows
CHUNKS = [(0, n) for n in SIZES] + [(254, 1), (255, 1), (256, 1), (160, 95), (161, 95), (162, 95), (209, 48)]
CHUNKS += [(417, 95), (464, 49), (510, 2), (511, 2), (512, 1), (500, 95)]


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize(
    ("h", "c", "r", "v", "split", "dtype"), [(3, 96, 30, 40, True, "f16"), (1, 64, 2, 32, False, "f32")]
)
def test_attend_rows(field, rng, monkeypatch, expand, h, c, r, v, split, dtype):
    """Every query sees the rows up to its own, in either form; rows behind the chunk are NaN, as is all scratch."""
    monkeypatch.setattr(chunk_attention_tiles, "SCORE_BYTES", 1)  # a GPU's segments, too, are of 256 rows
    n_ctx, kind = 600, {"f16": np.float16, "f32": np.float32}[dtype]
    bank, kv = attention_bank(field, rng, h=h, n=32, v=v, c=c, r=r, split=split, dtype=dtype, n_ctx=n_ctx)
    bank.n_heads = h
    cached = rng.standard_normal((n_ctx, c + r)).astype(kind)
    q = 0.3 * rng.standard_normal((T, h * (32 + r))).astype(np.float32)
    qf, strip, scratch, qa, mix, o = attention_fields(field, bank, h, c, r, v, 5)
    for pos0, n in CHUNKS:
        rest = np.full((2, n_ctx, c + r), np.nan, kind)
        rest[LAY, : pos0 + n] = cached[: pos0 + n]
        cache_row.cache_from_numpy(bank.cache, rest, dtype)
        put(qf, q, n)
        for f in (strip, qa, mix, o):
            f.fill(np.nan)
        chunk_attention.attend_rows(bank, LAY, qf, pos0, n, strip, poison(scratch), qa, mix, o, expand=expand)
        close(taken(o, n), attention_values_ref(bank, kv, cached.astype(np.float64), q[:n], pos0, h, v))


def test_attend_rows_with_scores_beyond_exp(field, rng):
    """Scores of +-1e4, one segment far above the others: the weights are relative to the maximum."""
    c, r, v, pos0, n = 32, 2, 32, 520, 49
    bank, kv = attention_bank(field, rng, h=1, n=32, v=v, c=c, r=r, split=True, dtype="f32", n_ctx=600)
    bank.n_heads = 1
    cached, q = rng.standard_normal((600, c + r)).astype(np.float32), np.zeros((T, 32 + r), np.float32)
    cached[:, c] = np.where(np.arange(600) // 256 == 1, 1.0, -1.0)  # the pe window: no rounding on the way
    q[:, 32], q[:, 33] = 1e4, 1.0
    cache_row.cache_from_numpy(bank.cache, np.stack([cached, cached]), "f32")
    qf, strip, scratch, qa, mix, o = attention_fields(field, bank, 1, c, r, v, 0)
    put(qf, q, T)
    chunk_attention.attend_rows(bank, LAY, qf, pos0, n, strip, scratch, qa, mix, o, expand=False)
    ref = attention_values_ref(bank, kv, cached.astype(np.float64), q[:n], pos0, 1, v)
    np.testing.assert_allclose(taken(o, n), ref, atol=5e-3)  # an ulp of 1e4 is 1e-3


def expert_groups(field, n_experts, n_used):
    groups = chunk_state.ExpertGroups(field.pool, T, n_experts, n_used, gpu=runtime.caps().gpu)
    return poison(groups)


def check_groups(groups, n, n_used, n_experts):
    """Order, start and place are those of the experts; returned are the pairs' experts and weights, [n, K]."""
    expert, weight, order, place = (
        f.to_numpy()[: n * n_used] for f in (groups.expert, groups.weight, groups.order, groups.place)
    )
    ref_order, ref_start = route_rows.group_ref(expert, n_experts)
    np.testing.assert_array_equal(order, ref_order)
    np.testing.assert_array_equal(groups.start.to_numpy(), ref_start)
    np.testing.assert_array_equal(place[order], np.arange(n * n_used))
    return expert.reshape(n, n_used), weight.reshape(n, n_used)


def test_group_reference():
    order, start = route_rows.group_ref(np.array([2, 0, 2, 1, 0, 2]), 4)
    assert order.tolist() == [1, 4, 3, 0, 2, 5]
    assert start.tolist() == [0, 2, 3, 6, 6]


@pytest.mark.parametrize("name", ["softmax", "one_of_one", "groups", "softmax_groups", "k16_of_384"])
def test_route_rows(field, rng, name):
    n_experts, rule = ROUTINGS[name]
    dim, k = 96, rule.n_used
    w = rng.standard_normal((2, n_experts, dim), np.float32) / 4
    bias = rng.uniform(-0.5, 0.5, (2, n_experts)).astype(np.float32)
    x = rng.standard_normal((T, dim), np.float32)
    bank = Bank(first=2, router=field(w), routing=rule, n_used=k)
    if rule.has_bias:
        bank.router_bias = field(bias)
    xf, strip = field.poisoned(T, dim), strip_field(field, matmul.strip_len(dim))
    route, groups = route_fields(field, n_experts, k, rule.n_groups), expert_groups(field, n_experts, k)
    refs = [router.router_ref(w[LAY], bias[LAY], rule, row) for row in x]
    for n in SIZES:
        put(xf, x, n)
        poison(groups)
        route.logit.fill(1e4)  # as of the token before: a softmax relative to it would be 0 / 0
        route_rows.route_rows(bank, LAY, xf, n, strip, route, groups)
        expert, weight = check_groups(groups, n, k, n_experts)
        np.testing.assert_array_equal(expert, [e for e, _ in refs[:n]])
        np.testing.assert_allclose(weight, [p for _, p in refs[:n]], rtol=1e-4, atol=1e-6)


def test_route_rows_ties_take_the_first(field):
    bank = Bank(first=2, router=field(np.zeros((2, 6, 32), np.float32)), routing=routing(n_used=4), n_used=4)
    groups, strip = expert_groups(field, 6, 4), strip_field(field, matmul.strip_len(32))
    route_rows.route_rows(bank, LAY, field(np.ones((T, 32), np.float32)), 49, strip, route_fields(field, 6, 4), groups)
    expert, _ = check_groups(groups, 49, 4, 6)
    np.testing.assert_array_equal(expert, np.tile(np.arange(4), (49, 1)))


@pytest.mark.parametrize(
    ("n_experts", "n_used", "fe", "fs", "gated"),
    [(5, 5, 64, 0, True), (0, 0, 0, 96, False), (40, 6, 96, 32, True)],
)
def test_ffn_rows(field, rng, n_experts, n_used, fe, fs, gated):
    """Router, grouping and network: with 40 experts some have no token, with 5 of 5 each has all."""
    dim = 96
    bank, arrays = ffn_bank(field, rng, n_experts=n_experts, n_used=n_used, fe=fe, fs=fs, dim=dim, gated=gated)
    if not gated:
        bank.gate_q, bank.gate_d = bank.up_q, bank.up_d
    w_router = rng.standard_normal((2, max(1, n_experts), dim), np.float32) / 4
    xn, old = rng.standard_normal((T, dim), np.float32), rng.standard_normal((T, dim), np.float32)
    pairs = max(1, T * n_used)
    scratch = Bank(
        strip=strip_field(field, matmul.strip_len(*(w for w in (dim, fe, fs) if w))),
        hidden=field.poisoned(pairs, max(1, fe)), out=field.poisoned(pairs, dim), common=field.poisoned(T, max(1, fs)),
    )  # fmt: skip
    xf, x, groups = field.poisoned(T, dim), field.poisoned(T, dim), expert_groups(field, n_experts, n_used)
    route = route_fields(field, n_experts, n_used)
    if n_used:
        bank.router = field(w_router)
    ref = np.stack([network_ref(bank, arrays, w_router[LAY], n_experts, fs, row) for row in xn])
    for n in SIZES:
        put(xf, xn, n)
        put(x, old, n)
        for f in (scratch.hidden, scratch.out, scratch.common):
            f.fill(np.nan)
        poison(groups)
        if n_used:
            route_rows.route_rows(bank, LAY, xf, n, scratch.strip, route, groups)
        ffn_rows.ffn_rows(bank, LAY, xf, n, groups, scratch, x)
        close(taken(x, n), old[:n] + 0.5 * ref[:n])


def network_ref(bank, arrays, w_router, n_experts, fs, xn):
    """The network of one row by the formula: the chosen experts, and what every token uses."""
    out = np.zeros(len(xn))
    if n_experts:
        for e, p in zip(*router.router_ref(w_router, None, bank.routing, xn)):
            one = [
                [a[LAY].reshape(n_experts, -1, a.shape[-1])[e] for a in arrays[name + "_exps"]]
                for name in ("gate", "up", "down")
            ]
            out += p * ffn.ffn_ref(*one, xn, gated=bank.gated)
    if fs:
        out += ffn.ffn_ref(*([a[LAY] for a in arrays[name]] for name in ("gate", "up", "down")), xn, gated=bank.gated)
    return out
