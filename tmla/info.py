"""What a file holds and what it will take, from its header alone: no backend is started, no weights are read."""

from __future__ import annotations

from typing import Any

from tmla import limits, memory
from tmla.config import MLAConfig
from tmla.gguf_file import GGUFFile
from tmla.gguf_kind import show
from tmla.plan import make_plan

_WIDE = 400  # characters of one note that are shown
_WIDTHS = {
    "residual": "dim",
    "latent": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
    "FFN": "ffn_dim",
}


def planned_bytes(cfg: MLAConfig, n_ctx: int, cache_dtype: str = "f16", arch: str | None = None) -> dict[str, int]:
    """Return the bytes that loading will allocate: ``weights``, ``cache``, ``scratch``, ``total``.

    Parameters
    ----------
    cfg : MLAConfig
    n_ctx : int
        Positions the cache holds.
    cache_dtype : {"f16", "f32"}
    arch : str, optional
        Backend, default :func:`tmla.runtime.default_arch`. Where it does not run yet, all cores or 32 lanes are
        counted (:func:`tmla.limits.foreseen_caps`).

    Raises
    ------
    BackendError
        A tensor, or the cache of one layer, is larger than a field can be.
    """
    caps = limits.foreseen_caps(arch)
    plan = make_plan(cfg, n_ctx, cache_dtype, caps.layout)
    scratch = limits.scratch_bytes(cfg, n_ctx, caps)
    out = {"weights": plan.weight_bytes, "cache": plan.cache_bytes, "scratch": scratch}
    return out | {"total": sum(out.values())}


def describe(
    gf: GGUFFile, cfg: MLAConfig, n_ctx: int, cache_dtype: str = "f16", allocated: dict[str, int] | None = None
) -> dict[str, Any]:
    """Return all that ``tmla info`` says, as a dict that JSON can hold.

    Parameters
    ----------
    gf, cfg : GGUFFile, MLAConfig
    n_ctx : int
        Positions the cache holds.
    cache_dtype : {"f16", "f32"}
    allocated : dict, optional
        Bytes that a loaded model took (``Model.memory``). Default: what loading would take.

    Raises
    ------
    BackendError
        As :func:`planned_bytes`.
    """
    out: dict[str, Any] = {
        "file": gf.name,
        "shards": len(gf.paths),
        "file_bytes": gf.n_bytes,
        "name": cfg.name,
        "architecture": cfg.arch,
        "layers": cfg.n_layers,
        "dense_layers": cfg.n_dense_layers,
        "moe_layers": cfg.n_moe_layers,
        "nextn_layers_ignored": cfg.n_nextn_layers,
        "heads": cfg.n_heads,
        "vocabulary": cfg.n_vocab,
        "trained_context": cfg.context_length,
        "widths": {
            "dim": cfg.dim,
            "q_lora_rank": cfg.q_lora_rank,
            "kv_lora_rank": cfg.kv_lora_rank,
            "qk_nope_head_dim": cfg.qk_nope_head_dim,
            "qk_rope_head_dim": cfg.qk_rope_head_dim,
            "v_head_dim": cfg.v_head_dim,
            "ffn_dim": cfg.ffn_dim,
        },
        "attention_form": "split" if cfg.kv_b_split else "unsplit",
        "attention_tensors": ["attn_k_b", "attn_v_b"] if cfg.kv_b_split else ["attn_kv_b"],
        "attention_temperature": {"scale": cfg.attn_temp_scale, "length": cfg.attn_temp_length},
        "ffn_activation": cfg.ffn_act,
        "tied_head": cfg.tied_head,
        "rms_eps": cfg.rms_eps,
        "experts": None,
        "gating": None,
        "gating_source": cfg.gating_source,
        "rope": _rope(cfg, n_ctx),
        "softmax_scale": cfg.softmax_scale,
        "scales": {"embedding": cfg.embd_scale, "residual": cfg.residual_scale, "logits": cfg.logit_scale},
        "tokenizer": {key: gf.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")},
        "n_ctx": n_ctx,
        "cache_dtype": cache_dtype,
        "cache_bytes_per_token": cfg.n_layers * cfg.cache_row_bytes(cache_dtype),
        "memory": dict(allocated or planned_bytes(cfg, n_ctx, cache_dtype)),
        "memory_available": memory.available_bytes(),
        "overrides": {key: _plain(value) for key, value in gf.overridden.items()},
        "notes": list(cfg.notes),
        "ignored_tensors": list(cfg.ignored_tensors),
    }
    if cfg.n_moe_layers:
        out["gating"] = cfg.gating
        out["experts"] = {
            "count": cfg.n_experts,
            "used": cfg.n_experts_used,
            "width": cfg.expert_ffn_dim,
            "shared_width": cfg.shared_ffn_dim,
            "groups": cfg.n_expert_groups,
            "groups_used": cfg.n_expert_groups_used,
            "selection_bias": cfg.has_expert_bias,
            "weights_normalised": cfg.expert_weights_norm,
            "weights_scale": cfg.expert_weights_scale,
            "fused_gate_up": cfg.fused_gate_up,
        }
    return out


def _rope(cfg: MLAConfig, n_ctx: int) -> dict[str, Any]:
    out: dict[str, Any] = {"base": cfg.rope_base, "pairs": cfg.rope_pairs, "scaling": cfg.rope_scaling}
    if cfg.rope_scaling == "yarn":
        out |= {
            "factor": cfg.yarn_factor,
            "original_context": cfg.yarn_orig_ctx,
            "log_multiplier": cfg.yarn_log_mul,
            "beta_fast": cfg.yarn_beta_fast,
            "beta_slow": cfg.yarn_beta_slow,
            "magnitude": cfg.rope_magnitude,
        }
    if cfg.rope_scaling == "longrope":
        long = n_ctx > cfg.rope_orig_ctx
        out |= {"original_context": cfg.rope_orig_ctx, "factors": "long" if long else "short"}
    return out


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def size(n_bytes: int) -> str:
    """Bytes as text, in decimal units: ``1.5 GB``."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.2f} {name}"
    return f"{n_bytes} bytes"


def headline(d: dict[str, Any]) -> list[str]:
    """Return the two lines that a start shows: what runs, and what was decided about it."""
    ignored = len(d["ignored_tensors"])
    return [
        f"{show(d['name'])}: {d['architecture']}, layers {_layers(d)}, heads {d['heads']}",
        f"kv_b {d['attention_form']}; cache {d['cache_bytes_per_token']:,} bytes per token in {d['cache_dtype']}, "
        f"{d['n_ctx']:,} tokens; gating {_gating(d)}; rope {_rope_text(d['rope'])}; "
        f"softmax scale {d['softmax_scale']:.6g}; {ignored or 'no'} tensor{'s' * (ignored != 1)} ignored",
    ]


def text(d: dict[str, Any]) -> str:
    """Return what :func:`describe` found as lines for a terminal, every string from the file made printable."""
    w, m, shards = d["widths"], d["memory"], d["shards"]
    free = d["memory_available"]
    query = f"through q_lora {w['q_lora_rank']}" if w["q_lora_rank"] else "direct (attn_q)"
    temperature = d["attention_temperature"]
    rows = [
        ("file", f"{show(d['file'])}, {size(d['file_bytes'])}{f' in {shards} shards' if shards > 1 else ''}"),
        ("name", show(d["name"])),
        ("architecture", d["architecture"]),
        ("layers", _layers(d)),
        ("heads", str(d["heads"])),
        ("widths", ", ".join(f"{name} {w[key]}" for name, key in _WIDTHS.items() if w[key])),
        ("attention form", f"{d['attention_form']} kv_b ({', '.join(d['attention_tensors'])}); queries {query}"),
        ("experts", _experts(d["experts"])),
        ("gating", _gating(d)),
        ("activation", d["ffn_activation"]),
        ("rope", _rope_text(d["rope"])),
        ("softmax scale", f"{d['softmax_scale']!r}"),
    ]
    if temperature["scale"]:
        rows.append(("temperature", f"{temperature['scale']:g} per factor e of {temperature['length']} positions"))
    if any(value != 1.0 for value in d["scales"].values()):
        rows.append(("scales", ", ".join(f"{name} {value:.6g}" for name, value in d["scales"].items())))
    rows += [
        (
            "vocabulary",
            f"{d['vocabulary']:,} tokens, tokenizer {' / '.join(show(v or '-') for v in d['tokenizer'].values())}",
        ),
        ("head", "tied to the embedding" if d["tied_head"] else "output.weight"),
        ("context", f"{d['n_ctx']:,} tokens to be allocated, {d['trained_context']:,} trained"),
        ("cache", f"{d['cache_bytes_per_token']:,} bytes per token in {d['cache_dtype']}"),
        (
            "memory",
            f"{size(m['total'])} to be allocated: weights {size(m['weights'])}, cache {size(m['cache'])}, "
            f"scratch {size(m['scratch'])}" + (f"; {size(free)} free" if free is not None else ""),
        ),
        ("ignored tensors", show(", ".join(d["ignored_tensors"]), _WIDE) or "none"),
    ]
    rows += [("override", f"{show(key)} = {show(value)}") for key, value in d["overrides"].items()]
    rows += [("note", show(note, _WIDE)) for note in d["notes"]]
    return "\n".join(f"{label:16s} {value}" for label, value in rows)


def _layers(d: dict[str, Any]) -> str:
    parts = [f"{d[key]} {name}" for key, name in (("dense_layers", "dense"), ("moe_layers", "mixture")) if d[key]]
    ignored = d["nextn_layers_ignored"]
    more = f", {ignored} next-token block{'s' * (ignored != 1)} ignored" if ignored else ""
    return f"{d['layers']} ({', '.join(parts)}{more})"


def _experts(e: dict[str, Any] | None) -> str:
    if e is None:
        return "none"
    shared = f", shared width {e['shared_width']}" if e["shared_width"] else ", none shared"
    groups = f", from {e['groups_used']} of {e['groups']} groups" if e["groups"] > 1 else ""
    weights = f"weights {'normalised, ' if e['weights_normalised'] else ''}times {e['weights_scale']:g}"
    return f"{e['used']} of {e['count']}, width {e['width']}{shared}{groups}; {weights}"


def _gating(d: dict[str, Any]) -> str:
    return f"{d['gating'] or 'none'} ({d['gating_source']})"


def _rope_text(r: dict[str, Any]) -> str:
    out = f"base {r['base']:g}, {r['pairs']} pairs"
    if r["scaling"] == "yarn":
        out += f", YaRN factor {r['factor']:g} from {r['original_context']:,}, log multiplier {r['log_multiplier']:g}"
        out += f", betas {r['beta_fast']:g} and {r['beta_slow']:g}"
    if r["scaling"] == "longrope":
        out += f", {r['factors']} factors (original context {r['original_context']:,})"
    return out
