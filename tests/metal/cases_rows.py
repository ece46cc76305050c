"""Norms, rope, attention, router and greedy choice, at odd shapes, against their NumPy references."""

import functools

import numpy as np
import taichi as ti

from tmla.stages import argmax, attention, norm, rope, router, v_combine

from .case import Built, Expect, MetalCase
from .package import Fields, Record, close, only, start_taichi  # noqa: F401 (the export looks for start_taichi here)


def build_rms_norm(dim):
    rng, field = np.random.default_rng(30), Fields()
    x, w = rng.standard_normal((1, dim), np.float32), rng.uniform(0.5, 1.5, (2, dim)).astype(np.float32)
    y = field.poisoned(1, dim)
    call = functools.partial(norm.rms_norm, field(x), field(w), 1, 1e-6, y)
    return Built(call, field.inputs, {y: close(norm.rms_norm_ref(x, w[1], 1e-6), 1e-5)})


def rope_table(n_ctx, r):
    angle = np.arange(n_ctx)[:, None] * 100.0 ** (-np.arange(r // 2) * 2.0 / r)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def build_cache_row(dtype, tolerance, half):
    """Latent norm and rope of the key tail, which together fill one cache row and touch no other."""
    rng, field = np.random.default_rng(31), Fields()
    c, r, pos, table = 64, 30, 3, rope_table(5, 30)
    row, w = rng.standard_normal((1, 1, c + r), np.float32), rng.uniform(0.5, 1.5, (2, c)).astype(np.float32)
    rows = rng.standard_normal((2, 5, c + r)).astype(dtype)
    f_row, f_w, f_table, cache, f_pos = (
        field(row),
        field(w),
        field(table),
        field(rows),
        field(np.array([pos], np.int32)),
    )

    def call():
        norm.latent_norm(f_row, f_w, 1, 1e-6, cache, f_pos)
        rope.rope_cache(f_row, cache, 1, c, f_table, f_pos, half)

    ref = rows.astype(np.float64)
    ref[1, pos, :c] = norm.rms_norm_ref(row[0, 0, :c], w[1], 1e-6)
    ref[1, pos, c:] = rope.rope_ref(row[0, 0, c:], table[pos], half)
    return Built(call, field.inputs, {cache: close(ref, tolerance)})


def build_rope_heads(half):
    rng, field = np.random.default_rng(32), Fields()
    h, n, r, pos, table = 3, 48, 30, 7, rope_table(9, 30)
    q = rng.standard_normal((1, h, n + r)).astype(np.float32)
    f_q = field(q)
    call = functools.partial(rope.rope_heads, f_q, n, field(table), field(np.array([pos], np.int32)), half)
    ref = q.astype(np.float64)
    ref[0, :, n:] = rope.rope_ref(q[0, :, n:], table[pos], half)
    return Built(call, field.inputs, {f_q: close(ref, 1e-5)})


def build_attention(n_splits, n_rows, h, c, r, dtype):
    rng, field = np.random.default_rng(33), Fields()
    rows = rng.standard_normal((2, n_rows + 1, c + r)).astype(dtype)
    rows[:, n_rows] = np.nan  # behind the position: must not be read
    qa = (rng.standard_normal((1, h, c + r)) * 3.0 / np.sqrt(c + r)).astype(np.float32)
    scratch = Record(
        scores=field.poisoned(n_splits, h, attention.TILE),
        part_m=field.poisoned(n_splits, h),
        part_l=field.poisoned(n_splits, h),
        part_r=field.poisoned(n_splits, h),
        part=field.poisoned(n_splits, h, c),
    )
    cache, f_qa, pos, mix = field(rows), field(qa), field(np.array([n_rows - 1], np.int32)), field.poisoned(h, c)

    def call():
        attention.attention(cache, 1, pos, f_qa, scratch)
        v_combine.join_splits(pos, scratch, mix)

    return Built(call, field.inputs, {mix: close(attention.attention_ref(rows[1, :n_rows], qa[0], c))})


def build_router(n_experts, **changes):
    plain = dict(n_used=3, sigmoid=False, n_groups=1, n_groups_used=1, normalise=False, scale=1.0, has_bias=False)
    rng, field, routing = np.random.default_rng(34), Fields(), router.Routing(**(plain | changes), min_sum=1e-20)
    w = rng.standard_normal((2, n_experts, 64), np.float32) / 4
    bias = rng.uniform(-0.5, 0.5, (2, n_experts)).astype(np.float32)
    x = rng.standard_normal((1, 64), np.float32)
    weights = Record(router=field(w), routing=routing)
    if routing.has_bias:
        weights.router_bias = field(bias)
    scratch = Record(
        score=field.poisoned(1, n_experts),
        select=field.poisoned(1, n_experts),
        group=field.poisoned(1, routing.n_groups),
        expert=field.poisoned(1, routing.n_used, dtype=ti.i32),
        weight=field.poisoned(1, routing.n_used),
    )
    call = functools.partial(router.router, weights, 1, field(x), scratch)
    expert, weight = router.router_ref(w[1], bias[1], routing, x[0])
    expected = {scratch.expert: Expect(expert[None], 0, 0), scratch.weight: close(weight[None])}
    return Built(call, field.inputs, expected)


def build_argmax():
    field = Fields()
    logits = np.random.default_rng(35).standard_normal((1, 301)).astype(np.float32)
    logits[0, 290:] = 100.0  # padding ids are never chosen
    logits[0, [200, 37]] = 9.0  # the first of equals is
    token = field.poisoned(1, dtype=ti.i32)
    call = functools.partial(argmax.argmax, field(logits), 290, token)
    return Built(call, field.inputs, {token: Expect(np.array([37]), 0, 0, only(1, 0))})


GROUPS = dict(sigmoid=True, normalise=True, has_bias=True, n_groups=4, n_groups_used=2, n_used=4, scale=2.5)
CASES = [
    MetalCase("rms_norm_31", lambda: build_rms_norm(31)),
    MetalCase("rms_norm_416", lambda: build_rms_norm(416)),
    MetalCase("cache_row_f16", lambda: build_cache_row(np.float16, 2e-3, False)),
    MetalCase("cache_row_f32_half", lambda: build_cache_row(np.float32, 1e-5, True)),
    MetalCase("rope_heads_consecutive", lambda: build_rope_heads(False)),
    MetalCase("rope_heads_half", lambda: build_rope_heads(True)),
    MetalCase("attention_1_row", lambda: build_attention(3, 1, 3, 96, 16, np.float32)),
    MetalCase("attention_129_rows", lambda: build_attention(3, 129, 3, 96, 16, np.float32)),
    MetalCase("attention_75_rows_f16", lambda: build_attention(8, 75, 5, 160, 32, np.float16)),
    MetalCase("router_softmax", lambda: build_router(7)),
    MetalCase("router_groups", lambda: build_router(16, **GROUPS)),
    MetalCase("router_16_of_96", lambda: build_router(96, n_used=16, sigmoid=True, normalise=True, has_bias=True)),
    MetalCase("argmax", build_argmax),
]
