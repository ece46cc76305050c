"""Stages of a chunk of tokens that treat rows, and its attention, at odd shapes, against their NumPy references."""

import functools

import numpy as np

from tests.q8 import random_q8
from tmla.stages import chunk_attention, chunk_attention_tiles, head_rows, rows
from tmla.stages.cache_row import cache_row_ref
from tmla.stages.embed import embed_ref
from tmla.stages.norm import rms_norm_ref
from tmla.stages.rope import rope_ref

from .case import Built, Expect, MetalCase
from .cases_chunk import SPARE, chunk, rows_and_rest, target
from .package import Fields, Record, close, only, rope_table, start_taichi  # noqa: F401 (the export looks for the last)


def build_embed(n):
    rng, field = np.random.default_rng(90), Fields()
    w_q, w_d = random_q8(rng, 1, 127, 96)
    tokens = rng.integers(0, 127, n + SPARE).astype(np.int32)
    tokens[[0, n - 1]] = 126, 0
    tokens[n:] = -1  # what a shorter prompt leaves there must not be read
    x = target(field, n, 96)
    call = functools.partial(rows.embed_rows, *field.q8(w_q, w_d), field(tokens), n, 3.0, x)
    return Built(
        call, field.inputs, {x: rows_and_rest(np.stack([embed_ref(w_q[0], w_d[0], t, 3.0) for t in tokens[:n]]))}
    )


def build_norm(n, dim):
    """Norm of the first values of wider rows."""
    rng, field = np.random.default_rng(91), Fields()
    x, w = chunk(rng, n, dim + 5), rng.uniform(0.5, 1.5, (2, dim)).astype(np.float32)
    x[:, dim:] = np.nan
    y = target(field, n, dim)
    call = functools.partial(rows.norm_rows, field(x), field(w), 1, n, 1e-6, y)
    return Built(call, field.inputs, {y: rows_and_rest(rms_norm_ref(x[:n, :dim], w[1], 1e-6))})


def build_copy():
    rng, field, n = np.random.default_rng(92), Fields(), 3
    x, y = rng.standard_normal((9, 45), np.float32), target(field, n, 45)
    call = functools.partial(rows.copy_rows, field(x), 5, n, y)
    return Built(call, field.inputs, {y: rows_and_rest(x[5:8].astype(np.float64))})


def build_cache(n, half, dtype):
    rng, field, c, r, row0, pos0 = np.random.default_rng(93), Fields(), 96, 18, 7, 5
    n_ctx, width = pos0 + n + 1, -(-(c + r) // 4) * 4
    proj, gain = chunk(rng, n, row0 + c + r), rng.uniform(0.5, 1.5, (2, c)).astype(np.float32)
    proj[:, :row0] = np.nan
    table = rope_table(n_ctx, r)
    old = np.full((2, n_ctx, width), -7.0, dtype)
    old[1, pos0 : pos0 + n] = np.nan
    cache = field(old.view(np.uint64))
    w = Record(kv_a_norm=field(gain), cache=cache, cache_f32=dtype == np.float32, half_pairs=half, row0=row0, eps=1e-6)
    call = functools.partial(rows.cache_rows, w, 1, field(proj), field(table), pos0, n)
    made = old.astype(np.float64)
    made[1, pos0 : pos0 + n] = 0  # so is the padding
    for t in range(n):
        made[1, pos0 + t, : c + r] = cache_row_ref(proj[t, row0:], gain[1], 1e-6, table[pos0 + t], half)
    return Built(call, field.inputs, {cache: Expect(made, 1e-3 if dtype == np.float16 else 1e-5, 1e-5, dtype=dtype)})


def build_turn(n, half):
    rng, field, h, n_nope, r, pos0 = np.random.default_rng(94), Fields(), 3, 50, 18, 5
    q = rng.standard_normal((n + SPARE, h * (n_nope + r) + 3), np.float32)  # the cache row's projection follows
    table, scale = rope_table(pos0 + n, r), rng.uniform(0.05, 0.2, pos0 + n).astype(np.float32)
    f_q, w = field(q), Record(n_heads=h, n_nope=n_nope, half_pairs=half)
    call = functools.partial(rows.turn_queries, w, f_q, field(table), field(scale), pos0, n)
    made = q.astype(np.float64)
    for t in range(n):
        heads = made[t, : h * (n_nope + r)].reshape(h, n_nope + r)
        heads[:, n_nope:] = rope_ref(heads[:, n_nope:], table[pos0 + t], half)
        heads *= scale[pos0 + t]
    return Built(call, field.inputs, {f_q: close(made)})


def build_attention(chunks, h, c, r, segment, dtype):
    """Absorbed attention of chunks, (position, tokens) each, one after the other in the same buffers."""
    rng, field = np.random.default_rng(95), Fields()
    n_rows, n = max(map(sum, chunks)), max(n for _, n in chunks)
    width = -(-(c + r) // 4) * 4
    cached = rng.standard_normal((2, n_rows + 1, width)).astype(dtype)
    cached[:, n_rows] = np.nan  # behind the chunk: must not be read
    cached[0] = np.nan  # of another layer
    cached[..., c + r :] = 0
    qa = np.full((n + SPARE, h, width), np.nan, np.float32)  # the padding too
    qa[:n, :, : c + r] = rng.standard_normal((n, h, c + r)) * 3.0 / np.sqrt(c + r)
    w = Record(
        cache=field(cached.view(np.uint64)), cache_f32=dtype == np.float32, row_width=c + r, n_latent=c, n_heads=h
    )
    scratch = Record(
        p=field.poisoned((n + SPARE) * h, segment),
        **{name: field.poisoned((n + SPARE) * h) for name in ("rescale", "factor")},
        **{name: field.poisoned(n + SPARE, h) for name in ("top", "total")},
    )
    mix, f_qa = target(field, n, h * c), field(qa.reshape(n + SPARE, h * width))
    ref = np.full((n, h, c), np.nan)
    for pos0, m in chunks:
        ref[:m] = chunk_attention.attend_rows_ref(cached[1, :, : c + r], qa[:m, :, : c + r], pos0, c)

    def call():
        for pos0, m in chunks:
            for r0 in range(0, pos0 + m, segment):
                n_seen = min(segment, pos0 + m - r0)
                chunk_attention_tiles.absorbed_segment_simt(w, 1, f_qa, pos0, m, r0, n_seen, scratch, mix)

    return Built(call, field.inputs, {mix: rows_and_rest(ref.reshape(n, h * c))})


def build_expanded(chunks, h, n_nope, n_v, c, r, segment, split, dtype):
    """The expanded form, keys and values made on the way, against absorb, attention and v-combine."""
    rng, field = np.random.default_rng(96), Fields()
    n_rows, n = max(map(sum, chunks)), max(n for _, n in chunks)
    width = -(-(c + r) // 4) * 4
    cached = rng.standard_normal((2, n_rows + 1, width)).astype(dtype)
    cached[:, n_rows] = np.nan  # behind the chunk: must not be read
    cached[..., c + r :] = 0
    k = random_q8(rng, 2, *((h * c, n_nope) if split else (h * (n_nope + n_v), c)))
    v, stride, offset = (random_q8(rng, 2, h * n_v, c), n_v, 0) if split else (k, n_nope + n_v, n_nope)
    q = np.full((n + SPARE, h * (n_nope + r)), np.nan, np.float32)
    q[:n] = rng.standard_normal((n, h * (n_nope + r))) / np.sqrt(n_nope + r)
    k_q, k_d = field.q8(*k)
    v_q, v_d = field.q8(*v) if split else (k_q, k_d)
    w = Record(
        cache=field(cached.view(np.uint64)), cache_f32=dtype == np.float32, row_width=c + r, n_latent=c, n_heads=h,
        n_nope=n_nope, n_rope=r, n_v=n_v, v_stride=stride, v_offset=offset, split=split, k_q=k_q, k_d=k_d, v_q=v_q,
        v_d=v_d,
    )  # fmt: skip
    scratch = Record(
        rows=field.poisoned(segment, c + r),
        keys=field.poisoned(segment, h * (n_nope + r)),
        values=field.poisoned(segment, h * n_v),
        p=field.poisoned((n + SPARE) * h, segment),
        **{name: field.poisoned((n + SPARE) * h) for name in ("rescale", "factor")},
        **{name: field.poisoned(n + SPARE, h) for name in ("top", "total")},
    )
    o, f_q = target(field, n, h * n_v), field(q)
    ref = np.full((n, h * n_v), np.nan)
    for pos0, m in chunks:
        qa = head_rows.absorb_rows_ref(k[0][1], k[1][1], q[:m].reshape(m, h, -1), n_nope, n_v, split=split)
        mix = chunk_attention.attend_rows_ref(cached[1, :, : c + r], qa, pos0, c)
        ref[:m] = head_rows.value_rows_ref(v[0][1], v[1][1], stride, offset, n_v, mix)

    def call():
        for pos0, m in chunks:
            chunk_attention.attend_rows(w, 1, f_q, pos0, m, None, scratch, None, None, o, expand=True)

    return Built(call, field.inputs, {o: rows_and_rest(ref)})


F16, F32 = np.float16, np.float32
CASES = [
    MetalCase("chunk_embed", lambda: build_embed(3)),
    MetalCase("chunk_norm", lambda: build_norm(5, 300)),
    MetalCase("chunk_copy", build_copy),
    MetalCase("chunk_cache_f16", lambda: build_cache(5, False, F16)),
    MetalCase("chunk_cache_half_f32", lambda: build_cache(5, True, F32)),
    MetalCase("chunk_turn", lambda: build_turn(5, False)),
    MetalCase("chunk_turn_half", lambda: build_turn(1, True)),
    MetalCase("chunk_attention_2_segments", lambda: build_attention([(37, 65), (0, 1)], 3, 96, 16, 64, F32)),
    MetalCase("chunk_attention_3_segments_f16", lambda: build_attention([(5, 63), (130, 2)], 3, 160, 18, 64, F16)),
    MetalCase("chunk_expanded", lambda: build_expanded([(37, 65), (0, 1)], 3, 64, 33, 96, 18, 64, False, F32)),
    MetalCase("chunk_expanded_split_f16", lambda: build_expanded([(5, 63)], 2, 96, 130, 64, 16, 32, True, F16)),
]
