"""The float64 reference against the oracle, against absorbed attention, and routing by hand."""

import types

import numpy as np
import pytest

from tests.variants import VARIANTS, variant_file
from tmla import reference, reference_weights, rope
from tmla.config import open_checked
from tmla.errors import ContextError, TmlaError

FILES = ["dsv2_lite", "dsv2_mini", "dsv2_lite_27l", "dsv2_qlora", "dsv2_split", "dsv3", "dsv3_unsplit", "dsv3_fused",
         "moonlight", "glm47flash", "youtu", "mistral_large3", "minicpm3", "minicpm3_longrope", "plm"]  # fmt: skip
STORED = 6e-7  # of a standard deviation: what storing the oracle as float32 costs (values up to 5 sigma)


@pytest.fixture(params=FILES)
def known(request, oracle):
    """An oracle file, the context it was run with, and its arrays."""
    stem = request.param.removesuffix("_longrope")
    n_ctx = 1024 if stem != request.param else None
    return oracle / f"{stem}.gguf", n_ctx, np.load(oracle / f"{request.param}.npz")


def error(found, expected):
    """Largest difference in standard deviations of what is expected."""
    assert found.shape == expected.shape
    assert expected.std() > 0
    return np.abs(found - expected).max() / expected.std()


def test_prompt_and_greedy_continuation(known):
    path, n_ctx, arrays = known
    tokens, greedy = arrays["tokens"], arrays["np_greedy"]
    trace = reference.trace(path, np.concatenate([tokens, greedy[:-1]]), n_ctx)
    n = len(tokens)
    assert trace.logits.dtype == trace.hidden.dtype == trace.cache.dtype == np.float64
    assert error(trace.logits[:n], arrays["np_logits"]) < STORED
    assert error(trace.hidden[:, :n], arrays["np_hidden"]) < STORED
    assert error(trace.cache[:, :n], arrays["np_cache"]) < STORED
    assert np.array_equal(trace.logits[n - 1 :].argmax(axis=1), greedy)
    if "np_experts" in arrays:
        assert np.array_equal(trace.experts[:, :n], arrays["np_experts"])
        weights = arrays["np_expert_weights"]
        np.testing.assert_allclose(trace.expert_weights[:, :n], weights, rtol=6e-8, atol=1e-12)
    else:
        assert trace.experts.size == trace.expert_weights.size == 0


def test_long_prompt(known):
    """Only at 300 tokens do YaRN's slow pairs matter."""
    path, n_ctx, arrays = known
    logits = reference.logits(path, arrays["long_tokens"], n_ctx=n_ctx)
    assert error(logits[-16:], arrays["long_np_logits"]) < STORED


def test_long_factors_follow_n_ctx(oracle):
    tokens = np.load(oracle / "minicpm3.npz")["tokens"]
    short, same, long = (reference.logits(oracle / "minicpm3.gguf", tokens, n_ctx=n) for n in (None, 512, 513))
    assert np.array_equal(short, same)
    assert error(long, short) > 0.1


# unsplit and split, N, V, C all different; q_lora; v > nope; one head; rope not a multiple of 32; temperature
@pytest.mark.parametrize(
    "name", ["lite", "lite_split", "q_lora", "glm", "lite_1_head_split", "lite_rope_18", "mistral"]
)
def test_absorbed_attention_agrees(tmp_path_factory, name):
    """The other algebra: W_uk on the query's side, scores and values over the cache rows themselves."""
    gf, cfg = open_checked(variant_file(name, tmp_path_factory.getbasetemp()))
    rng, n_tokens, n = np.random.default_rng(3), 21, cfg.qk_nope_head_dim
    with gf:
        w, x = reference_weights.Weights(gf), rng.standard_normal((n_tokens, cfg.dim))
        turns = np.arange(n_tokens)[:, None] * rope.rope_frequencies(cfg, n_tokens)
        temperature = rng.uniform(1, 2, n_tokens)
        out, rows = reference.attention(w, cfg, "blk.1.", x, turns, temperature)
        if cfg.q_lora_rank:
            c_q = w.linear(x, "blk.1.attn_q_a.weight")
            x = reference.rms_norm(c_q, w.vector("blk.1.attn_q_a_norm.weight"), cfg.rms_eps)
        q = w.linear(x, f"blk.1.attn_q{'_b' * (cfg.q_lora_rank > 0)}.weight").reshape(n_tokens, cfg.n_heads, -1)
        heads = np.empty((n_tokens, cfg.n_heads, cfg.v_head_dim))
        for h in range(cfg.n_heads):
            w_uk, w_uv = reference.head_expansion(w, cfg, "blk.1.", h)
            q_pe = reference.rotate(q[:, h, n:], turns, cfg.rope_pairs, cfg.rope_magnitude)
            q_row = np.concatenate([q[:, h, :n] @ w_uk.T, q_pe], axis=1)  # [T, C + R]
            for t in range(n_tokens):
                scores = rows[: t + 1] @ q_row[t] * cfg.softmax_scale * temperature[t]
                weights = np.exp(scores - scores.max())
                heads[t, h] = (weights / weights.sum()) @ rows[: t + 1, : cfg.kv_lora_rank] @ w_uv
        expected = w.linear(heads.reshape(n_tokens, -1), "blk.1.attn_output.weight")
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_finite_and_causal(tmp_path_factory, name):
    """Every structure runs; what comes later changes nothing before it."""
    path = variant_file(name, tmp_path_factory.getbasetemp())
    tokens = np.random.default_rng(5).integers(0, VARIANTS[name].n_vocab, 9)
    trace, first = (reference.trace(path, tokens[:n], 32) for n in (9, 4))
    assert np.isfinite(trace.logits).all()
    assert trace.logits.std() > 0.01
    scale = np.abs(trace.logits).max()
    np.testing.assert_allclose(first.logits, trace.logits[:4], rtol=0, atol=1e-11 * scale)
    assert np.array_equal(first.experts, trace.experts[:, :4])


def test_slabs_make_no_difference(tmp_path_factory, monkeypatch):
    path, tokens = variant_file("v3_fused", tmp_path_factory.getbasetemp()), [5, 3, 250, 7]
    whole = reference.logits(path, tokens)
    monkeypatch.setattr(reference_weights, "SLAB_VALUES", 7 * 96)  # 7 rows of D: no width here is a multiple
    np.testing.assert_allclose(reference.logits(path, tokens), whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_only_chosen_experts_are_dequantised(tmp_path_factory, monkeypatch):
    seen = set()
    slab = reference_weights.Weights.slab

    def spy(self, name, start, stop):
        if name == "blk.1.ffn_up_exps.weight":
            seen.add(start // 32)  # 32 rows an expert
        return slab(self, name, start, stop)

    monkeypatch.setattr(reference_weights.Weights, "slab", spy)
    trace = reference.trace(variant_file("lite_384_experts", tmp_path_factory.getbasetemp()), [1, 2, 3])
    assert seen == set(trace.experts[0].reshape(-1).tolist())
    assert len(seen) <= 24


def routing(**changes):
    base = {"gating": "sigmoid", "n_expert_groups": 1, "n_expert_groups_used": 1, "n_experts_used": 2,
            "expert_weights_norm": False, "expert_weights_scale": 1.0}  # fmt: skip
    return types.SimpleNamespace(**(base | changes))


def logit(p):
    return np.log(p) - np.log1p(-np.asarray(p))


def test_bias_selects_and_does_not_weigh():
    scores = logit([[0.9, 0.2, 0.5, 0.4]])
    chosen, weights = reference.choose_experts(routing(), scores, np.array([0.0, 0.75, 0.0, 0.0]))
    assert chosen.tolist() == [[1, 0]]  # 0.95 before 0.9
    np.testing.assert_allclose(weights, [[0.2, 0.9]], rtol=1e-12)
    _, weights = reference.choose_experts(routing(expert_weights_norm=True, expert_weights_scale=2.5), scores, 0.0)
    np.testing.assert_allclose(weights, [[2.5 * 0.9 / 1.4, 2.5 * 0.5 / 1.4]], rtol=1e-12)


def test_softmax_is_over_all_experts():
    scores = np.log([[1.0, 4.0, 3.0, 2.0]])
    chosen, weights = reference.choose_experts(routing(gating="softmax"), scores, 0.0)
    assert chosen.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[0.4, 0.3]], rtol=1e-12)


def test_groups_are_ranked_by_their_two_best():
    """The best expert of all is alone in its group."""
    cfg = routing(n_expert_groups=3, n_expert_groups_used=1, n_experts_used=2)
    scores = logit([[0.9, 0.1, 0.1, 0.6, 0.5, 0.1, 0.3, 0.3, 0.3]])
    assert reference.choose_experts(cfg, scores, 0.0)[0].tolist() == [[3, 4]]
    bias = np.array([0, 0, 0, 0, 0, 0, 0.5, 0, 0.1])
    chosen, weights = reference.choose_experts(cfg, scores, bias)  # the bias takes part in ranking groups
    assert chosen.tolist() == [[6, 8]]
    np.testing.assert_allclose(weights, [[0.3, 0.3]], rtol=1e-12)


def test_ties_go_to_the_lower_index():
    scores = np.zeros((1, 6))
    assert reference.choose_experts(routing(n_experts_used=3), scores, 0.0)[0].tolist() == [[0, 1, 2]]
    cfg = routing(n_expert_groups=3, n_expert_groups_used=2, n_experts_used=3)
    assert reference.choose_experts(cfg, scores, 0.0)[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("score", [-100.0, -800.0])
def test_all_zero_sigmoid(score):
    """No 0/0: the weights vanish, as in float32, where sigmoid(-100) is 0."""
    _, weights = reference.choose_experts(routing(expert_weights_norm=True), np.full((1, 4), score), 0.0)
    assert np.isfinite(weights).all()
    assert np.abs(weights).max() < 1e-20


def test_negative_bias_is_still_a_choice_within_groups():
    cfg = routing(n_expert_groups=2, n_expert_groups_used=1)
    chosen, _ = reference.choose_experts(cfg, logit([[0.1, 0.2, 0.3, 0.4]]), np.full(4, -5.0))
    assert chosen.tolist() == [[3, 2]]


@pytest.mark.parametrize(
    ("tokens", "n_ctx", "kind", "found"),
    [
        ([], None, ContextError, "at least one"),
        ([[1, 2]], None, ContextError, "[1, 2]"),
        ([1] * 9, 8, ContextError, "9 tokens, expected at most n_ctx = 8"),
        ([1, 389], None, TmlaError, "1 to 389, expected 0 to 388"),
        ([-1], None, TmlaError, "-1"),
    ],
)
def test_prompts_refused(tmp_path_factory, tokens, n_ctx, kind, found):
    path = variant_file("lite", tmp_path_factory.getbasetemp())
    with pytest.raises(kind) as error:
        reference.trace(path, tokens, n_ctx)
    assert found in str(error.value)
