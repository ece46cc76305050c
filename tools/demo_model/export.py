"""Write the trained weights as a Q8_0 GGUF file, with the names and keys of llama.cpp's converter.

    python -m tools.demo_model.export build/demo/run build/demo/tokenizer.json tmla/data/demo.gguf

The layout is the current converter's for DeepSeek-V2: ``attn_kv_b`` split into ``attn_k_b`` and ``attn_v_b``.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch

from tools.demo_model.network import BETA_FAST, BETA_SLOW, RMS_EPS, ROPE_BASE, Shape, count_parameters
from tools.demo_model.tokens import BOS, CONTROL, EOS, PAD, PRE_TOKENIZER
from tools.demo_model.train import load_weights

NAME = "tmla demo"
DESCRIPTION = (
    "A small model of DeepSeek-V2's structure that writes English prose of the 17th to 19th century. "
    "Trained for tests and first steps, on public-domain text alone. It knows nothing."
)
LICENCE = "mit"
DATASETS = (
    ("Jane Austen: six novels", "Jane Austen"),
    ("Moby-Dick; or, The Whale", "Herman Melville"),
    ("The Bible, King James Version", ""),
    ("Annual messages of the presidents of the United States, 1790-1919", ""),
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "<|assistant|>{{ m['content'] }}{{ eos_token }}{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tensors_of(network):
    """All tensors under llama.cpp's names: dict name -> f32 array in NumPy order."""
    s = network.shape
    arrays = {name: p.detach().double().numpy() for name, p in network.named_parameters()}
    out = {"token_embd": arrays["embedding.weight"], "output_norm": arrays["norm.weight"]}
    out["output"] = arrays["head.weight"]
    for n in range(s.layers):

        def get(name, n=n):
            return arrays[f"blocks.{n}.{name}.weight"]

        kv_b = get("attn.kv_b").reshape(s.heads, s.nope + s.value, s.latent)
        layer = {
            "attn_norm": get("attn_norm"),
            "attn_q": get("attn.q"),
            "attn_kv_a_mqa": get("attn.kv_a"),
            "attn_kv_a_norm": get("attn.kv_a_norm"),
            "attn_k_b": kv_b[:, : s.nope].transpose(0, 2, 1),  # [H, C, N]: the blocks run along nope
            "attn_v_b": kv_b[:, s.nope :],  # [H, V, C]
            "attn_output": get("attn.output"),
            "ffn_norm": get("ffn_norm"),
        }
        if n == 0:
            layer |= {"ffn_gate": get("ffn.gate"), "ffn_up": get("ffn.up"), "ffn_down": get("ffn.down")}
        else:
            e, w = s.experts, s.expert_width
            layer |= {
                "ffn_gate_inp": get("ffn.router"),
                "ffn_gate_exps": get("ffn.routed.gate").reshape(e, w, s.width),
                "ffn_up_exps": get("ffn.routed.up").reshape(e, w, s.width),
                "ffn_down_exps": get("ffn.routed.down").reshape(s.width, e, w).transpose(1, 0, 2),
                "ffn_gate_shexp": get("ffn.shared.gate"),
                "ffn_up_shexp": get("ffn.shared.up"),
                "ffn_down_shexp": get("ffn.shared.down"),
            }
        out |= {f"blk.{n}.{name}": array for name, array in layer.items()}
    return {f"{name}.weight": np.ascontiguousarray(array, np.float32) for name, array in out.items()}


def load_tensors(network, arrays):
    """Put tensors under llama.cpp's names (dict name -> array, dequantised) into `network`; the inverse of export."""
    s = network.shape
    found = {"embedding.weight": "token_embd", "norm.weight": "output_norm", "head.weight": "output"}
    state = {ours: arrays[f"{theirs}.weight"] for ours, theirs in found.items()}
    for n in range(s.layers):

        def get(name, n=n):
            return arrays[f"blk.{n}.{name}.weight"]

        kv_b = np.concatenate((get("attn_k_b").transpose(0, 2, 1), get("attn_v_b")), axis=1)
        layer = {
            "attn_norm": get("attn_norm"),
            "attn.q": get("attn_q"),
            "attn.kv_a": get("attn_kv_a_mqa"),
            "attn.kv_a_norm": get("attn_kv_a_norm"),
            "attn.kv_b": kv_b.reshape(-1, s.latent),
            "attn.output": get("attn_output"),
            "ffn_norm": get("ffn_norm"),
        }
        if n == 0:
            layer |= {f"ffn.{part}": get(f"ffn_{part}") for part in ("gate", "up", "down")}
        else:
            layer |= {
                "ffn.router": get("ffn_gate_inp"),
                "ffn.routed.gate": get("ffn_gate_exps").reshape(-1, s.width),
                "ffn.routed.up": get("ffn_up_exps").reshape(-1, s.width),
                "ffn.routed.down": get("ffn_down_exps").transpose(1, 0, 2).reshape(s.width, -1),
            }
            layer |= {f"ffn.shared.{part}": get(f"ffn_{part}_shexp") for part in ("gate", "up", "down")}
        state |= {f"blocks.{n}.{name}.weight": array for name, array in layer.items()}
    network.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in state.items()})


def add_architecture(writer, s):
    """The keys of arch ``deepseek2``."""
    writer.add_block_count(s.layers)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.width)
    writer.add_feed_forward_length(s.dense_width)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(1)  # the latent is one key head
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_vocab_size(s.vocabulary)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(s.rope)
    writer.add_q_lora_rank(0)
    writer.add_kv_lora_rank(s.latent)
    writer.add_key_length(s.latent + s.rope)
    writer.add_value_length(s.latent)
    writer.add_key_length_mla(s.nope + s.rope)
    writer.add_value_length_mla(s.value)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_feed_forward_length(s.expert_width)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.experts_used)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(s.yarn_factor)
    writer.add_rope_scaling_orig_ctx_len(s.original_context)
    writer.add_rope_scaling_yarn_log_mul(0.1 * s.yarn_mscale)
    writer.add_rope_scaling_yarn_beta_fast(BETA_FAST)
    writer.add_rope_scaling_yarn_beta_slow(BETA_SLOW)


def add_tokenizer(writer, path):
    """Vocabulary, merges, control tokens and chat template from a ``tokenizer.json``."""
    model = json.loads(Path(path).read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [gguf.TokenType.CONTROL if t in CONTROL else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def export(network, tokenizer, path):
    """Write `network` and the tokenizer at `tokenizer` to the GGUF file `path`."""
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_type("model")
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license(LICENCE)
    writer.add_size_label(f"{count_parameters(network)[0] / 1e6:.0f}M")
    writer.add_languages(["en"])
    writer.add_dataset_count(len(DATASETS))
    for n, (name, author) in enumerate(DATASETS):
        writer.add_dataset_name(n, name)
        if author:
            writer.add_dataset_author(n, author)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_architecture(writer, network.shape)
    add_tokenizer(writer, tokenizer)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for name, array in tensors_of(network).items():
        if array.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_tensors(path):
    """All tensors of a GGUF file dequantised to f32: dict name -> array in NumPy order."""
    reader = gguf.GGUFReader(path)
    return {t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder with best-*.npz")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("path", type=Path, help="GGUF file to write")
    args = parser.parse_args()
    args.path.parent.mkdir(parents=True, exist_ok=True)
    export(load_weights(args.run, Shape()), args.tokenizer, args.path)
    print(f"{args.path}: {args.path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
