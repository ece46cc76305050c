"""The tensors a configuration asks for, and whether a file has them: presence, shape, type, finite values."""

import dataclasses
import math
import re

import numpy as np

from tmla.errors import GGUFError

Q8_BLOCK = 32
Q8_BLOCK_BYTES = 34  # f16 scale, 32 int8
VECTOR_TYPES = ("F32", "F16", "BF16")
MAX_LISTED = 64  # tensor names written out in one message; more are folded into block ranges
CHUNK_BLOCKS = 1 << 15  # Q8_0 blocks looked at together: about 1 MB, so that temporaries stay in cache
INF_BITS = 0x7C00  # f16 exponent bits; all set means infinite or NaN


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What a tensor has to be: `shape` slowest axis first, `kind` "matrix" (quantised) or "vector" (read as it is)."""

    shape: tuple[int, ...]
    kind: str


def expected_tensors(cfg):
    """Return name -> TensorSpec of every tensor that decoding `cfg` reads, in file order of use.

    "vector" are the norms, the router with its bias and the rope factors: small, and read in whatever float type they have.
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


def find_ignored(gf, cfg):
    """Return the names of tensors that decoding does not read, as a tuple.

    Raises
    ------
    GGUFError
        An unread tensor is a bias or scale of one that is read: without it the logits would be wrong.
    """
    specs = expected_tensors(cfg)
    ignored = tuple(name for name in gf.tensors if name not in specs)
    for name in ignored:
        stem, _, suffix = name.rpartition(".")
        if suffix in ("bias", "scale", "input_scale") and f"{stem}.weight" in specs:
            raise GGUFError(f"{gf.name}: tensor {name!r} belongs to {stem + '.weight'!r}, expected no {suffix}; tmla does not apply it")
    return ignored


def ignored_notes(cfg, ignored):
    """Return the sentences that say which tensors are ignored and why, as a tuple."""
    nextn = tuple(f"blk.{i}." for i in range(cfg.n_layers, cfg.n_layers + cfg.n_nextn_layers))
    in_nextn = [name for name in ignored if name.startswith(nextn)] if nextn else []
    others = [name for name in ignored if name not in set(in_nextn)]
    notes = []
    if cfg.n_nextn_layers:
        last = cfg.n_layers + cfg.n_nextn_layers - 1
        blocks = f"block {last}" if cfg.n_nextn_layers == 1 else f"blocks {cfg.n_layers} to {last}"
        notes.append(f"Next-token-prediction {blocks} ({len(in_nextn)} tensors) ignored: decoding does not use it.")
    if others:
        notes.append(f"Ignored, as no stage reads them: {fold_names(others)}.")
    return tuple(notes)


def fold_names(names):
    """Return tensor names as one string, block numbers folded into ranges when there are many."""
    names = list(names)
    if len(names) <= MAX_LISTED:
        return ", ".join(names)
    roles: dict[str, list[int]] = {}
    for name in names:
        match = re.fullmatch(r"blk\.(\d{1,9})\.(.+)", name)
        roles.setdefault(f"blk.{{}}.{match[2]}" if match else name, []).append(int(match[1]) if match else -1)
    folded = [role.replace("{}", _ranges(sorted(set(blocks)))) for role, blocks in roles.items()]
    more = f" and {len(folded) - MAX_LISTED} more" if len(folded) > MAX_LISTED else ""
    return ", ".join(folded[:MAX_LISTED]) + more


def _ranges(numbers):
    """Return sorted integers like "0-3,7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def check_tensors(gf, cfg, *, matrix_types=("Q8_0",)):
    """Check every tensor that decoding reads, without reading data: type, presence, shape, block tiling, `kv_b` last.

    Parameters
    ----------
    gf : GGUFFile
    cfg : MLAConfig
    matrix_types : sequence of str
        Types that matrices may have; norms, router, biases and rope factors may always be F32, F16 or BF16.

    Raises
    ------
    GGUFError
        One line. All tensors of an unsupported type are listed at once, likewise all that are missing.
    """
    specs = expected_tensors(cfg)
    _check_types(gf, specs, matrix_types)
    missing = [name for name in specs if name not in gf.tensors]
    if missing:
        raise GGUFError(
            f"{gf.name}: {len(missing)} of {len(specs)} tensors missing: {fold_names(missing)}; "
            "the file is incomplete or of an unknown structure: download or convert it again"
        )
    for name, spec in specs.items():
        info = gf.tensors[name]
        if tuple(info.shape) != spec.shape:
            raise GGUFError(
                f"{gf.name}: tensor {name!r} has shape {list(info.shape)}, expected {list(spec.shape)} "
                f"from the metadata ({_letters(cfg)}); re-convert the model"
            )
        if spec.kind == "matrix" and spec.shape[-1] % Q8_BLOCK:
            raise GGUFError(
                f"{gf.name}: tensor {name!r} has rows of {spec.shape[-1]}, expected a multiple of {Q8_BLOCK}: "
                "such rows do not tile into Q8_0 blocks, tmla cannot run this model"
            )
    for layer in range(cfg.n_layers):
        for part in ("k_b", "v_b") if cfg.kv_b_split else ("kv_b",):
            check_kv_b(gf, specs, f"blk.{layer}.attn_{part}.weight", matrix_types)


def _check_types(gf, specs, matrix_types):
    unsupported: dict[str, list[str]] = {}
    for name, spec in specs.items():
        info = gf.tensors.get(name)
        allowed = matrix_types if spec.kind == "matrix" else VECTOR_TYPES
        if info is not None and info.type not in allowed:
            unsupported.setdefault(info.type, []).append(name)
    if unsupported:
        found = "; ".join(f"{kind}: {fold_names(names)}" for kind, names in sorted(unsupported.items()))
        n = sum(map(len, unsupported.values()))
        raise GGUFError(
            f"{gf.name}: {n} tensor{'s' * (n != 1)} of a type tmla does not read ({found}); expected "
            f"{' or '.join(matrix_types)} for matrices and {', '.join(VECTOR_TYPES)} for norms and routers; "
            "use a Q8_0 file of this model (llama-quantize --allow-requantize MODEL OUT Q8_0)"
        )


def _letters(cfg):
    q_lora = f", q_lora={cfg.q_lora_rank}" if cfg.q_lora_rank else ""
    return (
        f"D={cfg.dim}, H={cfg.n_heads}, C={cfg.kv_lora_rank}, N={cfg.qk_nope_head_dim}, R={cfg.qk_rope_head_dim}, "
        f"V={cfg.v_head_dim}{q_lora}, F={cfg.ffn_dim}, E={cfg.n_experts}"
    )


def check_kv_b(gf, specs, name, matrix_types=("Q8_0",)):
    """Check one `kv_b`, `k_b` or `v_b` tensor by itself, before any kernel indexes it in place.

    Raises
    ------
    GGUFError
        Type, shape, block tiling, byte size, or an element count that 32-bit indices cannot reach.
    """
    info, spec = gf.tensors[name], specs[name]
    where, n_values = f"{gf.name}: tensor {name!r}", math.prod(spec.shape)
    if info.type not in matrix_types:
        raise GGUFError(f"{where} is {info.type}, expected {' or '.join(matrix_types)}; use a Q8_0 file of this model")
    if tuple(info.shape) != spec.shape:
        raise GGUFError(f"{where} has shape {list(info.shape)}, expected {list(spec.shape)}; re-convert the model")
    if spec.shape[-1] % Q8_BLOCK:
        raise GGUFError(f"{where} has rows of {spec.shape[-1]}, expected whole blocks of {Q8_BLOCK}; tmla cannot run this model")
    if n_values >= 2**31:
        raise GGUFError(f"{where} has {n_values} values, expected under 2**31: kernels index it with 32 bits")
    n_bytes = n_values // Q8_BLOCK * Q8_BLOCK_BYTES
    if info.type == "Q8_0" and info.n_bytes != n_bytes:
        raise GGUFError(f"{where} has {info.n_bytes} bytes, expected {n_bytes} for shape {list(spec.shape)}; download again")


def check_finite(gf, cfg, *, progress=None):
    """Look at every Q8_0 scale and every norm, router and bias value that decoding reads; streams over the whole file.

    Parameters
    ----------
    gf : GGUFFile
        Checked by :func:`check_tensors`.
    cfg : MLAConfig
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` after each tensor.

    Raises
    ------
    GGUFError
        Names the first tensor with a value that is NaN or infinite, and the row and block (or index) of it.
    """
    names = [name for name in expected_tensors(cfg)]
    total, done = sum(gf.tensors[name].n_bytes for name in names), 0
    for name in names:
        info = gf.tensors[name]
        if info.type == "Q8_0":
            check_scales(gf, name)
        elif info.type in VECTOR_TYPES:
            bad = np.flatnonzero(~np.isfinite(gf.array(name).reshape(-1)))
            if bad.size:
                _refuse_value(gf, name, np.unravel_index(int(bad[0]), info.shape), gf.array(name).reshape(-1)[bad[0]])
        done += info.n_bytes
        if progress is not None:
            progress(done, total)


def check_scales(gf, name):
    """Check the block scales of one Q8_0 tensor. Raises GGUFError, naming row and block."""
    block = first_nonfinite_block(gf.raw(name))
    if block is not None:
        *rows, width = gf.tensors[name].shape
        *row, column = np.unravel_index(block, (*rows, width // Q8_BLOCK))
        scale = gf.raw(name)[block * Q8_BLOCK_BYTES :][:2].view("<f2")[0]
        _refuse_value(gf, name, row, scale, f", block {int(column)}")


def _refuse_value(gf, name, index, value, block=""):
    index = ", ".join(str(int(i)) for i in index)
    what = f"scale of row {index}{block}" if block else f"value {index}"
    raise GGUFError(f"{gf.name}: tensor {name!r}: {what} is {float(value)}, expected a finite number; download or convert again")


def first_nonfinite_block(raw):
    """Return the index of the first Q8_0 block whose scale is NaN or infinite, or None.

    Parameters
    ----------
    raw : np.ndarray, u8 [n_blocks * 34]
        Data of a Q8_0 tensor, contiguous.
    """
    scales = raw.view("<u2").reshape(-1, Q8_BLOCK_BYTES // 2)[:, 0]
    for start in range(0, scales.size, CHUNK_BLOCKS):
        exponent = scales[start : start + CHUNK_BLOCKS] & INF_BITS
        if exponent.size and exponent.max() == INF_BITS:
            return start + int(np.argmax(exponent))
    return None
