"""How much of a model the float64 reference can run in bounded time: tokens, and for very large models layers."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from tmla.check_weights import product
from tmla.config import MLAConfig
from tmla.gguf_file import GGUFFile

_PROBE_VALUES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much of the model the float64 reference runs."""

    n_tokens: int
    n_layers: int
    expected_s: float


def choose_extent(cfg: MLAConfig, values_s: float, max_s: float) -> Extent:
    """Choose prompt length and layers so that the reference takes about `max_s` seconds at most.

    Parameters
    ----------
    values_s : float
        Weights that the reference uses a second.
    """
    for n_tokens in (8, 4, 2):
        expected_s = reference_values(cfg, n_tokens, cfg.n_layers) / values_s
        if expected_s <= max_s:
            return Extent(n_tokens, cfg.n_layers, expected_s)
    first_moe = cfg.is_moe_layer.index(True) if cfg.n_moe_layers else 0
    n_layers = cfg.n_layers
    while n_layers > first_moe + 1 and reference_values(cfg, n_tokens, n_layers) / values_s > max_s:
        n_layers -= 1
    return Extent(n_tokens, n_layers, reference_values(cfg, n_tokens, n_layers) / values_s)


def reference_values(cfg: MLAConfig, n_tokens: int, n_layers: int) -> int:
    """Weights that the reference dequantises: each matrix once, of the experts at most those that the tokens choose."""
    d, h, c, q = cfg.dim, cfg.n_heads, cfg.kv_lora_rank, cfg.q_lora_rank
    heads = h * cfg.qk_head_dim
    attention = d * (q or heads) + q * heads + d * cfg.cache_row_width
    attention += h * (cfg.qk_nope_head_dim + cfg.v_head_dim) * c + h * cfg.v_head_dim * d
    experts = min(cfg.n_experts, n_tokens * cfg.n_experts_used)
    mixture = 3 * d * (experts * cfg.expert_ffn_dim + cfg.shared_ffn_dim)
    n_moe = sum(cfg.is_moe_layer[:n_layers])
    return cfg.n_vocab * d + n_layers * attention + n_moe * mixture + (n_layers - n_moe) * 3 * d * cfg.ffn_dim


def values_per_second(gf: GGUFFile) -> float:
    """Measure how many weights a second the reference uses here, on a piece of the embedding."""
    width = gf.tensors["token_embd.weight"].shape[-1]
    blocks = gf.q8_0_blocks("token_embd.weight")[: max(1, _PROBE_VALUES // width)]
    start = time.perf_counter()
    product(blocks, np.ones(width))
    return len(blocks) * width / (time.perf_counter() - start)


def fewer_layers(gf: GGUFFile, cfg: MLAConfig, n_layers: int) -> dict[str, Any]:
    """Overrides that make the file a model of its first `n_layers`; none if it has no more."""
    if n_layers == cfg.n_layers:
        return {}
    out: dict[str, Any] = {f"{cfg.arch}.block_count": n_layers}
    if f"{cfg.arch}.nextn_predict_layers" in gf.metadata:
        out[f"{cfg.arch}.nextn_predict_layers"] = 0
    if cfg.n_moe_layers:  # may have been read from the number of layers
        out[f"{cfg.arch}.expert_gating_func"] = {"softmax": 1, "sigmoid": 2}[cfg.gating]
    return out
