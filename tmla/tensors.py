"""The tensors that decoding a configuration reads, and what the file has beyond them."""

import dataclasses
import re
from collections.abc import Iterable

from tmla.errors import GGUFError
from tmla.gguf_kind import show

MAX_LISTED = 64  # tensor names written out in one message; more are folded into block ranges


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What a tensor has to be: `shape` slowest axis first, `kind` "matrix" (quantised) or "vector" (read as it is)."""

    shape: tuple[int, ...]
    kind: str


def expected_tensors(cfg) -> dict[str, TensorSpec]:
    """Return name -> TensorSpec of every tensor that decoding `cfg` reads, in order of use.

    "vector" are the norms, the router with its bias and the rope factors: small, and read in whatever float type they
    are stored.
    """
    specs = {"token_embd.weight": _matrix(cfg.n_vocab, cfg.dim)}
    if cfg.rope_scaling == "longrope":
        for which in ("long", "short"):
            specs[f"rope_factors_{which}.weight"] = _vector(cfg.qk_rope_head_dim // 2)
    for layer, is_moe in enumerate(cfg.is_moe_layer):
        block = {"attn_norm.weight": _vector(cfg.dim)} | _attention(cfg) | {"ffn_norm.weight": _vector(cfg.dim)}
        block |= _moe(cfg) if is_moe else _dense(cfg)
        specs |= {f"blk.{layer}.{role}": spec for role, spec in block.items()}
    specs["output_norm.weight"] = _vector(cfg.dim)
    if not cfg.tied_head:
        specs["output.weight"] = _matrix(cfg.n_vocab, cfg.dim)
    return specs


def _matrix(*shape):
    return TensorSpec(shape, "matrix")


def _vector(*shape):
    return TensorSpec(shape, "vector")


def _attention(cfg):
    h, c, n, r, v = cfg.n_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    if cfg.q_lora_rank:
        query = {
            "attn_q_a.weight": _matrix(cfg.q_lora_rank, cfg.dim),
            "attn_q_a_norm.weight": _vector(cfg.q_lora_rank),
            "attn_q_b.weight": _matrix(h * (n + r), cfg.q_lora_rank),
        }
    else:
        query = {"attn_q.weight": _matrix(h * (n + r), cfg.dim)}
    if cfg.kv_b_split:
        kv_b = {"attn_k_b.weight": _matrix(h, c, n), "attn_v_b.weight": _matrix(h, v, c)}
    else:
        kv_b = {"attn_kv_b.weight": _matrix(h * (n + v), c)}
    latent = {"attn_kv_a_mqa.weight": _matrix(c + r, cfg.dim), "attn_kv_a_norm.weight": _vector(c)}
    return query | latent | kv_b | {"attn_output.weight": _matrix(cfg.dim, h * v)}


def _dense(cfg):
    gate = {} if cfg.ffn_act == "relu2" else {"ffn_gate.weight": _matrix(cfg.ffn_dim, cfg.dim)}
    return gate | {"ffn_up.weight": _matrix(cfg.ffn_dim, cfg.dim), "ffn_down.weight": _matrix(cfg.dim, cfg.ffn_dim)}


def _moe(cfg):
    e, f, shared, dim = cfg.n_experts, cfg.expert_ffn_dim, cfg.shared_ffn_dim, cfg.dim
    specs = {"ffn_gate_inp.weight": _vector(e, dim)}
    if cfg.has_expert_bias:
        specs["exp_probs_b.bias"] = _vector(e)
    if cfg.fused_gate_up:
        specs["ffn_gate_up_exps.weight"] = _matrix(e, 2 * f, dim)
    else:
        specs |= {"ffn_gate_exps.weight": _matrix(e, f, dim), "ffn_up_exps.weight": _matrix(e, f, dim)}
    specs["ffn_down_exps.weight"] = _matrix(e, dim, f)
    if shared:
        specs |= {"ffn_gate_shexp.weight": _matrix(shared, dim), "ffn_up_shexp.weight": _matrix(shared, dim)}
        specs["ffn_down_shexp.weight"] = _matrix(dim, shared)
    return specs


def find_ignored(gf, cfg) -> tuple[str, ...]:
    """Return the names of the tensors that decoding does not read, as a tuple.

    Raises
    ------
    GGUFError
        One of them is a bias or scale of a tensor that is read: without it the logits would be wrong.
    """
    specs = expected_tensors(cfg)
    ignored = tuple(name for name in gf.tensors if name not in specs)
    for name in ignored:
        stem, _, suffix = name.rpartition(".")
        if suffix in ("bias", "scale", "input_scale") and f"{stem}.weight" in specs:
            raise GGUFError(
                f"{show(gf.name)}: tensor {name!r} belongs to '{stem}.weight', expected no {suffix} with it: tmla "
                "would leave it out, and the logits would be wrong; no known MLA model has it"
            )
    return ignored


def ignored_notes(cfg, ignored) -> tuple[str, ...]:
    """Return the sentences that say which tensors are ignored and why, as a tuple."""
    nextn = {f"blk.{i}" for i in range(cfg.n_layers, cfg.n_layers + cfg.n_nextn_layers)}
    in_nextn: list[str] = []
    others: list[str] = []
    for name in ignored:
        (in_nextn if ".".join(name.split(".", 2)[:2]) in nextn else others).append(name)
    notes = []
    if cfg.n_nextn_layers:
        last = cfg.n_layers + cfg.n_nextn_layers - 1
        blocks = f"block {last} is" if cfg.n_nextn_layers == 1 else f"blocks {cfg.n_layers} to {last} are"
        notes.append(f"Next-token-prediction {blocks} ignored ({len(in_nextn)} tensors): decoding does without.")
    if others:
        notes.append(f"Ignored, as no stage reads them: {fold_names(others)}.")
    return tuple(notes)


def fold_names(names: Iterable[str]) -> str:
    """Return tensor names as one string; when there are many, block numbers are folded into ranges."""
    names = list(names)
    if len(names) <= MAX_LISTED:
        return ", ".join(map(show, names))
    roles: dict[str, set[int]] = {}
    for name in names:
        match = re.fullmatch(r"blk\.(\d{1,9})\.(.+)", name)
        roles.setdefault(f"blk.{{}}.{match[2]}" if match else name, set()).add(int(match[1]) if match else -1)
    folded = [show(role.replace("{}", _ranges(sorted(blocks)))) for role, blocks in roles.items()]
    more = f" and {len(folded) - MAX_LISTED} more" if len(folded) > MAX_LISTED else ""
    return ", ".join(folded[:MAX_LISTED]) + more


def _ranges(numbers):
    """Return sorted integers in the manner of "0-3,7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
