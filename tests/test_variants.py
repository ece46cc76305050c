"""Whole models of every structure and size in :mod:`tests.variants` against the float64 reference.

A model costs a compilation of its kernels, so a default run takes a representative part; ``TMLA_ALL=1`` takes all.
"""

import os

import numpy as np
import pytest

import tmla
from tests.variants import VARIANTS, variant_file
from tmla import reference

SIGMA = 1e-4  # of the logits' standard deviation: f32 arithmetic and cache
ALL = os.environ.get("TMLA_ALL", "0") not in ("", "0")
N_GREEDY = 8
CHUNKED = ["lite_nope_48", "lite_rope_18", "q_lora_groups", "v3_fused", "plm_untied"]  # a prompt that is a chunk
CHOSEN = [*CHUNKED, "lite_kv_512_split", "lite_top_16", "lite_128_heads", "glm", "mistral", "minicpm3_orig_ctx"]
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129]
N_CTX = {"minicpm3_orig_ctx": 300}  # above its original context, so the long factors apply; 64 elsewhere


def names():
    """Variants of this run."""
    if ALL:
        return list(VARIANTS)
    return CHOSEN


def prompt(name, n):
    return np.random.default_rng([31, n]).integers(0, VARIANTS[name].n_vocab, n).tolist()


def error_in_sigma(got, ref):
    assert got.shape == ref.shape
    assert ref.std() > 0.01
    return np.abs(got - ref).max() / ref.std()


@pytest.mark.parametrize("name", names())
def test_prompt_and_greedy_continuation(tmp_path_factory, arch, name):
    path, n_ctx = variant_file(name, tmp_path_factory.getbasetemp()), N_CTX.get(name, 64)
    n_prompt = 20 if ALL or name in CHUNKED else 12  # shorter ones go token by token: fewer kernels to compile
    tokens = prompt(name, n_prompt)
    model = tmla.load(path, arch=arch, n_ctx=n_ctx, cache_dtype="f32")
    logits = model.prefill(tokens, all_logits=True)
    first = int(logits[-1].argmax())
    greedy = [first, *model.decode_greedy(first, N_GREEDY - 1)]
    ref = reference.logits(path, tokens + greedy[:-1], n_ctx=n_ctx)
    assert error_in_sigma(logits, ref[:n_prompt]) < SIGMA
    best, taken = ref[n_prompt - 1 :].max(axis=1), ref[range(n_prompt - 1, len(ref)), greedy]
    assert ((best - taken) / ref.std() < 2 * SIGMA).all()  # each is the best, or equal to it within the tolerance


@pytest.mark.parametrize("name", ["lite_split", pytest.param("v3_unsplit", marks=pytest.mark.slow)])
def test_prompt_lengths(tmp_path_factory, arch, name):
    """Around every edge at which a prompt may be cut, and on from there."""
    path, tokens = variant_file(name, tmp_path_factory.getbasetemp()), prompt(name, max(LENGTHS) + 1)
    model = tmla.load(path, arch=arch, n_ctx=len(tokens), cache_dtype="f32")
    ref = reference.logits(path, tokens)
    for n in LENGTHS:
        model.reset()
        assert error_in_sigma(model.prefill(tokens[:n], all_logits=True), ref[:n]) < SIGMA, n
        assert error_in_sigma(model.decode(tokens[n]), ref[n]) < SIGMA, n
        model.rewind(n // 2)
        assert error_in_sigma(model.prefill(tokens[n // 2 : n + 1]), ref[n]) < SIGMA, n


def test_the_chosen_ones_exist():
    assert set(CHOSEN) <= set(VARIANTS)
    assert len(set(CHOSEN)) == len(CHOSEN)
    assert set(CHUNKED) <= set(CHOSEN)
