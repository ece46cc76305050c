"""Keys of the configuration: every numeric type a converter may choose, and values that no model can have."""

import math

import numpy as np
import pytest

from tests.v2_lite import F, config, refused, v2_lite, with_keys


@pytest.mark.parametrize(
    "value", [np.uint32(16), np.uint64(16), np.float32(16.0), 16.0, np.full(27, 16, np.int32), [16] * 27, np.int8(16)]
)
def test_integers_of_any_type(value):
    assert config(attention__head_count=value).n_heads == 16


@pytest.mark.parametrize(
    ("value", "found"),
    [(2.5, "2.5"), ([16, 8], "[16, 8]"), ([], "[]"), ("16", "'16'"), (True, "True"), (-1, "-1"), (2**31, "2147483648"),
     (math.nan, "nan"), (np.array([16, 8]), "[16, 8]"), (["a"] * 27, "'a'"), (0, "0")],
)  # fmt: skip
def test_integers_refused(value, found):
    message = refused(config, with_keys(attention__head_count=value))
    assert "'deepseek2.attention.head_count' is" in message
    assert found in message


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1e-6, "1e-6", True])
def test_epsilon_refused(value):
    assert "layer_norm_rms_epsilon" in refused(config, with_keys(attention__layer_norm_rms_epsilon=value))


@pytest.mark.parametrize(("value", "norm"), [(True, True), (1, True), (np.uint8(0), False), (np.bool_(True), True)])
def test_flags_of_any_type(value, norm):
    assert config(expert_weights_norm=value).expert_weights_norm is norm


def test_flag_refused():
    assert "expert_weights_norm' is 2" in refused(config, with_keys(expert_weights_norm=2))


def test_feed_forward_length_per_layer():
    """Layers with experts may have any entry; the dense ones have to agree."""
    assert config(feed_forward_length=np.array([F] + [0] * 26)).ffn_dim == F
    gf = v2_lite(n_layers=3, n_dense=2)
    assert "feed_forward_length" in refused(config, with_keys(gf, feed_forward_length=np.array([F, 96, F])))


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention__head_count",
     "attention__layer_norm_rms_epsilon", "attention__kv_lora_rank", "attention__key_length", "attention__value_length",
     "expert_count", "expert_used_count", "expert_feed_forward_length", "rope__dimension_count",
     "rope__scaling__factor"],
)  # fmt: skip
def test_missing_key_is_named(key):
    assert f"key 'deepseek2.{key.replace('__', '.')}' is missing" in refused(config, with_keys(**{key: None}))


@pytest.mark.parametrize("arch", ["llama", "deepseek2-ocr", "Deepseek2", "x\n" * 99, 7, None])
def test_unknown_architecture(arch):
    gf = v2_lite()
    gf.metadata["general.architecture"] = arch
    assert "architecture" in refused(config, gf)


def test_no_architecture_and_no_embedding():
    gf = v2_lite()
    del gf.metadata["general.architecture"]
    assert "'general.architecture' is missing" in refused(config, gf)
    gf = v2_lite()
    del gf.tensors["token_embd.weight"]
    assert "'token_embd.weight' is missing" in refused(config, gf)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"block_count": 2**20}, "block_count' is 1048576"),
        ({"attention__kv_lora_rank": 48}, "kv_lora_rank' is 48"),
        ({"rope__dimension_count": 63}, "dimension_count' is 63"),
        ({"rope__dimension_count": 192}, "key_length' is 192"),
        ({"rope__dimension_count": 0}, "dimension_count' is 0"),
        ({"expert_used_count": 65}, "expert_used_count' is 65"),
        ({"expert_used_count": 0}, "expert_used_count' is 0"),
        ({"expert_gating_func": 3}, "expert_gating_func' is 3"),
        ({"nextn_predict_layers": 27}, "nextn_predict_layers' is 27"),
        ({"attention__q_lora_rank": "x"}, "q_lora_rank' is 'x'"),
        ({"rope__freq_base": 1.0}, "freq_base' is 1.0"),
        ({"rope__scaling__factor": 0.5}, "factor' is 0.5"),
        ({"rope__scaling__type": "linear"}, "scaling.type' is 'linear'"),
        ({"rope__scaling__type": "longrope"}, "scaling.type' is 'longrope'"),
        ({"rope__scaling__type": None}, "scaling.type' is missing, with a factor of 40"),
        ({"rope__scaling__yarn_beta_fast": 0.0}, "yarn_beta_fast' is 0"),
        ({"rope__scaling__attn_factor": 1.2}, "attn_factor' is 1.2"),
        ({"attention__temperature_scale": 0.1}, "temperature_length' is missing"),
        ({"expert_group_count": 8}, "expert_group_used_count' is missing"),
        ({"expert_group_count": 5, "expert_group_used_count": 2}, "expert_group_count' is 5"),
        ({"expert_group_count": 64, "expert_group_used_count": 8}, "expert_group_count' is 64"),
        ({"expert_group_count": 32, "expert_group_used_count": 2}, "expert_group_used_count' is 2"),
        ({"expert_group_count": 8, "expert_group_used_count": 9}, "expert_group_used_count' is 9"),
    ],
)
def test_values_refused(keys, found):
    assert found in refused(config, with_keys(**keys))
