"""What a model file of a given shape holds: its metadata, and the shape and magnitude of each tensor.

Magnitudes keep activations near 1 at every depth: a matrix has standard deviation ``gain / sqrt(fan in)``; the branches
of all layers together add a fixed multiple of the embedding's variance to the residual stream.
"""

import dataclasses
import math

import numpy as np
from gguf import GGUFValueType

from benchmarks.gguf_stream import Typed
from benchmarks.shapes import ModelShape
from benchmarks.vocab import CHAT_TEMPLATE, CONTROL_TOKENS, build_vocab

SCORE_STD = 1.5  # of attention scores before the softmax
LOGIT_STD = 2.0
ROUTER_STD = {"softmax": 2.0, "sigmoid": 1.5}  # of router logits
BIAS_STD = {"softmax": 0.01, "sigmoid": 0.15}  # of exp_probs_b: enough to change the choice
SMALL_LATENT = 0.002
ATTENTION_RMS = 0.5  # of an average of unit values with scores of SCORE_STD, over some dozens of positions
FFN_RMS = {"swiglu": 0.5965, "relu2": 1.22}  # of the inner activations, for unit inputs
ROUTED_SHARE, SHARED_SHARE = 0.75, 0.65  # of an FFN branch with shared experts; squares add up to 1
MINICPM3_EMBD_SCALE, MINICPM3_RESIDUAL_SCALE, MINICPM3_LOGIT_BASE = 12.0, 1.4, 256.0


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A Q8_0 tensor: `gain / sqrt(fan in)` is its standard deviation; an array holds one gain per row."""

    name: str
    shape: tuple[int, ...]
    gain: float | np.ndarray


@dataclasses.dataclass(frozen=True)
class Vector:
    """A small float tensor: uniform in ``center +- spread``, normal when `normal`, or the given `values`."""

    name: str
    shape: tuple[int, ...]
    center: float = 0.0
    spread: float = 0.0
    normal: bool = False
    values: np.ndarray | None = None


def metadata(s: ModelShape) -> dict:
    """Keys and values as llama.cpp's converter writes them for this architecture."""
    meta = {
        "general.architecture": s.arch,
        "general.type": "model",
        "general.name": f"random {s.name}",
        "general.file_type": 7,  # mostly Q8_0
        "general.quantization_version": 2,
    }
    model = _model_keys(s)
    if s.u64_keys:
        for key, value in model.items():
            if isinstance(value, int) and not isinstance(value, bool):
                model[key] = Typed(GGUFValueType.UINT64, value)
    if s.layer_arrays:
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            value = model[key].value if isinstance(model[key], Typed) else model[key]
            model[key] = np.full(s.n_blocks, value, np.int32)
    meta |= {f"{s.arch}.{key}": value for key, value in model.items()}
    return meta | _tokenizer_keys(s)


def _model_keys(s: ModelShape) -> dict:
    keys: dict[str, object] = {
        "block_count": s.n_blocks,
        "context_length": s.context_length,
        "embedding_length": s.dim,
        "feed_forward_length": s.ffn_dim,
        "attention.head_count": s.n_heads,
        "attention.head_count_kv": 1 if s.split else s.n_heads,
        "attention.layer_norm_rms_epsilon": s.rms_eps,
        "vocab_size": s.n_vocab,
        "rope.dimension_count": s.qk_rope_head_dim,
        "attention.kv_lora_rank": s.kv_lora_rank,
        "attention.key_length": s.kv_lora_rank + s.qk_rope_head_dim if s.split else s.qk_head_dim,
    }
    if s.rope_base is not None:
        keys["rope.freq_base"] = s.rope_base
    if s.rope_orig_ctx:
        keys["rope.scaling.original_context_length"] = s.rope_orig_ctx
    if s.q_lora_rank or (s.arch == "deepseek2" and _writes_zero_q_lora(s)):
        keys["attention.q_lora_rank"] = s.q_lora_rank
    if s.arch != "minicpm3":
        keys["attention.value_length"] = s.kv_lora_rank if s.split else s.v_head_dim
    if s.split:
        keys["attention.key_length_mla"] = s.qk_head_dim
        keys["attention.value_length_mla"] = s.v_head_dim
    if s.arch == "deepseek2":
        keys |= _expert_keys(s)
    if s.n_nextn_layers:
        keys["nextn_predict_layers"] = s.n_nextn_layers
    if s.yarn_factor != 1.0:
        keys["rope.scaling.type"] = "yarn"
        keys["rope.scaling.factor"] = s.yarn_factor
        keys["rope.scaling.original_context_length"] = s.yarn_orig_ctx
        if s.yarn_log_mul is not None:
            keys["rope.scaling.yarn_log_multiplier"] = s.yarn_log_mul
        if s.yarn_betas is not None:
            keys["rope.scaling.yarn_beta_fast"], keys["rope.scaling.yarn_beta_slow"] = s.yarn_betas
    if s.attn_temp_scale:
        keys["attention.temperature_scale"] = s.attn_temp_scale
        keys["attention.temperature_length"] = s.attn_temp_length
    return keys


def _writes_zero_q_lora(s: ModelShape) -> bool:
    if s.q_lora_key is not None:
        return s.q_lora_key
    # llama.cpp demands the key of all files but these, which it takes for V2-Lite, GigaChat3 or Kanana-2
    return not (s.n_blocks in (26, 27) or (s.n_blocks == 48 and s.n_vocab == 128256))


def _expert_keys(s: ModelShape) -> dict:
    keys: dict[str, object] = {
        "leading_dense_block_count": s.n_dense,
        "expert_feed_forward_length": s.expert_ffn_dim or s.ffn_dim,
        "expert_shared_count": s.n_shared_experts,
    }
    if not s.n_experts:
        return keys
    keys |= {"expert_count": s.n_experts, "expert_used_count": s.n_experts_used}
    if s.gating_key:
        keys["expert_gating_func"] = {"softmax": 1, "sigmoid": 2}[s.gating]
    if s.expert_weights_norm is not None:
        keys["expert_weights_norm"] = s.expert_weights_norm
    if s.expert_weights_scale is not None:
        keys["expert_weights_scale"] = s.expert_weights_scale
    if s.n_expert_groups:
        keys["expert_group_count"] = s.n_expert_groups
        keys["expert_group_used_count"] = s.n_expert_groups_used
    return keys


def _tokenizer_keys(s: ModelShape) -> dict:
    tokens, types, merges = build_vocab(s.n_vocab)
    first = s.n_vocab - len(CONTROL_TOKENS)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": s.pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.ggml.padding_token_id": first + 4,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def routing_rms(s: ModelShape) -> float:
    """Root mean square over tokens of the norm of the chosen experts' weights, by simulation."""
    logits = np.random.default_rng(0).normal(0.0, ROUTER_STD[s.gating], (256, s.n_experts))
    scores = 1 / (1 + np.exp(-logits))
    if s.gating == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = -np.sort(-scores, axis=1)[:, : s.n_experts_used]
    if s.expert_weights_norm:
        chosen /= chosen.sum(1, keepdims=True)
    return float(np.sqrt((chosen**2).sum(1).mean())) * (s.expert_weights_scale or 1.0)


def tensors(s: ModelShape) -> list[Matrix | Vector]:
    """Every tensor of the file, in the order in which it is written."""
    embd_gain = s.residual_gain * math.sqrt(s.dim) / (MINICPM3_EMBD_SCALE if s.arch == "minicpm3" else 1.0)
    head_gain = embd_gain if s.tied_head else LOGIT_STD
    if s.arch == "minicpm3":
        head_gain *= MINICPM3_LOGIT_BASE / s.dim
    out: list[Matrix | Vector] = [
        Matrix("token_embd.weight", (s.n_vocab, s.dim), embd_gain),
        Vector("output_norm.weight", (s.dim,), LOGIT_STD / head_gain, 0.3 * LOGIT_STD / head_gain),
    ]
    if not s.tied_head:
        out.append(Matrix("output.weight", (s.n_vocab, s.dim), LOGIT_STD))
    if s.rope_factors:
        ramp = np.linspace(0.0, 1.0, s.qk_rope_head_dim // 2)
        for kind, top in (("long", 40.0), ("short", 4.0)):
            out.append(Vector(f"rope_factors_{kind}.weight", ramp.shape, values=top**ramp))
    for layer in range(s.n_blocks):
        out += _attention(s, f"blk.{layer}.") + _ffn(s, f"blk.{layer}.", dense=layer < s.n_dense)
        if layer >= s.n_layers:
            out.append(Matrix(f"blk.{layer}.nextn.eh_proj.weight", (s.dim, 2 * s.dim), 1.0))
            out += [_norm(f"blk.{layer}.nextn.{n}", s.dim) for n in ("enorm", "hnorm", "shared_head_norm")]
    return out


def _norm(stem: str, n: int, spread: float = 0.3, center: float = 1.0) -> Vector:
    return Vector(f"{stem}.weight", (n,), center, spread * center)


def _branch_gain(s: ModelShape) -> float:
    """Standard deviation that one branch adds to a residual stream which starts at `residual_gain`."""
    # with a tied head the input token's own logit must not win: the branches have to outweigh the embedding
    added = max(4.0, s.dim / 8) if s.tied_head else 4.0
    gain = s.residual_gain * math.sqrt(added / (2 * s.n_layers))
    return gain / (MINICPM3_RESIDUAL_SCALE / math.sqrt(s.n_layers)) if s.arch == "minicpm3" else gain


def _attention(s: ModelShape, b: str) -> list[Matrix | Vector]:
    n_q, width = s.n_heads * s.qk_head_dim, s.kv_lora_rank + s.qk_rope_head_dim
    q_gain = SCORE_STD / s.yarn_mscale
    small = SMALL_LATENT if s.small_latents else 1.0
    out: list[Matrix | Vector] = [_norm(f"{b}attn_norm", s.dim)]
    if s.q_lora_rank:
        out += [
            Matrix(f"{b}attn_q_a.weight", (s.q_lora_rank, s.dim), small),
            _norm(f"{b}attn_q_a_norm", s.q_lora_rank, 0.4),
            Matrix(f"{b}attn_q_b.weight", (n_q, s.q_lora_rank), q_gain),
        ]
    else:
        out.append(Matrix(f"{b}attn_q.weight", (n_q, s.dim), q_gain))
    rows = np.repeat([small, 1.0], [s.kv_lora_rank, s.qk_rope_head_dim])
    out += [
        Matrix(f"{b}attn_kv_a_mqa.weight", (width, s.dim), rows if s.small_latents else 1.0),
        _norm(f"{b}attn_kv_a_norm", s.kv_lora_rank, 0.4, 1.0 / s.latent_gain),
    ]
    if s.split:
        # the sum over the latent is what has to stay near 1, whichever axis the blocks run along
        k_gain = s.latent_gain * math.sqrt(s.qk_nope_head_dim / s.kv_lora_rank)
        out += [
            Matrix(f"{b}attn_k_b.weight", (s.n_heads, s.kv_lora_rank, s.qk_nope_head_dim), k_gain),
            Matrix(f"{b}attn_v_b.weight", (s.n_heads, s.v_head_dim, s.kv_lora_rank), s.latent_gain),
        ]
    else:
        n_kv = s.n_heads * (s.qk_nope_head_dim + s.v_head_dim)
        out.append(Matrix(f"{b}attn_kv_b.weight", (n_kv, s.kv_lora_rank), s.latent_gain))
    o_gain = _branch_gain(s) / ATTENTION_RMS
    return [*out, Matrix(f"{b}attn_output.weight", (s.dim, s.n_heads * s.v_head_dim), o_gain)]


def _ffn(s: ModelShape, b: str, *, dense: bool) -> list[Matrix | Vector]:
    out: list[Matrix | Vector] = [_norm(f"{b}ffn_norm", s.dim)]
    gated, branch = s.arch != "plm", _branch_gain(s)
    down = branch / FFN_RMS["swiglu" if gated else "relu2"] / (s.ffn_gain if gated else s.ffn_gain**2)

    def mlp(suffix: str, lead: tuple[int, ...], width: int, down_gain: float, fused: bool = False) -> list[Matrix]:
        up = [Matrix(f"{b}ffn_up{suffix}.weight", (*lead, width, s.dim), s.ffn_gain)]
        gate = [Matrix(f"{b}ffn_gate{suffix}.weight", (*lead, width, s.dim), 1.0)] if gated else []
        if fused:
            rows = np.tile(np.repeat([1.0, s.ffn_gain], width), lead[0])  # gate rows first
            gate, up = [Matrix(f"{b}ffn_gate_up{suffix}.weight", (*lead, 2 * width, s.dim), rows)], []
        return [*gate, *up, Matrix(f"{b}ffn_down{suffix}.weight", (*lead, s.dim, width), down_gain)]

    if dense:
        return out + mlp("", (), s.ffn_dim, down)
    shared = s.shared_ffn_dim > 0
    routed_down = down * (ROUTED_SHARE if shared else 1.0) / routing_rms(s)
    router_std = ROUTER_STD[s.gating] / math.sqrt(s.dim)
    out.append(Vector(f"{b}ffn_gate_inp.weight", (s.n_experts, s.dim), 0.0, router_std, normal=True))
    if s.expert_bias:
        out.append(Vector(f"{b}exp_probs_b.bias", (s.n_experts,), 0.0, BIAS_STD[s.gating], normal=True))
    out += mlp("_exps", (s.n_experts,), s.expert_ffn_dim, routed_down, s.fused_gate_up)
    if shared:
        out += mlp("_shexp", (), s.shared_ffn_dim, down * SHARED_SHARE)
    return out
