"""From metadata and tensor names to the fields of MLAConfig: what is there decides, what is assumed is noted."""

import math

from tmla.config_ffn import read_ffn
from tmla.config_rope import read_rope
from tmla.gguf_kind import show
from tmla.keys import Keys

ARCHITECTURES = ("deepseek2", "minicpm3", "plm")
Q8_BLOCK = 32
LEAST_TENSORS = 6  # of a block; no known model has fewer than 9
MAX_ROTATED = 1 << 16  # known models have up to 64; rope factors of that many pairs are read early


def read_fields(gf):
    """Return all fields of MLAConfig but `ignored_tensors`, as a dict.

    Parameters
    ----------
    gf : GGUFFile

    Raises
    ------
    GGUFError
        Unknown architecture, a needed key or tensor is missing, or a value that no model can have.
    """
    arch = gf.metadata.get("general.architecture")
    keys = Keys(gf, arch)
    if arch is None:
        keys.fail("key 'general.architecture' is missing, expected in every model; download or convert it again")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        keys.fail(
            f"general.architecture is {show(arch)!r}, expected one of {', '.join(ARCHITECTURES)}; "
            "tmla runs Multi-head Latent Attention models only"
        )
    keys.notes.extend(gf.notes)
    for key, value in gf.overridden.items():
        keys.note(f"{show(key)} was overridden with {show(value)}.")
    fields = {"arch": arch} | _sizes(keys)
    fields |= _attention(keys, fields)
    fields |= read_ffn(keys, fields)
    fields |= read_rope(keys, fields)
    fields |= _scales(keys, fields)
    name = gf.metadata.get("general.name")
    fields["name"] = name if isinstance(name, str) and name else gf.name
    fields["notes"] = tuple(keys.notes)
    return fields


def _sizes(keys):
    n_tensors = len(keys.gf.tensors)
    n_blocks = keys.integer("block_count", minimum=1)
    if n_blocks * LEAST_TENSORS > n_tensors:  # before anything is made for each layer
        most = n_tensors // LEAST_TENSORS
        keys.fail_key("block_count", n_blocks, f"at most {most}, as the file has {n_tensors} tensors")
    n_nextn = _nextn(keys, n_blocks)
    tied = "output.weight" not in keys.gf.tensors
    if tied:
        keys.note("output.weight is absent: the embedding is the head, too (tied).")
    return {
        "n_layers": n_blocks - n_nextn,
        "n_nextn_layers": n_nextn,
        "dim": keys.integer("embedding_length", minimum=1),
        "n_heads": keys.integer("attention.head_count", minimum=1),
        "n_vocab": _vocabulary(keys),
        "context_length": keys.integer("context_length", minimum=1),
        "rms_eps": keys.number("attention.layer_norm_rms_epsilon", above=0.0),
        "tied_head": tied,
    }


def _nextn(keys, n_blocks):
    if keys.has("nextn_predict_layers"):
        n_nextn = keys.integer("nextn_predict_layers")
    else:
        blocks = {name.split(".")[1] for name in keys.gf.tensors if name.startswith("blk.") and ".nextn." in name}
        n_nextn = 0
        while str(n_blocks - n_nextn - 1) in blocks:
            n_nextn += 1
        if n_nextn:
            keys.note(f"No nextn_predict_layers: the last {n_nextn} blocks hold nextn tensors, so count as such.")
    if n_nextn >= n_blocks:
        keys.fail_key("nextn_predict_layers", n_nextn, f"fewer than block_count ({n_blocks})")
    return n_nextn


def _vocabulary(keys):
    shape = keys.tensor("token_embd.weight").shape
    if len(shape) != 2 or shape[0] < 1:
        keys.fail(f"tensor 'token_embd.weight' has shape {list(shape)}, expected [vocabulary, D]; re-convert the model")
    n_vocab, tokens = shape[0], keys.gf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > n_vocab:
        keys.fail(
            f"tensor 'token_embd.weight' has {n_vocab} rows, expected one for each of the tokenizer's {len(tokens)} "
            "tokens; re-convert the model"
        )
    if isinstance(tokens, list) and len(tokens) < n_vocab:
        keys.note(f"The embedding has {n_vocab} rows, the tokenizer {len(tokens)} tokens: the other ids have no text.")
    told = keys.integer("vocab_size", n_vocab)
    if told != n_vocab:
        keys.note(f"vocab_size is {told}, but the embedding has {n_vocab} rows, which count.")
    return n_vocab


def _attention(keys, fields):
    latent = keys.integer("attention.kv_lora_rank", minimum=1)
    if latent % Q8_BLOCK:
        found = f"{latent}, and {latent} values do not tile into Q8_0 blocks"
        keys.fail_key("attention.kv_lora_rank", found, f"a multiple of {Q8_BLOCK}", "tmla cannot run this model")
    rotated = keys.integer("rope.dimension_count", minimum=2)
    if rotated % 2 or rotated > MAX_ROTATED:
        keys.fail_key("rope.dimension_count", rotated, f"an even number, as rope turns pairs, up to {MAX_ROTATED}")
    split = _is_split(keys)
    if split and not keys.has("attention.key_length_mla"):
        qk, value = _split_widths(keys, rotated)
        keys.note("key_length_mla is missing: the head widths are those of attn_k_b and attn_v_b.")
    else:
        key = "attention.key_length_mla" if keys.has("attention.key_length_mla") else "attention.key_length"
        qk = keys.integer(key, minimum=1)
        if qk <= rotated:
            keys.fail_key(key, qk, f"more than rope.dimension_count ({rotated})")
        value = _value_width(keys, fields)
    if split and (qk - rotated) % Q8_BLOCK:
        keys.fail(
            f"tensor 'blk.0.attn_k_b.weight' has rows of N = {qk - rotated} (key_length_mla {qk} - rope {rotated}), "
            f"expected a multiple of {Q8_BLOCK}, as its Q8_0 blocks lie along them; convert to the unsplit attn_kv_b"
        )
    return {
        "q_lora_rank": _q_lora_rank(keys),
        "kv_lora_rank": latent,
        "qk_nope_head_dim": qk - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "kv_b_split": split,
    }


def _is_split(keys):
    tensors = keys.gf.tensors
    split, unsplit = "blk.0.attn_k_b.weight" in tensors, "blk.0.attn_kv_b.weight" in tensors
    if split and unsplit:
        split = keys.has("attention.key_length_mla")
        keys.note(f"Both kv_b layouts are there: {'attn_k_b and attn_v_b are' if split else 'attn_kv_b is'} used.")
    return split


def _split_widths(keys, rotated):
    k_b, v_b = (keys.tensor(f"blk.0.attn_{part}_b.weight").shape for part in "kv")
    if len(k_b) != 3 or len(v_b) != 3:
        keys.fail(
            f"tensors 'blk.0.attn_k_b.weight' and 'blk.0.attn_v_b.weight' have shapes {list(k_b)} and {list(v_b)}, "
            "expected [H, C, N] and [H, V, C]; re-convert the model"
        )
    return k_b[2] + rotated, v_b[1]


def _value_width(keys, fields):
    for key in ("attention.value_length_mla", "attention.value_length"):
        if keys.has(key) or (keys.arch != "minicpm3" and key == "attention.value_length"):
            return keys.integer(key, minimum=1)
    dim, n_heads = fields["dim"], fields["n_heads"]
    if dim % n_heads:
        keys.fail_key("embedding_length", dim, f"a multiple of head_count ({n_heads}), as value_length is missing")
    keys.note("value_length is missing: the value width is embedding_length / head_count.")
    return dim // n_heads


def _q_lora_rank(keys):
    told = keys.integer("attention.q_lora_rank", 0)
    info = keys.gf.tensors.get("blk.0.attn_q_a.weight")
    if info is None:
        if told:
            keys.note(f"q_lora_rank is {told}, but there is no attn_q_a: queries come from the single attn_q.")
        return 0
    found = info.shape[0]
    if told not in (0, found):
        keys.fail_key("attention.q_lora_rank", told, f"the {found} rows of 'blk.0.attn_q_a.weight'")
    if not told:
        keys.note(f"q_lora_rank is missing or 0, but attn_q_a has {found} rows, which count.")
    return found


def _scales(keys, fields):
    scales = {"embd_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
    if keys.arch == "minicpm3":
        scales = {
            "embd_scale": 12.0,
            "residual_scale": 1.4 / math.sqrt(fields["n_layers"]),
            "logit_scale": 256.0 / fields["dim"],
        }
        keys.note("minicpm3 files hold no scales: embedding 12, branches 1.4/sqrt(L), logits 256/D are the model's.")
        for key, value in zip(("embedding_scale", "residual_scale"), scales.values()):
            if not math.isclose(keys.number(key, value), value, rel_tol=1e-3):
                keys.fail_key(key, keys.number(key), f"{value:g} or no such key, as in every known minicpm3 model")
    temp_scale = keys.number("attention.temperature_scale", 0.0)
    temp_length = keys.integer("attention.temperature_length", minimum=1) if temp_scale else 0
    return scales | {"attn_temp_scale": temp_scale, "attn_temp_length": temp_length}
