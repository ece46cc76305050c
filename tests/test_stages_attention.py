"""The MLA block's own stages: norm, rope, absorb, the cache row, attention over the compressed rows, v-combine."""

import numpy as np
import pytest

from tests.q8 import Bank, close, number, random_q8
from tmla import runtime
from tmla.stages import absorb, attention, attention_short, attention_tiles, cache_row, norm, rope, v_combine
from tmla.stages.lanes import cdiv

LAYER, FIRST = 4, 3  # the bank's second layer is the one that is run


@pytest.mark.parametrize("dim", [1, 31, 64, 2048])
def test_rms_norm(field, rng, dim):
    x, w = rng.standard_normal((1, dim), np.float32), rng.uniform(0.5, 1.5, (2, dim)).astype(np.float32)
    y = field.poisoned(1, dim)
    norm.rms_norm(field(x), field(w), number(field, 1), 1e-6, y)
    close(y.to_numpy()[0], norm.rms_norm_ref(x[0], w[1], 1e-6), 1e-5)


def test_epsilon_counts_on_small_rows(field, rng):
    x, w = 1e-3 * rng.standard_normal((1, 96), np.float32), np.ones((1, 96), np.float32)
    y = field.poisoned(1, 96)
    norm.rms_norm(field(x), field(w), number(field, 0), 1e-6, y)
    close(y.to_numpy()[0], norm.rms_norm_ref(x[0], w[0], 1e-6), 1e-5)
    assert not np.allclose(y.to_numpy()[0], norm.rms_norm_ref(x[0], w[0], 0.0), rtol=0.1)


def table(n_ctx, r, base=100.0):
    angle = np.arange(n_ctx)[:, None] * base ** (-np.arange(r // 2) * 2.0 / r)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def test_rope_turns_pairs_as_complex_numbers(rng):
    """The reference itself, against multiplication by exp(i angle)."""
    x, t = rng.standard_normal(8), table(10, 8)[9].astype(np.float64)
    turned = (x[0::2] + 1j * x[1::2]) * (t[:, 0] + 1j * t[:, 1])
    np.testing.assert_allclose(rope.rope_ref(x, t), np.stack([turned.real, turned.imag], 1).ravel(), rtol=1e-12)
    turned = (x[:4] + 1j * x[4:]) * (t[:, 0] + 1j * t[:, 1])
    np.testing.assert_allclose(rope.rope_ref(x, t, half=True), np.r_[turned.real, turned.imag], rtol=1e-12)


def cache_of(field, n_ctx, width, dtype):
    """A poisoned cache of two layers."""
    kind, shape = cache_row.cache_field(2, n_ctx, width, dtype, runtime.caps().layout)
    cache = field.pool.field(kind, shape)
    cache_row.cache_from_numpy(
        cache, np.full((2, n_ctx, width), np.nan, {"f16": np.float16, "f32": np.float32}[dtype]), dtype
    )
    return cache


@pytest.mark.parametrize(("dtype", "tol"), [("f32", 1e-5), ("f16", 5e-4)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("c", "r", "pos"), [(64, 16, 1), (32, 30, 7), (512, 64, 100)])
def test_cache_row(field, rng, dtype, tol, half, c, r, pos):
    """Latent norm and rope write one whole row of the cache, rounded once, and no other."""
    proj, w = (
        1e5 * rng.standard_normal((1, 5 + c + r)).astype(np.float32),
        rng.uniform(0.5, 1.5, (2, c)).astype(np.float32),
    )
    proj[..., 5 + c :] *= 1e-5  # the latent before its norm is beyond f16: it must never be one
    t, cache = table(101, r), cache_of(field, 101, c + r, dtype)
    cache_row.cache_row(
        field(proj), 5, field(w), number(field, 1), 1e-6, field(t), half, cache, number(field, pos), f32=dtype == "f32"
    )
    got = cache_row.cache_numpy(cache, c + r, dtype)
    close(got[1, pos], cache_row.cache_row_ref(proj[0, 5:], w[1], 1e-6, t[pos], half), tol)
    got[1, pos] = np.nan
    assert np.isnan(got).all(), "a row that is not this position's was written"


def attention_bank(field, rng, *, h, n, v, c, r, split, dtype, n_ctx, half=False):
    """An MLA block of two layers with a poisoned cache, and its kv_b as arrays (keys, values)."""
    if split:
        kv = random_q8(rng, 2, h * c, n), random_q8(rng, 2, h * v, c)
    else:
        kv = (random_q8(rng, 2, h * (n + v), c),) * 2
    bank = Bank(
        first=FIRST, split=split, n_nope=n, n_rope=r, n_v=v, n_latent=c, row_width=c + r, half_pairs=half, eps=1e-6,
        row0=h * (n + r), v_stride=v if split else n + v, v_offset=0 if split else n, cache_f32=dtype == "f32",
        kv_a_norm=field(rng.uniform(0.5, 1.5, (2, c)).astype(np.float32)), cache=cache_of(field, n_ctx, c + r, dtype),
    )  # fmt: skip
    bank.add(field, k=kv[0], v=kv[1])
    return bank, kv


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("h", "n", "v", "c", "r", "half"),
    [(1, 32, 32, 32, 16, False), (3, 64, 96, 32, 30, True), (5, 96, 32, 160, 64, False), (16, 128, 64, 512, 64, False)],
)
def test_query_gives_the_scores_of_expanded_attention(field, rng, split, h, n, v, c, r, half):
    """q . k with expanded keys k = [w_uk c_kv ; k_pe] in float64: another algebra than the kernel's."""
    bank, kv = attention_bank(field, rng, h=h, n=n, v=v, c=c, r=r, split=split, dtype="f32", n_ctx=8, half=half)
    proj, row = rng.standard_normal((1, bank.row0 + c + r), np.float32), rng.standard_normal(c + r)
    scale, t, pos = rng.uniform(2.0, 5.0, 8).astype(np.float32), table(8, r), 5
    proj_field, qa = field(proj), field.poisoned(1, h, cdiv(c + r, 4) * 4)
    absorb.query(
        bank,
        number(field, LAYER),
        proj_field,
        proj_field,
        field(t),
        field(scale),
        number(field, pos),
        qa,
        number(field, -1),
    )
    got = qa.to_numpy()[0, :, : c + r]
    q = proj[0, : bank.row0].astype(np.float64).reshape(h, n + r)
    q[:, n:] = rope.rope_ref(q[:, n:], t[pos], half)
    keys = [a[1] for a in kv[0]]
    close(got, absorb.absorb_ref(*keys, q, n, v, scale[pos], split=split))
    k_nope = absorb.w_uk_ref(*keys, h, n, v, split=split) @ row[:c]  # [H, N]
    close(got @ row, scale[pos] * (np.einsum("hn,hn->h", q[:, :n], k_nope) + q[:, n:] @ row[c:]))
    cached = cache_row.cache_numpy(bank.cache, c + r, "f32")[LAYER - FIRST, pos]
    close(cached, cache_row.cache_row_ref(proj[0, bank.row0 :], bank.kv_a_norm.to_numpy()[1], 1e-6, t[pos], half), 1e-5)


def scratch(field, n_splits, h, c):
    return Bank(
        scores=field.poisoned(n_splits, h, attention.TILE),
        rescale=field.poisoned(n_splits, h),
        top=field.poisoned(h, n_splits),
        total=field.poisoned(h, n_splits),
        part=field.poisoned(n_splits, h, c),
    )


def check_attention(field, rng, n_splits, row_counts, h, c, r, dtype, *, v=32, split=False, scale=3.0):
    """Attention and v-combine, by every variant of the backend, against NumPy."""
    n_ctx = max(row_counts) + 1
    bank, kv = attention_bank(field, rng, h=h, n=32, v=v, c=c, r=r, split=split, dtype=dtype, n_ctx=n_ctx)
    kind = np.float16 if dtype == "f16" else np.float32
    rows = rng.standard_normal((2, n_ctx, c + r)).astype(kind)
    qa = np.zeros((1, h, cdiv(c + r, 4) * 4), np.float32)
    qa[..., : c + r] = rng.standard_normal((1, h, c + r)) * scale / np.sqrt(c + r)
    qa_field, pos, layer = field(qa), number(field, 0), number(field, LAYER)
    s, mix, o = scratch(field, n_splits, h, c), field.poisoned(h, c), field.poisoned(1, h * v)
    for n_rows in row_counts:
        behind = rows.copy()
        behind[:, n_rows:] = np.nan  # rows behind the position must not be read
        cache_row.cache_from_numpy(bank.cache, behind, dtype)
        pos[0] = n_rows - 1
        latent = attention.attention_ref(rows[1, :n_rows], qa[0, :, : c + r], c)
        ref = v_combine.v_combine_ref(*(a[1] for a in kv[1]), bank.v_stride, bank.v_offset, v, latent)
        o.fill(np.nan)
        attention_tiles.attend(bank, layer, pos, qa_field, s)
        v_combine.v_combine(bank, layer, pos, s, mix, o)
        close(o.to_numpy()[0], ref)
        if runtime.caps().gpu and n_rows <= attention_short.MAX_ROWS:
            o.fill(np.nan)
            attention_short._attention_short(bank, layer, pos, qa_field, o)
            close(o.to_numpy()[0], ref)


ROWS = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 193, 300]


@pytest.mark.parametrize("n_splits", [1, 3, 8])
def test_attention_rows_and_splits(field, rng, n_splits):
    check_attention(field, rng, n_splits, ROWS, 3, 96, 16, "f32")


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    ("h", "c", "r", "v", "split"),
    [(1, 32, 16, 32, False), (5, 64, 30, 96, True), (16, 512, 64, 128, False), (33, 160, 128, 33, True)],
)
def test_attention_widths(field, rng, h, c, r, v, split, dtype):
    check_attention(field, rng, 8, [75], h, c, r, dtype, v=v, split=split)


def test_attention_with_large_scores(field, rng):
    """Scores of hundreds, far beyond exp's range: every tile rescales."""
    check_attention(field, rng, 4, [200], 2, 32, 16, "f32", scale=300.0)
