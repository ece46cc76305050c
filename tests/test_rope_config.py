"""Rope and temperature tables against the formulas, one scalar at a time, and the keys that shape them."""

import math

import numpy as np
import pytest

from tests.v2_lite import R, config
from tests.variants import variant_file
from tmla.config import open_checked


@pytest.mark.parametrize("position", [0, 1, 7, 100, 4999])
@pytest.mark.parametrize("keys", [{}, {"rope__scaling__type": "none"}, {"rope__freq_base": 5e4}])
def test_rope_table(position, keys):
    """Against the formulas, one scalar at a time."""
    cfg = config(**keys)
    table = cfg.rope_table(5000)
    assert (table.shape, table.dtype) == ((5000, R // 2, 2), np.float32)
    turned = [R * math.log(4096 / (beta * 2 * math.pi)) / (2 * math.log(cfg.rope_base)) for beta in (32, 1)]
    low, high = math.floor(turned[0]), math.ceil(turned[1])
    if not keys:
        assert (low, high) == (10, 23)
    for i in range(R // 2):
        freq = cfg.rope_base ** (-2 * i / R)
        slow = min(1, max(0, (i - low) / (high - low))) if cfg.rope_scaling == "yarn" else 0
        freq = freq * (1 - slow) + freq / 40 * slow
        expected = [math.cos(position * freq), math.sin(position * freq)]
        np.testing.assert_allclose(table[position, i], expected, rtol=0, atol=6e-8)  # half a unit of the last place


def test_yarn_keys():
    assert config(rope__scaling__yarn_log_multiplier=0.1).softmax_scale == pytest.approx(
        (1 + 0.1 * math.log(40)) ** 2 / math.sqrt(192), rel=1e-15
    )
    plain = config(rope__scaling__type="none")
    assert plain.softmax_scale == pytest.approx(1 / math.sqrt(192), rel=1e-15)
    assert any("factor is ignored" in note for note in plain.notes)
    cfg = config(rope__scaling__yarn_beta_fast=16.0, rope__scaling__yarn_beta_slow=1.0)
    assert (cfg.yarn_beta_fast, cfg.yarn_beta_slow) == (16.0, 1.0)
    assert any("yarn_beta_fast is 16" in note for note in cfg.notes)
    assert not any("yarn_beta_slow" in note for note in cfg.notes)
    cfg = config(rope__scaling__original_context_length=None)
    assert cfg.yarn_orig_ctx == 163840
    assert any("original_context_length is missing" in note for note in cfg.notes)


@pytest.mark.parametrize("value", [None, 0.0])
def test_yarn_without_log_multiplier(value):
    """As llama.cpp: the magnitude multiplies cos and sin, and its square the scores."""
    cfg = config(rope__scaling__yarn_log_multiplier=value)
    magnitude = 1 + 0.1 * math.log(40)
    assert cfg.rope_magnitude == pytest.approx(magnitude, rel=1e-15)
    assert cfg.softmax_scale == pytest.approx(magnitude**2 / math.sqrt(192), rel=1e-15)
    assert cfg.rope_table(1)[0, :, 0] == pytest.approx(magnitude, rel=1e-7)
    assert any("yarn_log_multiplier" in note for note in cfg.notes)


def test_long_factors_follow_the_allocated_context(tmp_path_factory):
    gf, cfg = open_checked(variant_file("minicpm3_orig_ctx", tmp_path_factory.getbasetemp()))
    gf.close()
    assert cfg.rope_orig_ctx == 256
    short, long = cfg.rope_table(256), cfg.rope_table(257)
    assert np.abs(short - long[:256]).max() > 0.1
    position, half = 200, cfg.qk_rope_head_dim // 2
    for table, factors in ((short, cfg.rope_factors_short), (long, cfg.rope_factors_long)):
        angles = [position * cfg.rope_base ** (-i / half) / factors[i] for i in range(half)]
        np.testing.assert_allclose(table[position, :, 1], np.sin(angles), rtol=0, atol=6e-8)


def test_temperature_table():
    assert np.array_equal(config().temperature_table(5), np.ones(5, np.float32))
    table = config(attention__temperature_scale=0.1, attention__temperature_length=16).temperature_table(1000)
    expected = [1 + 0.1 * math.log(math.floor(pos / 16) + 1) for pos in range(1000)]
    assert table.dtype == np.float32
    assert np.array_equal(table, np.asarray(expected, np.float32))
    assert table[15] == 1.0 < table[16]
