"""Rope part of the configuration: base, scaling of the frequencies, factors."""

import math

BETAS = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}  # what every known model uses


def read_rope(keys, fields):
    """Return the rope fields.

    Parameters
    ----------
    keys : Keys
    fields : dict
        Sizes and attention widths, as read before.
    """
    base = keys.number("rope.freq_base", 10000.0, above=1.0)
    if not keys.has("rope.freq_base"):
        keys.note("rope.freq_base is missing: 10000 is used.")
    scaling = _scaling(keys)
    orig = keys.integer("rope.scaling.original_context_length", 0)
    if not orig:
        orig = fields["context_length"]
        if scaling != "none":
            keys.note(f"rope.scaling.original_context_length is missing: context_length, {orig}, takes its place.")
    out = {
        "rope_base": base,
        "rope_pairs": "half" if keys.arch == "minicpm3" else "consecutive",
        "rope_scaling": scaling,
        "yarn_factor": 1.0,
        "yarn_orig_ctx": orig,
        "yarn_log_mul": 0.0,
        "rope_factors_long": (),
        "rope_factors_short": (),
        "rope_orig_ctx": orig,
    } | BETAS
    if scaling == "yarn":
        out |= _yarn(keys)
    if scaling == "longrope":
        out |= {f"rope_factors_{which}": _factors(keys, which, fields) for which in ("long", "short")}
    return out


def _scaling(keys):
    told = keys.text("rope.scaling.type", "")
    factor = keys.number("rope.scaling.factor", 0.0, minimum=0.0) or keys.number("rope.scale_linear", 0.0, minimum=0.0)
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        value = keys.number(f"rope.scaling.{key}", 1.0)
        if value != 1.0:
            keys.fail_key(f"rope.scaling.{key}", value, "1 or no such key, as in every known MLA model")
    if keys.arch == "minicpm3" and told in ("", "none", "longrope"):
        tensors = keys.gf.tensors
        if told == "longrope" or "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
            return "longrope"
    if told == "yarn" and keys.arch == "deepseek2":
        return "yarn"
    if told == "none" and factor not in (0.0, 1.0):
        keys.note(f"rope.scaling.factor is {factor:g}, but rope.scaling.type is none: the factor is ignored.")
    if told == "none" or (told in ("", "linear") and factor in (0.0, 1.0)):
        return "none"
    known = {"deepseek2": "yarn", "minicpm3": "longrope", "plm": "no scaling"}[keys.arch]
    found = repr(told) if told else f"missing, with a factor of {factor:g}"
    return keys.fail_key("rope.scaling.type", found, known, "override it if the model was trained differently")


def _yarn(keys):
    log_mul = keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=0.0)
    if log_mul == 0.0:
        keys.note(
            "yarn_log_multiplier is missing or 0: as in llama.cpp, 1 + 0.1 ln factor multiplies cos and sin, "
            "and its square the scores."
        )
    out = {"yarn_factor": keys.number("rope.scaling.factor", minimum=1.0), "yarn_log_mul": log_mul}
    for name, usual in BETAS.items():
        beta = out[name] = keys.number(f"rope.scaling.{name}", usual, above=0.0)
        if not keys.has(f"rope.scaling.{name}"):
            keys.note(f"{name} is missing: {usual:g} is used.")
        elif beta != usual:
            keys.note(f"{name} is {beta:g} in the file, which is used; llama.cpp would take {usual:g}.")
    return out


def _factors(keys, which, fields):
    name, half = f"rope_factors_{which}.weight", fields["qk_rope_head_dim"] // 2
    info = keys.gf.tensors.get(name)
    if info is None:
        keys.fail(f"tensor {name!r} is missing, expected both long and short factors, or none; re-convert the model")
    if tuple(info.shape) != (half,) or info.type not in ("F32", "F16", "BF16"):
        found = f"{info.type} {list(info.shape)}"
        keys.fail(f"tensor {name!r} is {found}, expected F32 [R/2 = {half}]; re-convert the model")
    factors = tuple(float(x) for x in keys.gf.array(name))
    bad = [x for x in factors if not (math.isfinite(x) and x > 0.0)]
    if bad:
        keys.fail(f"tensor {name!r} has a factor {bad[0]}, expected finite ones above 0; download or convert again")
    return factors
