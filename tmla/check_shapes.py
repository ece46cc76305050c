"""Layers of odd sizes with random weights, so that ``tmla check`` tries every form of every stage on this backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tmla import state, weights
from tmla.check_layer import LayerCheck, Result
from tmla.check_weights import layer_roles, split
from tmla.config import MLAConfig
from tmla.fields import FieldPool
from tmla.plan import make_plan
from tmla.runtime import caps
from tmla.upload import Writer

N_CTX, POSITION = 101, 77  # three tiles of rows, the last one begun
_Q8_BLOCK = 32

_COMMON: dict[str, Any] = {
    "n_layers": 2, "dim": 96, "n_vocab": 65, "rms_eps": 1e-5, "rope_base": 100.0, "rope_scaling": "none",
    "rope_factors_long": (), "rope_factors_short": (), "yarn_factor": 1.0, "yarn_log_mul": 0.0, "tied_head": True,
    "residual_scale": 0.7, "attn_temp_scale": 0.1, "attn_temp_length": 16, "ffn_act": "swiglu", "fused_gate_up": False,
    "n_expert_groups": 1, "n_expert_groups_used": 1,
}  # fmt: skip
_FORMS: dict[str, dict[str, Any]] = {
    "odd, unsplit, softmax experts": {
        "n_heads": 3, "q_lora_rank": 0, "kv_lora_rank": 96, "qk_nope_head_dim": 48, "qk_rope_head_dim": 18,
        "v_head_dim": 32, "kv_b_split": False, "rope_pairs": "consecutive", "is_moe_layer": (True, True), "ffn_dim": 0,
        "n_experts": 7, "n_experts_used": 3, "expert_ffn_dim": 32, "shared_ffn_dim": 64, "gating": "softmax",
        "has_expert_bias": False, "expert_weights_norm": False, "expert_weights_scale": 16.0,
    },
    "odd, split, grouped sigmoid experts": {
        "n_heads": 5, "q_lora_rank": 160, "kv_lora_rank": 32, "qk_nope_head_dim": 96, "qk_rope_head_dim": 30,
        "v_head_dim": 64, "kv_b_split": True, "rope_pairs": "consecutive", "is_moe_layer": (True, True), "ffn_dim": 0,
        "n_experts": 15, "n_experts_used": 4, "expert_ffn_dim": 96, "shared_ffn_dim": 0, "gating": "sigmoid",
        "has_expert_bias": True, "expert_weights_norm": True, "expert_weights_scale": 2.5,
        "n_expert_groups": 5, "n_expert_groups_used": 3,
    },
    "odd, f16 cache, dense relu2": {
        "n_heads": 1, "q_lora_rank": 32, "kv_lora_rank": 160, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 96, "kv_b_split": False, "rope_pairs": "half", "is_moe_layer": (False, False), "ffn_dim": 224,
        "ffn_act": "relu2", "n_experts": 0, "n_experts_used": 0, "expert_ffn_dim": 0, "shared_ffn_dim": 0,
        "gating": "softmax", "has_expert_bias": False, "expert_weights_norm": False, "expert_weights_scale": 1.0,
    },
}  # fmt: skip


class RandomWeights:
    """Random weights of one layer, values around 1/sqrt(I)."""

    def __init__(self, cfg: MLAConfig, rng: np.random.Generator, *, moe: bool):
        self._cfg = cfg
        self._blocks: dict[str, np.ndarray] = {}
        self._vectors: dict[str, np.ndarray] = {}
        for name, role in layer_roles(cfg, moe=moe).items():
            if role.q8:
                self._blocks[name] = _random_blocks(rng, role.rows, role.width)
            elif role.rows:
                self._vectors[name] = rng.normal(0.0, role.width**-0.5, (role.rows, role.width)).astype(np.float32)
            else:
                self._vectors[name] = rng.uniform(0.5, 1.5, role.width).astype(np.float32)

    def blocks(self, name: str, expert: int | None = None) -> np.ndarray:
        blocks = self._blocks[name]
        if expert is None:
            return blocks
        rows = len(blocks) // self._cfg.n_experts
        return blocks[expert * rows : (expert + 1) * rows]

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def upload(self, bank: Any, index: int) -> None:
        """Copy what belongs to a bank into its fields."""
        for name in bank.roles:
            if name in self._vectors:
                _put(getattr(bank, name), index, self._vectors[name])
            else:
                quants, scales = split(self._blocks[name])
                _put(getattr(bank, name + "_q"), index, quants)
                _put(getattr(bank, name + "_d"), index, scales)


def _put(field: Any, index: int, values: np.ndarray) -> None:
    whole = field.to_numpy()
    whole[index] = values.view(whole.dtype)  # quants may be stored as words
    field.from_numpy(whole)


def _random_blocks(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Q8_0 blocks u8 [rows, width/32, 34]."""
    blocks = np.empty((rows, width // _Q8_BLOCK, 34), np.uint8)
    blocks[..., 2:] = rng.integers(-127, 128, (*blocks.shape[:2], _Q8_BLOCK)).astype(np.int8).view(np.uint8)
    scales = rng.uniform(0.5, 1.5, blocks.shape[:2]) / (70.0 * width**0.5)
    blocks[..., :2] = scales.astype("<f2")[..., None].view(np.uint8)
    return blocks


def check_odd_shapes(cfg: MLAConfig) -> list[Result]:
    """Check one layer of each form: both ``kv_b`` layouts, both gatings, both caches, both rope pairs, every width odd.

    Parameters
    ----------
    cfg : MLAConfig
        Any: what is not set here is taken from it.
    """
    results = []
    for seed, (where, form) in enumerate(_FORMS.items()):
        odd = dataclasses.replace(cfg, **(_COMMON | form))
        results += _check_form(odd, where, "f16" if "f16" in where else "f32", np.random.default_rng(seed))
    return results


def _check_form(cfg: MLAConfig, where: str, cache_dtype: str, rng: np.random.Generator) -> list[Result]:
    plan = make_plan(cfg, N_CTX, cache_dtype, caps().layout)
    pool = FieldPool()
    try:
        a = weights.AttentionBank(plan.attention[0], cfg, cache_dtype, pool, pool)
        f: Any = weights.FFNBank(plan.ffn[0], cfg, pool)
        s = state.State(cfg, N_CTX, caps(), pool, cfg.n_vocab)
        s.write_tables(Writer([s.rope, s.scale]))
        f.hidden = s.hidden[f.moe]
        source = RandomWeights(cfg, rng, moe=f.moe)
        source.upload(a, 1)
        source.upload(f, 1)
        x = rng.standard_normal(cfg.dim, np.float32)
        rows = rng.standard_normal((POSITION, cfg.cache_row_width), np.float32)
        return LayerCheck(cfg, a, f, s, 1, source, where).run(x, rows)
    finally:
        pool.destroy()
