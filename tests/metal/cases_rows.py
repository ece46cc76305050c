"""Norm, attention over cached rows, and greedy choice, at odd shapes, against their NumPy references."""

import functools

import numpy as np
import taichi as ti

from tests.q8 import random_q8
from tmla.stages import argmax, attention, attention_short, attention_tiles, cache_row, norm, v_combine

from .case import Built, Expect, MetalCase
from .package import Fields, Record, close, only, rope_table, start_taichi  # noqa: F401 (the export looks for the last)


def build_rms_norm():
    rng, field = np.random.default_rng(30), Fields()
    x, w = rng.standard_normal((1, 45), np.float32), rng.uniform(0.5, 1.5, (2, 45)).astype(np.float32)
    y = field.poisoned(1, 45)
    call = functools.partial(norm.rms_norm, field(x), field(w), field.number(1), 1e-6, y)
    return Built(call, field.inputs, {y: close(norm.rms_norm_ref(x, w[1], 1e-6), 1e-5)})


def build_cache_row():
    """One cache row by itself; queries write it in passing."""
    rng, field, c, r, row0, pos = np.random.default_rng(31), Fields(), 96, 18, 7, 3
    proj, gain = rng.standard_normal((1, row0 + c + r), np.float32), rng.uniform(0.5, 1.5, (2, c)).astype(np.float32)
    table, width = rope_table(pos + 2, r), -(-(c + r) // 4) * 4
    cache = field.poisoned(2, pos + 2, width // 2, dtype=ti.u64)
    tables = field(gain), field.number(1), 1e-6, field(table), True
    call = functools.partial(cache_row.cache_row, field(proj), row0, *tables, cache, field.number(pos), f32=True)
    row = np.zeros((2, pos + 2, width))
    row[1, pos, : c + r] = cache_row.cache_row_ref(proj[0, row0:], gain[1], 1e-6, table[pos], True)
    return Built(call, field.inputs, {cache: Expect(row, 1e-5, 1e-5, only(row.shape, (1, pos)), np.float32)})


def build_attention(n_rows, n_splits, h, c, r, dtype):
    """Attention and v-combine: over tiles in `n_splits` splits, or with `n_splits` 0 as for short contexts."""
    rng, field = np.random.default_rng(33), Fields()
    width, stride, offset, n_v = -(-(c + r) // 4) * 4, 72, 32, 33
    rows = rng.standard_normal((2, n_rows + 1, width)).astype(dtype)
    rows[:, n_rows] = np.nan  # behind the position: must not be read
    rows[..., c + r :] = 0
    qa = np.zeros((1, h, width), np.float32)
    qa[..., : c + r] = rng.standard_normal((1, h, c + r)) * 3.0 / np.sqrt(c + r)
    w_q, w_d = random_q8(rng, 2, h * stride, c)
    v_q, v_d = field.q8(w_q, w_d)
    w = Record(cache=field(rows.view(np.uint64)), cache_f32=dtype == np.float32, v_q=v_q, v_d=v_d, first=0)
    vars(w).update(row_width=c + r, n_latent=c, n_v=n_v, v_stride=stride, v_offset=offset)
    layer, pos, f_qa, o = field.number(1), field.number(n_rows - 1), field(qa), field.poisoned(1, h * n_v)

    def tiles(scratch):
        attention_tiles.attend(w, layer, pos, f_qa, scratch)
        v_combine.v_combine(w, layer, pos, scratch, None, o)

    if n_splits:
        sizes = dict(top=(h, n_splits), total=(h, n_splits), part=(n_splits, h, c))
        scratch = Record(**{name: field.poisoned(*shape) for name, shape in sizes.items()})
        call = functools.partial(tiles, scratch)
    else:
        call = functools.partial(attention_short._attention_short, w, layer, pos, f_qa, o)
    mix = attention.attention_ref(rows[1, :n_rows, : c + r], qa[0, :, : c + r], c)
    return Built(
        call, field.inputs, {o: close(v_combine.v_combine_ref(w_q[1], w_d[1], stride, offset, n_v, mix)[None])}
    )


def build_argmax(n_slices):
    field = Fields()
    logits = np.random.default_rng(35).standard_normal((1, 601)).astype(np.float32)
    logits[0, 590:] = 100.0  # padding ids are never chosen
    logits[0, [400, 37, 589]] = 9.0  # of equals the first is
    best, who = field.poisoned(n_slices), field.poisoned(n_slices, dtype=ti.i32)
    token = field.poisoned(1, dtype=ti.i32)
    call = functools.partial(argmax.argmax, field(logits), 590, best, who, token)
    return Built(call, field.inputs, {token: Expect(np.array([37]), 0, 0, only(1, 0))})


CASES = [
    MetalCase("rms_norm", build_rms_norm),
    MetalCase("cache_row", build_cache_row),
    MetalCase("attention_1_row", lambda: build_attention(1, 3, 3, 96, 16, np.float32)),
    MetalCase("attention_129_rows", lambda: build_attention(129, 3, 3, 96, 16, np.float32)),
    MetalCase("attention_75_rows_17_heads_f16", lambda: build_attention(75, 1, 17, 160, 18, np.float16)),
    MetalCase("attention_short_1_row", lambda: build_attention(1, 0, 3, 96, 16, np.float32)),
    MetalCase("attention_short_77_rows_f16", lambda: build_attention(77, 0, 5, 160, 18, np.float16)),
    MetalCase("argmax_5_slices", lambda: build_argmax(5)),
]
