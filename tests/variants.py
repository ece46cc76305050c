"""Small model shapes with odd sizes, one for each structure and each edge of the supported ranges.

Every file is below 2 MB and is written in a fraction of a second; :func:`variant_file` keeps it for the session.

llama.cpp (as in llama-cpp-python 0.3.36) runs all of them to the usual Q8_0 noise but these: it refuses u64 keys,
16-bit vectors, no shared experts, a missing q_lora_rank key and an untied plm; it takes a missing gating key for
softmax even where exp_probs_b exists; and the loud absorbed query leaves its number range.
"""

import os
import pathlib

from benchmarks.make_model import write_model
from benchmarks.shapes import ModelShape

_LITE = ModelShape(
    "lite", dim=64, n_layers=3, n_heads=3, n_vocab=389, ffn_dim=96,
    kv_lora_rank=96, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=64,
    n_experts=7, n_experts_used=3, expert_ffn_dim=32, n_shared_experts=2, gating_key=False,
    yarn_factor=40.0, yarn_log_mul=0.0707,
)  # fmt: skip
_Q_LORA = _LITE.replace(name="q_lora", q_lora_rank=32, n_heads=5, expert_weights_scale=16.0)
_V3 = ModelShape(
    "v3", dim=96, n_layers=3, n_heads=4, n_vocab=300, ffn_dim=160, q_lora_rank=64, split=True,
    kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=96,
    n_experts=12, n_experts_used=4, expert_ffn_dim=32, n_shared_experts=1,
    gating="sigmoid", expert_bias=True, expert_weights_norm=True, expert_weights_scale=2.5,
    n_expert_groups=3, n_expert_groups_used=2, yarn_factor=40.0, yarn_betas=(32.0, 1.0), pre="deepseek-v3",
)  # fmt: skip
_MOONLIGHT = _V3.replace(
    name="moonlight", q_lora_rank=0, kv_lora_rank=128, v_head_dim=32, n_expert_groups=1, n_expert_groups_used=1,
    expert_weights_scale=2.446, rope_base=50000.0, yarn_factor=1.0, rms_eps=1e-5, context_length=8192,
)  # fmt: skip
_GLM = _V3.replace(
    name="glm", n_heads=5, qk_nope_head_dim=96, v_head_dim=128, n_experts=8, n_expert_groups=1, n_expert_groups_used=1,
    expert_weights_scale=1.8, rope_base=1e6, yarn_factor=1.0, rms_eps=1e-5, context_length=202752, n_nextn_layers=1,
    pre="glm4",
)  # fmt: skip
_MISTRAL = _V3.replace(
    name="mistral", gating="softmax", expert_bias=False, expert_weights_scale=1.0, n_experts=8, n_experts_used=2,
    n_expert_groups=0, n_expert_groups_used=0, yarn_factor=36.0, yarn_orig_ctx=8192,
    attn_temp_scale=0.1, attn_temp_length=16, context_length=294912,
)  # fmt: skip
_DENSE = _LITE.replace(
    name="dense", n_experts=0, n_experts_used=0, expert_ffn_dim=0, n_shared_experts=0, n_heads=2, tied_head=True,
    q_lora_rank=32, split=True, yarn_factor=1.0, rope_base=1.6e6, context_length=131072, pre="youtu",
)  # fmt: skip
_MINICPM3 = ModelShape(
    "minicpm3", arch="minicpm3", dim=192, n_layers=3, n_heads=6, n_vocab=389, ffn_dim=224, q_lora_rank=96,
    kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=32,
    rope_base=None, rope_factors=True, tied_head=True, context_length=512, rms_eps=1e-5,
)  # fmt: skip
_PLM = ModelShape(
    "plm", arch="plm", dim=96, n_layers=3, n_heads=3, n_vocab=544, ffn_dim=352,
    kv_lora_rank=96, qk_nope_head_dim=64, qk_rope_head_dim=16, v_head_dim=32,
    rope_base=100000.0, tied_head=True, context_length=4096, pre="qwen2",
)  # fmt: skip

_TABLE = [
    # V2-Lite: sizes
    _LITE,
    _LITE.replace(name="lite_split", split=True, qk_nope_head_dim=96, v_head_dim=32),
    _LITE.replace(name="lite_40_layers", n_layers=40, n_dense_layers=38, n_heads=2, kv_lora_rank=32, v_head_dim=32),
    _LITE.replace(name="lite_27_layers", n_layers=27, n_dense_layers=25, n_heads=2, v_head_dim=32),  # no q_lora key
    _LITE.replace(name="lite_1_layer", n_layers=1, n_dense_layers=0),
    _LITE.replace(name="lite_all_moe", n_dense_layers=0, n_shared_experts=1),
    _LITE.replace(name="lite_kv_32", kv_lora_rank=32, qk_nope_head_dim=96),
    _LITE.replace(name="lite_kv_512", kv_lora_rank=512, n_heads=2),
    _LITE.replace(name="lite_kv_512_split", kv_lora_rank=512, n_heads=2, split=True, qk_nope_head_dim=96),
    _LITE.replace(name="lite_nope_48", qk_nope_head_dim=48, v_head_dim=32),  # unsplit rows need not tile
    _LITE.replace(name="lite_nope_160_v_96", qk_nope_head_dim=160, v_head_dim=96, n_heads=3),
    _LITE.replace(name="lite_nope_32_v_224", qk_nope_head_dim=32, v_head_dim=224, n_heads=2, split=True),
    _LITE.replace(name="lite_rope_128", qk_rope_head_dim=128, n_heads=2),
    _LITE.replace(name="lite_rope_64_split", qk_rope_head_dim=64, split=True, n_heads=7),
    _LITE.replace(name="lite_rope_18", qk_rope_head_dim=18, yarn_factor=8.0),  # C + R is no multiple of 4
    _LITE.replace(name="lite_1_head", n_heads=1, qk_nope_head_dim=96),
    _LITE.replace(name="lite_1_head_split", n_heads=1, qk_nope_head_dim=96, split=True, v_head_dim=32),
    _LITE.replace(name="lite_17_heads", n_heads=17, n_layers=2, v_head_dim=32),
    _LITE.replace(
        name="lite_128_heads", n_heads=128, n_layers=2, n_experts=4, n_experts_used=2, dim=32, kv_lora_rank=32,
        v_head_dim=32, qk_nope_head_dim=32,
    ),
    _LITE.replace(name="lite_vocab_127", n_vocab=127),
    _LITE.replace(name="lite_vocab_5001", n_vocab=5001, dim=32),
    _LITE.replace(name="lite_wide", dim=416, n_layers=2, n_vocab=270, n_experts=5),
    # V2-Lite: experts and keys
    _LITE.replace(name="lite_1_expert", n_experts=1, n_experts_used=1),
    _LITE.replace(name="lite_top_1", n_experts=9, n_experts_used=1),
    _LITE.replace(name="lite_top_all", n_experts=6, n_experts_used=6),
    _LITE.replace(name="lite_top_16", n_experts=33, n_experts_used=16, n_layers=2),
    _LITE.replace(name="lite_384_experts", dim=32, n_experts=384, n_experts_used=8, n_layers=2, n_heads=2),
    _LITE.replace(name="lite_no_shared", n_shared_experts=0),
    _LITE.replace(name="lite_weights_norm", expert_weights_norm=True, gating_key=True, expert_weights_scale=0.0),
    _LITE.replace(name="lite_no_scale_key", expert_weights_scale=None),
    _LITE.replace(name="lite_sigmoid_by_bias", gating="sigmoid", expert_bias=True, expert_weights_norm=False),
    _LITE.replace(name="lite_no_yarn", yarn_factor=1.0, rope_base=1e6, rms_eps=1e-5),
    _LITE.replace(name="lite_yarn_small", yarn_factor=4.0, yarn_orig_ctx=64, yarn_log_mul=0.05),  # slow pairs at once
    _LITE.replace(name="lite_yarn_betas", yarn_factor=16.0, yarn_orig_ctx=512, yarn_betas=(32.0, 1.0)),
    _LITE.replace(name="lite_tied", tied_head=True),
    _LITE.replace(name="lite_f16_vectors", vector_type="F16"),
    _LITE.replace(name="lite_bf16_vectors", vector_type="BF16", split=True),
    _LITE.replace(name="lite_u64_keys", u64_keys=True),
    _LITE.replace(name="lite_layer_arrays", layer_arrays=True),
    _LITE.replace(name="lite_q_lora_zero", n_layers=26, n_dense_layers=25, n_heads=2, v_head_dim=32, q_lora_key=True),
    _LITE.replace(name="lite_no_q_lora_key", q_lora_key=False, n_heads=2),
    # numbers that overflow or vanish in f16
    _LITE.replace(name="lite_loud_ffn", ffn_gain=3e5, residual_gain=1e3),
    _LITE.replace(name="lite_loud_q_abs", latent_gain=1e5),
    _LITE.replace(name="lite_subnormal", small_latents=True),
    # V2 with q_lora
    _Q_LORA,
    _Q_LORA.replace(name="q_lora_split", split=True, qk_nope_head_dim=96, v_head_dim=32, q_lora_rank=160),
    _Q_LORA.replace(name="q_lora_groups", split=True, n_experts=10, n_expert_groups=5, n_expert_groups_used=2),
    # V3
    _V3,
    _V3.replace(name="v3_unsplit", split=False, n_expert_groups=0, n_expert_groups_used=0, yarn_betas=None),
    _V3.replace(name="v3_fused", fused_gate_up=True, n_expert_groups=1, n_expert_groups_used=1),
    _V3.replace(name="v3_subnormal", small_latents=True, v_head_dim=64),
    _V3.replace(name="v3_8_groups", n_experts=64, n_experts_used=8, n_expert_groups=8, n_expert_groups_used=4, dim=64,
                n_layers=2),
    _V3.replace(name="v3_yarn_no_log_mul", yarn_log_mul=None),
    # Moonlight, Kimi-K2
    _MOONLIGHT,
    _MOONLIGHT.replace(name="kimi", q_lora_rank=96, yarn_factor=32.0, n_experts=96, n_experts_used=8, dim=64,
                       n_layers=2, yarn_betas=(1.0, 1.0), expert_weights_scale=2.827),
    # GLM-4.7-Flash
    _GLM,
    _GLM.replace(name="glm_unsplit_two_nextn", split=False, n_nextn_layers=2, n_layers=2, n_dense_layers=1),
    # Mistral-Large-3
    _MISTRAL,
    # no experts
    _DENSE,
    _DENSE.replace(name="dense_lite_unsplit", q_lora_rank=0, split=False, tied_head=False, n_layers=5, n_vocab=262),
    # other architectures
    _MINICPM3,
    _MINICPM3.replace(name="minicpm3_orig_ctx", rope_orig_ctx=256, context_length=1024, n_heads=3, dim=96, n_layers=4),
    _PLM,
    _PLM.replace(name="plm_untied", tied_head=False, n_heads=8, v_head_dim=64, kv_lora_rank=32),
]  # fmt: skip
VARIANTS = {s.name: s for s in _TABLE}
assert len(VARIANTS) == len(_TABLE), "two variants of one name"


def variant_file(name: str, directory, seed: int = 0) -> pathlib.Path:
    """Path of the variant's file in `directory`, written there unless it exists."""
    path = pathlib.Path(directory) / f"{name}-{seed}.gguf"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        write_model(part, VARIANTS[name], seed)
        part.rename(path)
    return path
