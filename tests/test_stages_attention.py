"""Norms, rope, and attention over the compressed rows."""

import types

import numpy as np
import pytest
import taichi as ti

from tests.q8 import close
from tmla.stages import argmax, attention, norm, rope, v_combine


@pytest.mark.parametrize("dim", [1, 31, 64, 2048])
def test_rms_norm(field, rng, dim):
    x, w = rng.standard_normal((1, dim), np.float32), rng.uniform(0.5, 1.5, (2, dim)).astype(np.float32)
    y = field.poisoned(1, dim)
    norm.rms_norm(field(x), field(w), 1, 1e-6, y)
    close(y.to_numpy()[0], norm.rms_norm_ref(x[0], w[1], 1e-6), 1e-5)


def test_epsilon_counts_on_small_rows(field, rng):
    x, w = 1e-3 * rng.standard_normal((1, 96), np.float32), np.ones((1, 96), np.float32)
    y = field.poisoned(1, 96)
    norm.rms_norm(field(x), field(w), 0, 1e-6, y)
    close(y.to_numpy()[0], norm.rms_norm_ref(x[0], w[0], 1e-6), 1e-5)
    assert not np.allclose(y.to_numpy()[0], norm.rms_norm_ref(x[0], w[0], 0.0), rtol=0.1)


@pytest.mark.parametrize(("dtype", "tol"), [(ti.f32, 1e-5), (ti.f16, 5e-4)])
def test_cache_row(field, rng, dtype, tol):
    """Latent norm and rope write one whole row of the cache, rounded once, and no other."""
    row, w = 1e5 * rng.standard_normal((1, 1, 80)).astype(np.float32), rng.uniform(0.5, 1.5, (2, 64)).astype(np.float32)
    row[..., 64:] *= 1e-5  # the latent before its norm is beyond f16: it must never be one
    cache, row_field, pos = field.poisoned(2, 4, 80, dtype=dtype), field(row), field(np.array([3], np.int32))
    t = table(4, 16)
    norm.latent_norm(row_field, field(w), 1, 1e-6, cache, pos)
    rope.rope_cache(row_field, cache, 1, 64, field(t), pos)
    got = cache.to_numpy().astype(np.float64)
    close(got[1, 3, :64], norm.rms_norm_ref(row[0, 0, :64], w[1], 1e-6), tol)
    close(got[1, 3, 64:], rope.rope_ref(row[0, 0, 64:], t[3]), tol)
    got[1, 3] = np.nan
    assert np.isnan(got).all(), "a row that is not this position's was written"


def table(n_ctx, r, base=100.0):
    angle = np.arange(n_ctx)[:, None] * base ** (-np.arange(r // 2) * 2.0 / r)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("pos", [1, 7, 100])
@pytest.mark.parametrize(("h", "n", "r"), [(1, 32, 16), (3, 48, 30), (5, 1, 128)])
def test_rope(field, rng, half, pos, h, n, r):
    q, row = rng.standard_normal((2, 1, h, n + r)).astype(np.float32)
    t, p = table(101, r), field(np.array([pos], np.int32))
    q_field, cache, t_field = field(q), field.poisoned(2, 101, n + r), field(t)
    rope.rope_heads(q_field, n, t_field, p, half)
    rope.rope_cache(field(row), cache, 1, n, t_field, p, half)
    got_q, got = q_field.to_numpy()[0], cache.to_numpy()
    close(got_q[:, n:], rope.rope_ref(q[0, :, n:], t[pos], half), 1e-5)
    close(got[1, pos, n:], rope.rope_ref(row[0, 0, n:], t[pos], half), 1e-5)
    np.testing.assert_array_equal(got_q[:, :n], q[0, :, :n])
    assert np.isnan(got[0]).all()
    assert np.isnan(got[1, pos, :n]).all()


def test_rope_turns_pairs_as_complex_numbers(rng):
    """The reference itself, against multiplication by exp(i angle)."""
    x, t = rng.standard_normal(8), table(10, 8)[9].astype(np.float64)
    turned = (x[0::2] + 1j * x[1::2]) * (t[:, 0] + 1j * t[:, 1])
    np.testing.assert_allclose(rope.rope_ref(x, t), np.stack([turned.real, turned.imag], 1).ravel(), rtol=1e-12)
    turned = (x[:4] + 1j * x[4:]) * (t[:, 0] + 1j * t[:, 1])
    np.testing.assert_allclose(rope.rope_ref(x, t, half=True), np.r_[turned.real, turned.imag], rtol=1e-12)


class Scratch(types.SimpleNamespace):
    _data_oriented = True
    __hash__ = object.__hash__


def scratch(field, n_splits, h, c):
    return Scratch(
        scores=field.poisoned(n_splits, h, attention.TILE),
        part_m=field.poisoned(n_splits, h),
        part_l=field.poisoned(n_splits, h),
        part_r=field.poisoned(n_splits, h),
        part=field.poisoned(n_splits, h, c),
    )


@pytest.mark.parametrize("n_splits", [1, 3, 8])
def test_attention_rows_and_splits(field, rng, n_splits):
    check_attention(field, rng, n_splits, [1, 2, 31, 32, 33, 65, 127, 128, 129, 300], 3, 96, 16, ti.f32)


@pytest.mark.parametrize("dtype", [ti.f32, ti.f16])
@pytest.mark.parametrize(("h", "c", "r"), [(1, 32, 16), (5, 64, 32), (16, 512, 64), (2, 160, 128)])
def test_attention_widths(field, rng, h, c, r, dtype):
    check_attention(field, rng, 8, [75], h, c, r, dtype)


def check_attention(field, rng, n_splits, row_counts, h, c, r, dtype):
    n_ctx = max(row_counts) + 1
    rows = rng.standard_normal((2, n_ctx, c + r)).astype(np.float16 if dtype == ti.f16 else np.float32)
    qa = (rng.standard_normal((1, h, c + r)) * 3.0 / np.sqrt(c + r)).astype(np.float32)
    cache, qa_field, pos = field(rows), field(qa), field(np.array([0], np.int32))
    s, mix = scratch(field, n_splits, h, c), field.poisoned(h, c)
    for n_rows in row_counts:
        behind = rows.copy()
        behind[:, n_rows:] = np.nan  # rows behind the position must not be read
        cache.from_numpy(behind)
        pos[0] = n_rows - 1
        mix.fill(np.nan)
        attention.attention(cache, 1, pos, qa_field, s)
        v_combine.join_splits(pos, s, mix)
        close(mix.to_numpy(), attention.attention_ref(rows[1, :n_rows], qa[0], c))


def test_attention_with_large_scores(field, rng):
    """Scores of +-1e4 (far beyond exp's range) in ascending order: every tile rescales."""
    h, c, r, n = 2, 32, 16, 200
    rows, qa = rng.standard_normal((1, n, c + r)).astype(np.float32), np.zeros((1, h, c + r), np.float32)
    rows[0, :, c] = np.linspace(-100.0, 100.0, n)
    qa[0, 0, c], qa[0, 1, c] = 100.0, -100.0
    s, mix, pos = scratch(field, 4, h, c), field.poisoned(h, c), field(np.array([n - 1], np.int32))
    attention.attention(field(rows), 0, pos, field(qa), s)
    v_combine.join_splits(pos, s, mix)
    close(mix.to_numpy(), attention.attention_ref(rows[0], qa[0], c))


@pytest.mark.parametrize(("n_vocab", "n"), [(1, 1), (127, 127), (512, 500), (5000, 4999)])
def test_argmax(field, rng, n_vocab, n):
    logits = rng.standard_normal((1, n_vocab)).astype(np.float32)
    logits[0, n:] = 100.0  # padding ids are never chosen
    token = field.poisoned(1, dtype=ti.i32)
    argmax.argmax(field(logits), n, token)
    assert token[0] == argmax.argmax_ref(logits[0, :n])


def test_argmax_takes_the_first_of_equals(field):
    logits, token = np.zeros((1, 300), np.float32), field.poisoned(1, dtype=ti.i32)
    logits[0, [37, 130, 299]] = 1.0
    argmax.argmax(field(logits), 300, token)
    assert token[0] == 37
