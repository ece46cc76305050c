"""Batched prefill against the same tokens decoded one by one, at every edge of chunks and of single steps."""

import numpy as np
import pytest

import tmla
from tmla import chunk_state, prefill, runtime
from tmla.loading import demo_path

SIGMA = 2e-5  # f32 sums in another order, f32 cache
N_CTX, CHUNK = 136, 32
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129]
TOKENS = [(31 * i * i + 7 * i) % 211 + 9 for i in range(129)]
FILES = ["dsv2_mini", *(pytest.param(name, marks=pytest.mark.slow) for name in ("demo", "dsv3"))]


def error_in_sigma(got, ref):
    return np.abs(got - ref).max() / ref.std()


@pytest.fixture(scope="module", params=FILES)
def case(request, arch):
    """A model with chunks of 32 tokens, and the logits behind each of the tokens, decoded one by one."""
    return make(request, arch, request.param, "f32")


def make(request, arch, name, cache_dtype):
    path = demo_path() if name == "demo" else request.getfixturevalue("oracle") / f"{name}.gguf"
    with pytest.MonkeyPatch.context() as patch:
        for kind in chunk_state.MAX_TOKENS:
            patch.setitem(chunk_state.MAX_TOKENS, kind, CHUNK)
        model = tmla.load(path, arch=arch, n_ctx=N_CTX, cache_dtype=cache_dtype)
    assert model._prefill.chunk.n_tokens == CHUNK
    return model, np.stack([model.decode(t) for t in TOKENS])


def test_every_length(case):
    model, ref = case
    for n in LENGTHS:
        model.reset()
        assert error_in_sigma(model.prefill(TOKENS[:n], all_logits=True), ref[:n]) < SIGMA, n
        model.reset()
        assert error_in_sigma(model.prefill(TOKENS[:n]), ref[n - 1]) < SIGMA, n
        assert (model.n_past, model.tokens) == (n, TOKENS[:n])


def test_behind_other_tokens_and_behind_a_rewind(case):
    model, ref = case
    for before, after in [(1, 16), (7, 33), (15, 64), (33, 47), (63, 65)]:
        model.reset()
        model.prefill(TOKENS[:before])
        model.prefill([5] * 40)
        model.rewind(before)
        got = model.prefill(TOKENS[before : before + after], all_logits=True)
        assert error_in_sigma(got, ref[before : before + after]) < SIGMA, (before, after)
        following = model.decode(TOKENS[before + after])  # a step reads what the chunk has cached
        assert error_in_sigma(following, ref[before + after]) < SIGMA, (before, after)


def test_both_forms_of_attention(case):
    model, ref = case
    for expand in (False, True):
        for pos0 in (0, 32, 64):
            model._prefill.run(TOKENS[pos0 : pos0 + CHUNK], pos0, expand=expand)
        logits = np.concatenate(list(model._prefill.logits(CHUNK)))
        assert error_in_sigma(logits, ref[64:96]) < SIGMA, expand


def test_f16_cache_and_a_fault_that_is_named(request, arch):
    """A row's value may be rounded to its neighbour: f32 sums in another order lie on the other side of a half."""
    model, ref = make(request, arch, "dsv2_mini", "f16")
    for n in (16, 33, 129):
        model.reset()
        assert error_in_sigma(model.prefill(TOKENS[:n], all_logits=True), ref[:n]) < 5e-3
    model.reset()
    bank = model.ffn_banks[0]
    norm = bank.ffn_norm.to_numpy()
    norm[0, 5] = np.nan
    bank.ffn_norm.from_numpy(norm)
    with pytest.raises(
        tmla.NumericsError, match=f"position 0, in layer {bank.first + 1}"
    ):  # the first cache row of NaN
        model.prefill(TOKENS[:20])


def test_launches_and_readbacks(case, monkeypatch):
    """A chunk is one launch by the count, no token of it a step; logits come back once, or 16 tokens at a time."""
    model, _ = case
    model.reset()
    model.prefill(TOKENS[:CHUNK])
    monkeypatch.setattr(model, "_step", lambda *a, **kw: pytest.fail("a step"))
    for n_chunks in (1, 3):
        model.reset()
        runtime.counter.reset()
        model.prefill(TOKENS[: n_chunks * CHUNK])
        head = runtime.counter.launches - n_chunks
        assert (0 <= head <= 3, runtime.counter.readbacks) == (True, 1)
    model.reset()
    runtime.counter.reset()
    model.prefill(TOKENS[: 2 * CHUNK], all_logits=True)
    assert (runtime.counter.launches, runtime.counter.readbacks) == (2, 2 * CHUNK // chunk_state.LOGIT_ROWS)


def test_split():
    for largest in (16, 32, 64, 512):
        for n in range(1, 1200):
            sizes = prefill.split(n, largest)
            rest = n - sum(sizes)
            assert 0 <= rest < chunk_state.MIN_TOKENS
            assert all(chunk_state.MIN_TOKENS <= size <= largest for size in sizes)
