"""Feed-forward part of the configuration: dense layers, experts, routing."""

GATING = {1: "softmax", 2: "sigmoid"}
GLM_FLASH_BLOCKS, GLM_FLASH_VOCAB = (47, 48), 154880  # GLM-4.7-Flash: real files lack the gating key


def read_ffn(keys, fields):
    """Return the fields of dense and routed layers. A layer is dense when it has no router, whatever its number.

    Parameters
    ----------
    keys : Keys
    fields : dict
        Sizes, as read before.
    """
    tensors, arch, n_layers = keys.gf.tensors, fields["arch"], fields["n_layers"]
    is_moe = tuple(f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(n_layers))
    for i, moe in enumerate(is_moe):
        names = [f"blk.{i}.ffn_{part}_exps.weight" for part in ("gate", "up", "gate_up", "down")]
        stray = [name for name in names if name in tensors]
        if stray and not moe:
            keys.fail(f"tensor 'blk.{i}.ffn_gate_inp.weight' is missing, but {stray[0]} is there; re-convert the model")
    if any(is_moe) and arch != "deepseek2":
        keys.fail(f"architecture {arch} has a router (ffn_gate_inp), expected dense layers; no such model is known")
    dense = [i for i, moe in enumerate(is_moe) if not moe]
    told = keys.integer("leading_dense_block_count", 0)
    if any(is_moe) and (told != len(dense) or any(is_moe[:told])):
        keys.note(f"leading_dense_block_count is {told}, but {len(dense)} layers have no router: those are dense.")
    out = {
        "ffn_dim": keys.integer("feed_forward_length", minimum=1, layers=dense) if dense else 0,
        "ffn_act": "relu2" if arch == "plm" else "swiglu",
        "is_moe_layer": is_moe,
    }
    return out | (_experts(keys, fields, is_moe.index(True)) if any(is_moe) else _no_experts(keys))


def _no_experts(keys):
    n_experts = keys.integer("expert_count", 0)
    if n_experts:
        keys.note(f"expert_count is {n_experts}, but no layer has a router: all layers are dense.")
    return {
        "n_experts": 0, "n_experts_used": 0, "n_expert_groups": 1, "n_expert_groups_used": 1,
        "expert_ffn_dim": 0, "shared_ffn_dim": 0, "gating": "softmax", "gating_source": "no layer has experts",
        "has_expert_bias": False, "expert_weights_norm": False, "expert_weights_scale": 1.0, "fused_gate_up": False,
    }  # fmt: skip


def _experts(keys, fields, first):
    tensors, block = keys.gf.tensors, f"blk.{first}."
    n_experts = keys.integer("expert_count", minimum=1)
    n_used = keys.integer("expert_used_count", minimum=1)
    if n_used > n_experts:
        keys.fail_key("expert_used_count", n_used, f"at most expert_count ({n_experts})")
    has_bias = any(f"blk.{i}.exp_probs_b.bias" in tensors for i in range(fields["n_layers"]))
    gating, source = _gating(keys, fields, has_bias)
    scale = keys.number("expert_weights_scale", 0.0)
    if scale == 0.0:
        keys.note("expert_weights_scale is missing or 0: 1 is used.")
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
        "shared_ffn_dim": _shared_width(keys, block, width),
        "gating": gating,
        "gating_source": source,
        "has_expert_bias": has_bias,
        "expert_weights_norm": keys.flag("expert_weights_norm", False),
        "expert_weights_scale": scale or 1.0,
        "fused_gate_up": block + "ffn_gate_up_exps.weight" in tensors,
    }


def _gating(keys, fields, has_bias):
    code = keys.integer("expert_gating_func", 0)
    if code in GATING:
        return GATING[code], f"expert_gating_func is {code}"
    if code:
        keys.fail_key("expert_gating_func", code, "1 (softmax) or 2 (sigmoid)")
    n_blocks, n_vocab = fields["n_layers"] + fields["n_nextn_layers"], fields["n_vocab"]
    if has_bias:
        gating, source = "sigmoid", "expert_gating_func is missing, and exp_probs_b exists"
    elif n_blocks in GLM_FLASH_BLOCKS and n_vocab == GLM_FLASH_VOCAB:
        gating = "sigmoid"
        source = f"expert_gating_func is missing, and {n_blocks} blocks with {n_vocab} tokens are GLM-4.7-Flash"
    else:
        gating, source = "softmax", "expert_gating_func is missing, and there is no exp_probs_b"
    keys.note(f"Gating is {gating}: {source}.")
    return gating, source


def _groups(keys, n_experts, n_used):
    n_groups = keys.integer("expert_group_count", 1) or 1
    if n_groups == 1:
        return 1, 1
    used = keys.integer("expert_group_used_count", minimum=1)
    size = n_experts // n_groups
    if n_experts % n_groups or size < 2:
        keys.fail_key("expert_group_count", n_groups, f"to split expert_count ({n_experts}) evenly, 2 or more each")
    if used > n_groups or used * size < n_used:
        needed = -(-n_used // size)
        keys.fail_key("expert_group_used_count", used, f"from {needed} (for {n_used} experts) to {n_groups} groups")
    if used == n_groups:
        keys.note(f"All {n_groups} expert groups are used: routing is not limited.")
        return 1, 1
    return n_groups, used


def _shared_width(keys, block, expert_width):
    n_shared = keys.integer("expert_shared_count", 0)
    info = keys.gf.tensors.get(block + "ffn_gate_shexp.weight")
    if info is None:
        return n_shared * expert_width  # if not 0, the shared tensors will be found missing
    if info.shape[0] != n_shared * expert_width:
        keys.note(
            f"expert_shared_count is {n_shared} at width {expert_width}, but ffn_gate_shexp has {info.shape[0]} rows, "
            "which count."
        )
    return info.shape[0]
