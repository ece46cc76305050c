"""A file of DeepSeek-V2-Lite's real shapes without its data: what the configuration and the checks look at."""

import math
import types

import pytest

from tmla.config import MLAConfig
from tmla.errors import GGUFError
from tmla.gguf_file import TensorInfo

D, H, C, N, R, V, F, E, F_E, VOCAB = 2048, 16, 512, 128, 64, 128, 10944, 64, 1408, 102400  # DeepSeek-V2-Lite
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}


def tensor(name, shape, kind="Q8_0"):
    n_values = math.prod(shape)
    return TensorInfo(name, tuple(shape), kind, n_values * FLOATS[kind] if kind in FLOATS else n_values // 32 * 34, 0)


def v2_lite(n_layers=27, n_dense=1, router=True):
    """A file of V2-Lite's shapes without its data: what the configuration and the checks look at."""
    shapes = {"token_embd.weight": [VOCAB, D], "output_norm.weight": [D], "output.weight": [VOCAB, D]}
    for i in range(n_layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": [D],
            f"blk.{i}.attn_q.weight": [H * (N + R), D],
            f"blk.{i}.attn_kv_a_mqa.weight": [C + R, D],
            f"blk.{i}.attn_kv_a_norm.weight": [C],
            f"blk.{i}.attn_kv_b.weight": [H * (N + V), C],
            f"blk.{i}.attn_output.weight": [D, H * V],
            f"blk.{i}.ffn_norm.weight": [D],
        }
        if i < n_dense or not router:
            shapes |= {f"blk.{i}.ffn_{part}.weight": [F, D] for part in ("gate", "up")}
            shapes[f"blk.{i}.ffn_down.weight"] = [D, F]
        else:
            shapes[f"blk.{i}.ffn_gate_inp.weight"] = [E, D]
            shapes |= {f"blk.{i}.ffn_{part}_exps.weight": [E, F_E, D] for part in ("gate", "up")}
            shapes[f"blk.{i}.ffn_down_exps.weight"] = [E, D, F_E]
            shapes |= {f"blk.{i}.ffn_{part}_shexp.weight": [2 * F_E, D] for part in ("gate", "up")}
            shapes[f"blk.{i}.ffn_down_shexp.weight"] = [D, 2 * F_E]
    vector = ("norm.weight", "ffn_gate_inp.weight")
    metadata = {
        "block_count": n_layers, "context_length": 163840, "embedding_length": D, "feed_forward_length": F,
        "attention.head_count": H, "attention.layer_norm_rms_epsilon": 1e-6, "attention.kv_lora_rank": C,
        "attention.key_length": N + R, "attention.value_length": V, "leading_dense_block_count": n_dense,
        "expert_count": E, "expert_used_count": 6, "expert_feed_forward_length": F_E, "expert_shared_count": 2,
        "expert_weights_scale": 1.0, "rope.dimension_count": R, "rope.freq_base": 10000.0, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    }  # fmt: skip
    return types.SimpleNamespace(
        name="lite.gguf",
        metadata={"general.architecture": "deepseek2"} | {f"deepseek2.{key}": value for key, value in metadata.items()},
        overridden={},
        notes=(),
        tensors={n: tensor(n, shape, "F32" if n.endswith(vector) else "Q8_0") for n, shape in shapes.items()},
    )


def with_keys(gf=None, **keys):
    """The file with keys set; dots are written as two underscores, None removes the key."""
    gf = gf or v2_lite()
    for key, value in keys.items():
        key = "deepseek2." + key.replace("__", ".")
        gf.metadata[key] = value
        if value is None:
            del gf.metadata[key]
    return gf


def config(gf=None, **keys):
    return MLAConfig.from_gguf(with_keys(gf, **keys))


def refused(call, *args):
    """The one line that a refused file ends with."""
    with pytest.raises(GGUFError) as error:
        call(*args)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("lite.gguf: ")
    return message


def split(gf, n=N):
    """The file with attn_k_b (rows of `n`) and attn_v_b in place of attn_kv_b."""
    for i in range(27):
        gf.tensors.pop(f"blk.{i}.attn_kv_b.weight", None)
        gf.tensors[f"blk.{i}.attn_k_b.weight"] = tensor(f"blk.{i}.attn_k_b.weight", [H, C, n])
        gf.tensors[f"blk.{i}.attn_v_b.weight"] = tensor(f"blk.{i}.attn_v_b.weight", [H, V, C])
    return gf
