"""From metadata and tensor names to the fields of MLAConfig: what is there decides, what is assumed is noted."""

import math

from tmla.keys import Keys

ARCHITECTURES = ("deepseek2", "minicpm3", "plm")
Q8_BLOCK = 32
GATING = {1: "softmax", 2: "sigmoid"}
GLM_FLASH = (47, 48, 154880)  # block counts without and with the MTP block, vocabulary: GLM-4.7-Flash files lack the gating key


def read_fields(gf):
    """Return all fields of MLAConfig but `ignored_tensors` as a dict. Raises GGUFError."""
    arch = gf.metadata.get("general.architecture")
    keys = Keys(gf, arch)
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        keys.fail(
            f"general.architecture is {arch!r}, expected one of {', '.join(ARCHITECTURES)}; "
            "tmla runs Multi-head Latent Attention models only"
        )
    for key, value in gf.overridden.items():
        keys.note(f"{key} was overridden with {value!r}.")
    fields = {"arch": arch} | _sizes(keys)
    fields |= _attention(keys, fields)
    fields |= _ffn(keys, fields)
    fields |= _rope(keys, fields)
    fields |= _scales(keys, fields)
    name = gf.metadata.get("general.name")
    fields["name"] = name if isinstance(name, str) and name else gf.name
    fields["notes"] = tuple(keys.notes)
    return fields


def _sizes(keys):
    tensors = keys.gf.tensors
    n_blocks = keys.integer("block_count", minimum=1)
    if n_blocks > len(tensors):
        keys.fail_key("block_count", n_blocks, f"fewer than the {len(tensors)} tensors of the file")
    if keys.has("nextn_predict_layers"):
        n_nextn = keys.integer("nextn_predict_layers")
    else:
        with_nextn = {name.split(".")[1] for name in tensors if name.startswith("blk.") and ".nextn." in name}
        n_nextn = 0
        while str(n_blocks - n_nextn - 1) in with_nextn:
            n_nextn += 1
        if n_nextn:
            keys.note(f"nextn_predict_layers is missing; the last {n_nextn} blocks hold nextn tensors and count as such.")
    if n_nextn >= n_blocks:
        keys.fail_key("nextn_predict_layers", n_nextn, f"fewer than block_count ({n_blocks})")
    dim = keys.integer("embedding_length", minimum=1)
    return {
        "n_layers": n_blocks - n_nextn,
        "n_nextn_layers": n_nextn,
        "dim": dim,
        "n_heads": keys.integer("attention.head_count", minimum=1),
        "n_vocab": _vocabulary(keys),
        "context_length": keys.integer("context_length", minimum=1),
        "rms_eps": keys.number("attention.layer_norm_rms_epsilon", above=0.0),
        "tied_head": _tied(keys),
    }


def _vocabulary(keys):
    shape = keys.tensor("token_embd.weight").shape
    if len(shape) != 2:
        keys.fail(f"tensor 'token_embd.weight' has shape {list(shape)}, expected [vocabulary, D]; re-convert the model")
    n_vocab = shape[0]
    n_tokens = keys.gf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(n_tokens, list):
        if len(n_tokens) > n_vocab:
            keys.fail(
                f"the tokenizer has {len(n_tokens)} tokens, but 'token_embd.weight' only {n_vocab} rows; re-convert the model"
            )
        if len(n_tokens) < n_vocab:
            keys.note(f"The embedding has {n_vocab} rows, the tokenizer {len(n_tokens)} tokens: the rest has no text.")
    if keys.has("vocab_size") and keys.integer("vocab_size") != n_vocab:
        keys.note(f"vocab_size is {keys.integer('vocab_size')}, but the embedding has {n_vocab} rows, which count.")
    return n_vocab


def _tied(keys):
    tied = "output.weight" not in keys.gf.tensors
    if tied:
        keys.note("output.weight is absent: the head is the embedding (tied).")
    return tied


def _attention(keys, fields):
    tensors, n_heads, dim = keys.gf.tensors, fields["n_heads"], fields["dim"]
    latent = keys.integer("attention.kv_lora_rank", minimum=1)
    if latent % Q8_BLOCK:
        keys.fail_key(
            "attention.kv_lora_rank", latent, f"a multiple of {Q8_BLOCK}", "such latents cannot be stored in Q8_0 blocks"
        )
    rotated = keys.integer("rope.dimension_count", minimum=2)
    if rotated % 2:
        keys.fail_key("rope.dimension_count", rotated, "an even number: rope turns pairs")

    split = "blk.0.attn_k_b.weight" in tensors
    if split and "blk.0.attn_kv_b.weight" in tensors:
        split = keys.has("attention.key_length_mla")
        keys.note(f"The file has attn_kv_b and attn_k_b/attn_v_b; the {'split' if split else 'unsplit'} tensors are used.")
    if split and not keys.has("attention.key_length_mla"):
        qk, value = _split_widths(keys, rotated)
        keys.note("key_length_mla is missing; the head widths are those of attn_k_b and attn_v_b.")
    else:
        qk_key = "attention.key_length_mla" if keys.has("attention.key_length_mla") else "attention.key_length"
        qk = keys.integer(qk_key, minimum=1)
        value = _value_width(keys, n_heads, dim)
        if qk <= rotated:
            keys.fail_key(qk_key, qk, f"more than rope.dimension_count ({rotated})")
    nope = qk - rotated
    if split and nope % Q8_BLOCK:
        keys.fail(
            f"attn_k_b runs along nope = {nope} (key_length_mla {qk} - rope {rotated}), expected a multiple of {Q8_BLOCK}: "
            "the Q8_0 blocks of a split file lie along it; convert to the unsplit attn_kv_b layout"
        )
    return {
        "q_lora_rank": _q_lora_rank(keys),
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "kv_b_split": split,
    }


def _split_widths(keys, rotated):
    k_b, v_b = (keys.tensor(f"blk.0.attn_{part}_b.weight").shape for part in "kv")
    if len(k_b) != 3 or len(v_b) != 3:
        keys.fail(
            f"tensors 'blk.0.attn_k_b.weight' and 'blk.0.attn_v_b.weight' have shapes {list(k_b)} and {list(v_b)}, "
            "expected [H, C, N] and [H, V, C]; re-convert the model"
        )
    return k_b[2] + rotated, v_b[1]


def _value_width(keys, n_heads, dim):
    for key in ("attention.value_length_mla", "attention.value_length"):
        if keys.has(key):
            return keys.integer(key, minimum=1)
    if keys.arch != "minicpm3":
        return keys.integer("attention.value_length", minimum=1)  # fails: the key is missing
    if dim % n_heads:
        keys.fail_key("embedding_length", dim, f"a multiple of head_count ({n_heads}), as value_length is missing")
    keys.note("value_length is missing; the value width is embedding_length / head_count.")
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
        keys.note(f"q_lora_rank is missing or 0; attn_q_a has {found} rows, which count.")
    return found


def _ffn(keys, fields):
    tensors, arch, n_layers = keys.gf.tensors, fields["arch"], fields["n_layers"]
    is_moe = tuple(f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(n_layers))
    for i, moe in enumerate(is_moe):
        stray = [f"blk.{i}.ffn_{part}_exps.weight" for part in ("gate", "up", "gate_up", "down")]
        stray = [name for name in stray if name in tensors]
        if stray and not moe:
            keys.fail(f"tensor 'blk.{i}.ffn_gate_inp.weight' is missing, expected beside {stray[0]!r}; re-convert the model")
    if any(is_moe) and arch != "deepseek2":
        keys.fail(f"architecture {arch} has routed experts (ffn_gate_inp), expected dense layers only; no such model is known")
    dense = [i for i, moe in enumerate(is_moe) if not moe]
    told = keys.integer("leading_dense_block_count", 0)
    if any(is_moe) and dense != list(range(told)):
        keys.note(f"leading_dense_block_count is {told}, but {len(dense)} layers have no router: those are dense.")
    return {
        "ffn_dim": keys.integer("feed_forward_length", minimum=1, layers=dense) if dense else 0,
        "ffn_act": "relu2" if arch == "plm" else "swiglu",
        "is_moe_layer": is_moe,
    } | (_experts(keys, fields, is_moe.index(True)) if any(is_moe) else _no_experts(keys))


def _no_experts(keys):
    if keys.integer("expert_count", 0):
        keys.note(f"expert_count is {keys.integer('expert_count')}, but no layer has a router: all layers are dense.")
    return {
        "n_experts": 0, "n_experts_used": 0, "n_expert_groups": 1, "n_expert_groups_used": 1,
        "expert_ffn_dim": 0, "shared_ffn_dim": 0, "gating": "softmax", "gating_source": "no layer has experts",
        "has_expert_bias": False, "expert_weights_norm": False, "expert_weights_scale": 1.0, "fused_gate_up": False,
    }  # fmt: skip


def _experts(keys, fields, first):
    tensors = keys.gf.tensors
    moe_block = f"blk.{first}."
    n_experts = keys.integer("expert_count", minimum=1)
    n_used = keys.integer("expert_used_count", minimum=1)
    if n_used > n_experts:
        keys.fail_key("expert_used_count", n_used, f"at most expert_count ({n_experts})")
    has_bias = any(f"blk.{i}.exp_probs_b.bias" in tensors for i in range(fields["n_layers"]))
    gating, source = _gating(keys, fields, has_bias)
    scale = keys.number("expert_weights_scale", 0.0)
    if scale == 0.0:
        keys.note("expert_weights_scale is missing or 0: 1.0 is used.")
    if not keys.has("expert_weights_norm"):
        keys.note("expert_weights_norm is missing: the weights of the chosen experts are not normalised.")
    width = keys.integer("expert_feed_forward_length", minimum=1)
    n_groups, n_groups_used = _groups(keys, n_experts, n_used)
    return {
        "n_experts": n_experts,
        "n_experts_used": n_used,
        "n_expert_groups": n_groups,
        "n_expert_groups_used": n_groups_used,
        "expert_ffn_dim": width,
        "shared_ffn_dim": _shared_width(keys, moe_block, width),
        "gating": gating,
        "gating_source": source,
        "has_expert_bias": has_bias,
        "expert_weights_norm": keys.flag("expert_weights_norm", False),
        "expert_weights_scale": scale or 1.0,
        "fused_gate_up": moe_block + "ffn_gate_up_exps.weight" in tensors,
    }


def _gating(keys, fields, has_bias):
    code = keys.integer("expert_gating_func", 0)
    if code in GATING:
        return GATING[code], f"expert_gating_func is {code}"
    if code:
        keys.fail_key("expert_gating_func", code, "1 (softmax) or 2 (sigmoid)")
    n_blocks = fields["n_layers"] + fields["n_nextn_layers"]
    if has_bias:
        gating, source = "sigmoid", "expert_gating_func is missing, and exp_probs_b exists"
    elif n_blocks in GLM_FLASH[:2] and fields["n_vocab"] == GLM_FLASH[2]:
        gating, source = "sigmoid", f"expert_gating_func is missing; {n_blocks} blocks, {GLM_FLASH[2]} tokens: GLM-4.7-Flash"
    else:
        gating, source = "softmax", "expert_gating_func is missing, and there is no exp_probs_b"
    keys.note(f"Gating is {gating}: {source}.")
    return gating, source


def _groups(keys, n_experts, n_used):
    n_groups = keys.integer("expert_group_count", 1) or 1
    if n_groups == 1:
        return 1, 1
    used = keys.integer("expert_group_used_count", minimum=1)
    if n_experts % n_groups or n_experts // n_groups < 2:
        keys.fail_key("expert_group_count", n_groups, f"a divisor of expert_count ({n_experts}) that leaves two or more per group")
    if used > n_groups or used * (n_experts // n_groups) < n_used:
        keys.fail_key(
            "expert_group_used_count", used, f"at most {n_groups} groups, holding at least {n_used} experts to choose from"
        )
    if used == n_groups:
        keys.note(f"All {n_groups} expert groups are used: routing is not limited.")
        return 1, 1
    return n_groups, used


def _shared_width(keys, moe_block, expert_width):
    n_shared = keys.integer("expert_shared_count", 0)
    info = keys.gf.tensors.get(moe_block + "ffn_gate_shexp.weight")
    if info is None:
        return n_shared * expert_width  # when not 0, check_tensors finds the tensors missing
    if info.shape[0] != n_shared * expert_width:
        keys.note(
            f"expert_shared_count is {n_shared} of width {expert_width}, but ffn_gate_shexp has {info.shape[0]} rows, which count."
        )
    return info.shape[0]


def _rope(keys, fields):
    base = keys.number("rope.freq_base", 10000.0, above=1.0)
    if not keys.has("rope.freq_base"):
        keys.note("rope.freq_base is missing: 10000 is used.")
    orig = keys.integer("rope.scaling.original_context_length", 0) or fields["context_length"]
    out = {
        "rope_base": base,
        "rope_pairs": "half" if keys.arch == "minicpm3" else "consecutive",
        "rope_scaling": _rope_kind(keys),
        "yarn_factor": 1.0,
        "yarn_orig_ctx": orig,
        "yarn_log_mul": 0.0,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "rope_factors_long": (),
        "rope_factors_short": (),
        "rope_orig_ctx": orig,
    }
    if out["rope_scaling"] == "yarn":
        out |= _yarn(keys)
    if out["rope_scaling"] == "longrope":
        out |= {f"rope_factors_{which}": _rope_factors(keys, which, fields) for which in ("long", "short")}
    if out["rope_scaling"] != "none" and not keys.has("rope.scaling.original_context_length"):
        keys.note(f"rope.scaling.original_context_length is missing: context_length, {orig}, takes its place.")
    return out


def _rope_kind(keys):
    told = keys.text("rope.scaling.type", "")
    factor = keys.number("rope.scaling.factor", 0.0, minimum=0.0) or keys.number("rope.scale_linear", 0.0, minimum=0.0)
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if keys.number(f"rope.scaling.{key}", 1.0) != 1.0:
            keys.fail_key(f"rope.scaling.{key}", keys.number(f"rope.scaling.{key}"), "1.0 or no such key; no such model is known")
    if keys.arch == "minicpm3" and told in ("", "none", "longrope"):
        present = [f"rope_factors_{which}.weight" in keys.gf.tensors for which in ("long", "short")]
        if any(present) or told == "longrope":
            return "longrope"
    if told == "yarn" and keys.arch == "deepseek2":
        return "yarn"
    if told == "none" or (told in ("", "linear") and factor in (0.0, 1.0)):
        if factor not in (0.0, 1.0):
            keys.note(f"rope.scaling.factor is {factor:g}, but rope.scaling.type is none: the factor is ignored.")
        return "none"
    found = f"missing, with a factor of {factor:g}" if not told else repr(told)
    return keys.fail_key("rope.scaling.type", found, "yarn, or no scaling", "if the model uses YaRN, override the key with yarn")


def _yarn(keys):
    log_mul = keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=0.0)
    if log_mul == 0.0:
        keys.note(
            "yarn_log_multiplier is missing or 0: as llama.cpp does, 1 + 0.1 ln factor multiplies cos and sin, and its square the scores."
        )
    betas = {}
    for name, usual in (("fast", 32.0), ("slow", 1.0)):
        key = f"rope.scaling.yarn_beta_{name}"
        beta = betas[f"yarn_beta_{name}"] = keys.number(key, usual, above=0.0)
        if not keys.has(key):
            keys.note(f"yarn_beta_{name} is missing: {usual:g} is used.")
        elif beta != usual:
            keys.note(f"yarn_beta_{name} is {beta:g} in the file and used (llama.cpp would take {usual:g}).")
    return {"yarn_factor": keys.number("rope.scaling.factor", minimum=1.0), "yarn_log_mul": log_mul} | betas


def _rope_factors(keys, which, fields):
    name, half = f"rope_factors_{which}.weight", fields["qk_rope_head_dim"] // 2
    info = keys.tensor(name)
    if tuple(info.shape) != (half,) or info.type not in ("F32", "F16", "BF16"):
        keys.fail(f"tensor {name!r} is {info.type} {list(info.shape)}, expected F32 [R/2 = {half}]; re-convert the model")
    factors = tuple(float(x) for x in keys.gf.array(name))
    if not all(math.isfinite(x) and x > 0.0 for x in factors):
        keys.fail(f"tensor {name!r} has a factor that is not positive and finite, expected divisors of frequencies; download again")
    return factors


def _scales(keys, fields):
    scales = {"embd_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
    if keys.arch == "minicpm3":
        scales = {
            "embd_scale": 12.0,
            "residual_scale": 1.4 / math.sqrt(fields["n_layers"]),
            "logit_scale": 256.0 / fields["dim"],
        }
        keys.note("minicpm3 files do not hold their scales: embedding 12, branches 1.4/sqrt(L), logits 256/D are the model's own.")
    temp_scale = keys.number("attention.temperature_scale", 0.0)
    temp_length = keys.integer("attention.temperature_length", minimum=1) if temp_scale else 0
    return scales | {"attn_temp_scale": temp_scale, "attn_temp_length": temp_length}
