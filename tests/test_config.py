"""The configuration: families, what is decided by which key or tensor, and what is noted."""

import math

import numpy as np
import pytest

from tests.finite import check_finite
from tests.v2_lite import VOCAB, C, D, E, H, N, R, V, config, refused, split, tensor, v2_lite, with_keys
from tests.variants import VARIANTS, variant_file
from tmla.config import MLAConfig, check_tensors, open_checked


def test_v2_lite():
    gf = v2_lite()
    cfg = MLAConfig.from_gguf(gf)
    assert cfg.softmax_scale == pytest.approx(0.11472138679292612, rel=1e-15)
    assert (cfg.rope_magnitude, cfg.cache_row_width) == (1.0, 576)
    assert (cfg.cache_row_bytes(), cfg.cache_row_bytes("f32")) == (1152, 2304)
    assert (cfg.n_layers, cfg.n_moe_layers, cfg.n_dense_layers, cfg.n_vocab) == (27, 26, 1, VOCAB)
    assert (cfg.qk_nope_head_dim, cfg.qk_head_dim, cfg.shared_ffn_dim, cfg.q_lora_rank) == (128, 192, 2816, 0)
    assert {name: spec.shape for name, spec in cfg.expected_tensors().items()} == {
        name: info.shape for name, info in gf.tensors.items()
    }
    check_tensors(gf, cfg)
    noted = " ".join(cfg.notes)
    assert all(word in noted for word in ("Gating is softmax", "expert_weights_norm", "beta_fast", "beta_slow"))


# what tells the oracle's files apart: fields that differ from V2-Lite's
FAMILIES = {
    "dsv2_lite": {"gating": "softmax", "kv_b_split": False, "q_lora_rank": 0, "rope_scaling": "yarn"},
    "dsv2_lite_27l": {"n_layers": 27, "q_lora_rank": 0, "v_head_dim": 64, "qk_nope_head_dim": 32},
    "dsv2_qlora": {"q_lora_rank": 96, "qk_nope_head_dim": 48, "expert_weights_scale": 16.0, "n_experts_used": 6},
    "dsv2_split": {"kv_b_split": True, "qk_nope_head_dim": 64, "v_head_dim": 32, "kv_lora_rank": 96},
    "dsv3": {"gating": "sigmoid", "has_expert_bias": True, "n_expert_groups": 4, "n_expert_groups_used": 2},
    "dsv3_unsplit": {"gating": "sigmoid", "kv_b_split": False, "n_expert_groups": 1, "expert_weights_norm": True},
    "dsv3_fused": {"fused_gate_up": True, "expert_weights_scale": 2.5},
    "moonlight": {"rope_scaling": "none", "rope_base": 50000.0, "q_lora_rank": 0, "shared_ffn_dim": 128},
    "glm47flash": {"n_layers": 3, "n_nextn_layers": 1, "v_head_dim": 128, "qk_nope_head_dim": 96, "n_heads": 5},
    "youtu": {"is_moe_layer": (False,) * 4, "n_experts": 0, "tied_head": True, "n_vocab": 500, "q_lora_rank": 64},
    "mistral_large3": {"attn_temp_length": 16, "gating": "softmax", "expert_weights_norm": True, "yarn_factor": 36.0},
    "minicpm3": {"rope_scaling": "longrope", "rope_pairs": "half", "rope_orig_ctx": 512, "embd_scale": 12.0,
                 "v_head_dim": 32, "logit_scale": 2.0, "residual_scale": 1.4 / math.sqrt(3)},
    "plm": {"ffn_act": "relu2", "rope_pairs": "consecutive", "tied_head": True, "rope_scaling": "none"},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_oracle_families(oracle, name):
    gf, cfg = open_checked(oracle / f"{name}.gguf")
    with gf:
        check_finite(gf, cfg)
    assert {field: getattr(cfg, field) for field in FAMILIES[name]} == FAMILIES[name]
    assert bool(cfg.ignored_tensors) == (name == "glm47flash")
    assert all(note.endswith(".") and "\n" not in note for note in cfg.notes)
    assert len(set(cfg.notes)) == len(cfg.notes)


@pytest.mark.parametrize(
    ("count", "used", "groups"), [(None, None, (1, 1)), (0, 0, (1, 1)), (1, 1, (1, 1)), (8, 3, (8, 3)), (8, 8, (1, 1))]
)
def test_groups(count, used, groups):
    cfg = config(expert_group_count=count, expert_group_used_count=used) if count is not None else config()
    assert (cfg.n_expert_groups, cfg.n_expert_groups_used) == groups


@pytest.mark.parametrize(("scale", "used"), [(None, 1.0), (0.0, 1.0), (1.0, 1.0), (2.5, 2.5), (np.float32(16), 16.0)])
def test_weights_scale(scale, used):
    cfg = config(expert_weights_scale=scale)
    assert cfg.expert_weights_scale == used
    assert any("expert_weights_scale" in note for note in cfg.notes) == (scale in (None, 0.0))


@pytest.mark.parametrize(
    ("code", "bias", "n_blocks", "n_vocab", "gating", "reason"),
    [
        (1, True, 3, 512, "softmax", "expert_gating_func is 1"),
        (2, False, 3, 512, "sigmoid", "expert_gating_func is 2"),
        (None, True, 3, 512, "sigmoid", "exp_probs_b exists"),
        (0, True, 3, 512, "sigmoid", "exp_probs_b exists"),
        (None, False, 3, 154880, "softmax", "no exp_probs_b"),
        (None, False, 47, 154880, "sigmoid", "GLM-4.7-Flash"),
        (None, False, 48, 154880, "sigmoid", "GLM-4.7-Flash"),
        (None, False, 47, 102400, "softmax", "no exp_probs_b"),
    ],
)
def test_gating(code, bias, n_blocks, n_vocab, gating, reason):
    gf = v2_lite(n_layers=n_blocks)
    gf.tensors["token_embd.weight"] = tensor("token_embd.weight", [n_vocab, D])
    if bias:
        gf.tensors["blk.1.exp_probs_b.bias"] = tensor("blk.1.exp_probs_b.bias", [E], "F32")
    cfg = config(gf, **({} if code is None else {"expert_gating_func": code}))
    assert (cfg.gating, cfg.has_expert_bias) == (gating, bias)
    assert reason in cfg.gating_source
    assert any("Gating is" in note for note in cfg.notes) == (code in (None, 0))


@pytest.mark.parametrize("n_layers", [1, 2, 26, 27, 40])
def test_lite_is_what_has_no_attn_q_a(n_layers):
    """Even when the key says otherwise, and whatever the layer count."""
    cfg = config(v2_lite(n_layers, n_dense=0), attention__q_lora_rank=1536, leading_dense_block_count=0)
    assert cfg.q_lora_rank == 0
    assert any("attn_q_a" in note for note in cfg.notes)


def test_q_lora_rank_is_that_of_attn_q_a():
    gf = v2_lite()
    gf.tensors["blk.0.attn_q_a.weight"] = tensor("blk.0.attn_q_a.weight", [1536, D])
    assert config(gf).q_lora_rank == 1536
    assert config(gf, attention__q_lora_rank=1536).q_lora_rank == 1536
    assert "q_lora_rank' is 1024" in refused(config, with_keys(gf, attention__q_lora_rank=1024))


def test_dense_is_what_has_no_router():
    cfg = config(v2_lite(n_layers=5, router=False))
    assert (cfg.n_moe_layers, cfg.n_experts, cfg.expert_ffn_dim) == (0, 0, 0)
    assert any("expert_count is 64" in note for note in cfg.notes)
    for told in (None, 2, 4, 2**31 - 1):
        cfg = config(v2_lite(n_layers=5, n_dense=3), leading_dense_block_count=told)
        assert cfg.is_moe_layer == (False, False, False, True, True)
        assert any("leading_dense_block_count" in note for note in cfg.notes)
    cfg = config(v2_lite(n_layers=5, n_dense=0), feed_forward_length=None, leading_dense_block_count=0)
    assert (cfg.ffn_dim, cfg.n_moe_layers) == (0, 5)


def test_missing_router_is_named():
    gf = v2_lite()
    del gf.tensors["blk.9.ffn_gate_inp.weight"]
    assert "'blk.9.ffn_gate_inp.weight' is missing" in refused(config, gf)


def test_shared_width_is_that_of_the_tensor():
    cfg = config(expert_shared_count=1)
    assert cfg.shared_ffn_dim == 2816
    assert any("expert_shared_count" in note for note in cfg.notes)
    gf = v2_lite()
    gf.tensors = {name: info for name, info in gf.tensors.items() if "shexp" not in name}
    assert config(gf, expert_shared_count=0).shared_ffn_dim == 0
    cfg = config(gf, expert_shared_count=2)
    assert "blk.1-26.ffn_down_shexp.weight" in refused(check_tensors, gf, cfg)


@pytest.mark.parametrize("key", [True, False])
def test_nextn_blocks_are_ignored_and_said(key):
    gf = v2_lite()
    gf.tensors["blk.26.nextn.eh_proj.weight"] = tensor("blk.26.nextn.eh_proj.weight", [D, 2 * D])
    cfg = config(gf, nextn_predict_layers=1) if key else config(gf)
    assert (cfg.n_layers, cfg.n_nextn_layers) == (26, 1)
    assert "blk.26.nextn.eh_proj.weight" in cfg.ignored_tensors
    assert all(name.startswith("blk.26.") for name in cfg.ignored_tensors)
    assert any("block 26 is ignored" in note for note in cfg.notes)
    check_tensors(gf, cfg)


def test_split_layout():
    mla = {"attention__key_length_mla": N + R, "attention__value_length_mla": V}
    gf = with_keys(split(v2_lite()), attention__key_length=C + R, attention__value_length=C, **mla)
    cfg = config(gf)
    assert (cfg.kv_b_split, cfg.qk_nope_head_dim, cfg.v_head_dim) == (True, N, V)
    check_tensors(gf, cfg)
    without = config(with_keys(gf, attention__key_length_mla=None, attention__value_length_mla=None))
    assert (without.qk_nope_head_dim, without.v_head_dim) == (N, V)
    assert any("key_length_mla is missing" in note for note in without.notes)
    assert "rows of N = 48" in refused(config, with_keys(split(v2_lite()), attention__key_length_mla=48 + R))


def test_both_layouts():
    gf = v2_lite()
    gf.tensors |= split(v2_lite()).tensors
    assert config(gf).kv_b_split is False
    cfg = config(gf, attention__key_length_mla=N + R, attention__value_length_mla=V)
    assert cfg.kv_b_split is True
    assert "blk.0.attn_kv_b.weight" in cfg.ignored_tensors


def test_extra_tensors_are_listed_and_biases_refused():
    gf = v2_lite()
    gf.tensors["blk.3.attn_sinks.weight"] = tensor("blk.3.attn_sinks.weight", [H], "F32")
    cfg = config(gf)
    assert cfg.ignored_tensors == ("blk.3.attn_sinks.weight",)
    assert any("blk.3.attn_sinks.weight" in note for note in cfg.notes)
    gf.tensors["blk.3.attn_q.bias"] = tensor("blk.3.attn_q.bias", [H * (N + R)], "F32")
    assert "'blk.3.attn_q.bias'" in refused(config, gf)


def test_vocabulary():
    gf = v2_lite()
    gf.metadata["tokenizer.ggml.tokens"] = ["x"] * (VOCAB - 3)
    assert any("102397 tokens" in note for note in config(gf).notes)
    gf.metadata["tokenizer.ggml.tokens"] = ["x"] * (VOCAB + 1)
    assert "102401 tokens" in refused(config, gf)


def test_overrides_are_noted():
    gf = v2_lite()
    gf.overridden = {"deepseek2.expert_gating_func": 2}
    assert "deepseek2.expert_gating_func was overridden with 2." in config(gf, expert_gating_func=2).notes


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_pass(tmp_path_factory, name):
    shape = VARIANTS[name]
    gf, cfg = open_checked(variant_file(name, tmp_path_factory.getbasetemp()))
    with gf:
        check_finite(gf, cfg)
    same = ("n_layers", "dim", "n_heads", "n_vocab", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
            "n_experts", "n_experts_used", "shared_ffn_dim", "fused_gate_up", "tied_head")  # fmt: skip
    for field in same:
        assert getattr(cfg, field) == getattr(shape, field), field
    assert cfg.is_moe_layer == tuple(i >= shape.n_dense for i in range(shape.n_layers))
    assert (cfg.gating == shape.gating) or not shape.n_experts
