"""The whole model against the float64 oracle, and the behaviour of its public API."""

import dataclasses
import gc
import os

import numpy as np
import pytest

import tmla
from tests.conftest import backend, oracle_dir
from tmla import layer, layer_stages, runtime, state
from tmla.limits import check_limits

SIGMA = 1e-4  # f32 arithmetic, f32 cache: the oracle's tolerance, 6 times what f32 needs
FILES = [
    "dsv2_lite",
    "dsv2_mini",
    "dsv2_lite_27l",
    "dsv2_split",
    "dsv2_qlora",
    "dsv3",
    "dsv3_unsplit",
    "dsv3_fused",
    "moonlight",
    "glm47flash",
    "youtu",
    "mistral_large3",
    "minicpm3",
    "minicpm3_longrope",
    "plm",
]


# Kernels are compiled for every file anew: by default some files go through the kernels of chunks and the long prompt,
# the others token by token; software Vulkan, which takes minutes for what a GPU does at once, leaves files out.
# TMLA_ALL=1 runs all of everything.
ALL = os.environ.get("TMLA_ALL", "0") not in ("", "0")
SLOW_BACKEND = backend() == "vulkan" and not ALL
LONG_FILES = FILES if ALL else ["dsv2_mini", "dsv2_split", "dsv2_qlora", "dsv3", "minicpm3", "plm"]
if SLOW_BACKEND:
    LONG_FILES = ["dsv2_mini", "dsv2_split"]
    FILES = ["dsv2_mini", "dsv2_split", "dsv3", "minicpm3", "plm"]


def error_in_sigma(got, ref):
    """Largest deviation in units of the reference's standard deviation."""
    return np.abs(got - ref).max() / ref.std()


def load(oracle, arch, name, **options):
    options = {"n_ctx": 1024 if name.endswith("longrope") else 400, "cache_dtype": "f32"} | options
    return tmla.load(oracle / f"{name.removesuffix('_longrope')}.gguf", arch=arch, **options)


def cache_rows(model, n):
    """The first `n` cached rows of every layer, [L, n, C + R]."""
    return np.concatenate([bank.cache_rows(n) for bank in model.attention_banks])


def token_by_token(monkeypatch, name):
    """Do without the kernels of chunks for a file that is not among LONG_FILES."""
    if name not in LONG_FILES:
        monkeypatch.setattr("tmla.prefill.split", lambda n, largest: [])


@pytest.mark.parametrize("name", FILES)
def test_oracle_f32(oracle, arch, monkeypatch, name):
    token_by_token(monkeypatch, name)
    z = np.load(oracle / f"{name}.npz")
    model = load(oracle, arch, name)
    logits = model.prefill(z["tokens"], all_logits=True)
    assert error_in_sigma(logits, z["np_logits"]) < SIGMA
    assert error_in_sigma(cache_rows(model, len(z["tokens"])), z["np_cache"]) < SIGMA
    first = int(logits[-1].argmax())
    assert [first, *model.decode_greedy(first, 15)] == z["np_greedy"].tolist()
    if name not in LONG_FILES:
        return
    model.reset()
    long = np.stack([model.prefill(z["long_tokens"][:-15]), *(model.decode(int(t)) for t in z["long_tokens"][-15:])])
    assert error_in_sigma(long, z["long_np_logits"]) < SIGMA


@pytest.mark.parametrize("name", ["dsv2_mini"] if SLOW_BACKEND else ["dsv2_lite", "dsv2_lite_27l"])
def test_oracle_f16_cache(oracle, arch, monkeypatch, name):
    token_by_token(monkeypatch, name)
    z = np.load(oracle / f"{name}.npz")
    logits = load(oracle, arch, name, cache_dtype="f16").prefill(z["tokens"], all_logits=True)
    assert error_in_sigma(logits, z["np_logits"]) < 3e-2
    assert np.sqrt(np.mean((logits - z["np_logits"]) ** 2)) / z["np_logits"].std() < 3e-3


def test_hidden_rows_and_experts(oracle, arch):
    """What lies between the layers, by the composition of one kernel per stage."""
    z = np.load(oracle / "dsv2_lite.npz")
    model = load(oracle, arch, "dsv2_lite")
    hidden, experts, weights = [], [], []
    for pos, token in enumerate(z["tokens"].tolist()):
        model._steps.begin(token, pos)
        for i in range(model.config.n_layers):
            a = next(b for b in model.attention_banks if b.first <= i < b.first + b.n)
            f = next(b for b in model.ffn_banks if b.first <= i < b.first + b.n)
            layer_stages.layer_stages(a, f, model._state)
            hidden.append(model._state.x.to_numpy()[0])
            if f.moe:
                experts.append(model._state.route.expert.to_numpy()[0])
                weights.append(model._state.route.weight.to_numpy()[0])
    hidden, experts, weights = (
        np.stack(a).reshape(len(z["tokens"]), -1, a[0].size).swapaxes(0, 1) for a in (hidden, experts, weights)
    )
    assert error_in_sigma(hidden, z["np_hidden"]) < SIGMA
    np.testing.assert_array_equal(experts, z["np_experts"])
    np.testing.assert_allclose(weights, z["np_expert_weights"], atol=1e-4)


@pytest.fixture(scope="module")
def mini(arch):
    path = oracle_dir() / "dsv2_mini.gguf"
    if not path.exists():
        pytest.skip("the oracle files are not beside this checkout; set TMLA_ORACLE to their folder")
    return tmla.load(path, arch=arch, n_ctx=100, cache_dtype="f32")


@pytest.fixture
def model(mini):
    mini.reset()
    return mini


def test_prefill_equals_decode(model):
    tokens = list(range(10, 45))
    all_at_once = model.prefill(tokens, all_logits=True)
    model.reset()
    one_by_one = np.stack([model.decode(t) for t in tokens])
    assert error_in_sigma(one_by_one, all_at_once) < 2e-5
    model.reset()
    assert error_in_sigma(model.prefill(tokens), all_at_once[-1]) < 2e-5
    assert model.n_past == 35


def test_rewind_equals_never_having_gone_there(model):
    model.prefill([5, 6, 7])
    straight = model.decode(8)
    model.rewind(2)
    model.prefill([99, 98, 97])
    model.rewind(2)
    model.decode(7)
    np.testing.assert_array_equal(model.decode(8), straight)
    with pytest.raises(tmla.ContextError, match="rewind to 5: the cache holds 4"):
        model.rewind(5)


def test_context_is_checked_before_any_work(model):
    model.prefill([1] * 60)
    with pytest.raises(tmla.ContextError, match="41 tokens were given, but the context of 100 has room for 40"):
        model.prefill([1] * 41)
    assert model.n_past == 60
    model.prefill([1] * 40)
    with pytest.raises(tmla.ContextError, match="room for 0"):
        model.decode(1)


def test_tokens_outside_the_vocabulary_and_no_tokens(model):
    for token in (-1, model.config.n_vocab):
        with pytest.raises(tmla.ContextError, match=f"token {token} is not in the vocabulary"):
            model.decode(token)
    with pytest.raises(tmla.ContextError, match="no tokens"):
        model.prefill([])
    assert model.n_past == 0


def test_greedy_on_the_device_equals_argmax(model):
    n = state.MAX_CHOSEN + 3  # more than one read-back
    tokens = [3]
    for _ in range(n):
        tokens.append(int(model.decode(tokens[-1])[: model.tokenizer.n_vocab].argmax()))
    model.reset()
    assert model.decode_greedy(3, n) == tokens[1:]
    assert model.n_past == n
    last = model.decode(tokens[-1])
    model.rewind(n)
    np.testing.assert_array_equal(model.decode(tokens[-1]), last)


def test_launches_and_readbacks_per_token(model):
    """Few launches: two a layer (on CUDA one a dispatch), and one read-back per token or run of tokens."""
    caps = runtime.caps()
    per_layer = 2 if caps.fuse else 8
    model.decode(1)
    runtime.counter.reset()
    model.decode(2)
    assert runtime.counter.launches <= per_layer * model.config.n_layers + 2
    assert runtime.counter.readbacks == 1
    runtime.counter.reset()
    model.decode_greedy(3, 32)
    assert runtime.counter.launches <= 32 * (per_layer * model.config.n_layers + 3)
    assert runtime.counter.readbacks == 1


def test_dispatches_per_token(model):
    """What a GPU is asked to do for a token: at most eight grids a layer."""
    bank, ffn = model.attention_banks[0], model.ffn_banks[-1]
    assert len(layer.attention_dispatches(bank, False)) + len(layer.ffn_dispatches(ffn)) <= 8
    assert len(layer.attention_dispatches(bank, True)) + len(layer.ffn_dispatches(ffn)) <= 7


def test_memory_is_the_sum_of_its_parts(model):
    m = model.memory
    assert m["total"] == m["weights"] + m["cache"] + m["scratch"]
    assert m["cache"] == model.config.n_layers * 100 * model.config.cache_row_width * 4


def test_not_finite_names_position_and_layer(oracle, arch):
    model = load(oracle, arch, "dsv2_lite", n_ctx=20)
    model.prefill([1, 2, 3])
    bank = model.ffn_banks[1]  # layers 1 and 2
    norm = bank.ffn_norm.to_numpy()
    norm[0, 5] = np.nan
    bank.ffn_norm.from_numpy(norm)
    with pytest.raises(tmla.NumericsError, match="at position 3, in layer 1"):
        model.decode(4)
    model.rewind(3)
    with pytest.raises(tmla.NumericsError, match="at position 3, in layer 1"):
        model.decode_greedy(4, 3)


def test_two_models_and_dropped_models(oracle, arch, model):
    """Two models side by side do not disturb each other; a dropped one gives its fields back."""
    before = model.prefill([1, 2, 3])
    for _ in range(1 if SLOW_BACKEND else 3):
        other = load(oracle, arch, "dsv2_split", n_ctx=64)
        other.prefill([4, 5, 6])
        pools = other._free.peek()[2][0]
        del other
        gc.collect()
        assert all(p.n_bytes == 0 for p in pools)
    model.reset()
    np.testing.assert_array_equal(model.prefill([1, 2, 3]), before)


def test_another_backend_in_the_same_process_is_refused(arch, model):
    other = "vulkan" if arch == "cpu" else "cpu"
    with pytest.raises(tmla.BackendError, match=f"already runs '{arch}'"):
        tmla.load(model.file.path, arch=other)
    with pytest.raises(tmla.BackendError, match="arch 'tpu' is unknown"):
        runtime.init("tpu")


def test_context_that_does_not_fit(oracle, arch):
    with pytest.raises(tmla.BackendError, match=r"would fit|at most .* fit"):
        load(oracle, arch, "dsv2_mini", n_ctx=10**9)


def test_what_gpu_kernels_cannot_hold_is_named(model):
    gpu, cpu = (runtime.Caps(a, "subgroup", 32, "words", False) for a in ("vulkan", "cpu"))
    wide = dataclasses.replace(model.config, kv_lora_rank=2048)
    many = dataclasses.replace(model.config, n_experts_used=32)
    for cfg, message in ((wide, "kv_lora_rank is 2048"), (many, "32 experts and the shared ones make 33 warps")):
        with pytest.raises(tmla.BackendError, match=message):
            check_limits("x.gguf", cfg, gpu)
        check_limits("x.gguf", cfg, cpu)
    check_limits("x.gguf", model.config, gpu)
