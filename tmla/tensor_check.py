"""Whether a file's tensors fit a configuration: type, presence, shape, tiling, and that scales and norms are finite."""

import math
from collections.abc import Sequence

import numpy as np

from tmla.errors import GGUFError
from tmla.gguf_kind import show
from tmla.tensors import expected_tensors, fold_names

Q8_BLOCK = 32
Q8_BLOCK_BYTES = 34  # f16 scale, 32 int8
VECTOR_TYPES = ("F32", "F16", "BF16")
REQUANTIZE_TYPES = (  # what tmla.requantize makes Q8_0 of
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
CHUNK_BLOCKS = 1 << 16  # Q8_0 blocks looked at together: temporaries stay in the cache
INF_BITS = 0x7C00  # f16 exponent bits; all set means infinite or NaN


def check_tensors(gf, cfg, *, matrix_types: Sequence[str] = ("Q8_0",)) -> None:
    """Check every tensor that decoding reads, without reading data.

    Parameters
    ----------
    gf : GGUFFile
    cfg : MLAConfig
    matrix_types : sequence of str
        Types that matrices may have (:mod:`tmla.requantize` allows more). Norms, router, biases and rope factors may
        always be F32, F16 or BF16.

    Raises
    ------
    GGUFError
        One line. All tensors of an unsupported type are listed at once, likewise all that are missing; then the first
        of a wrong shape, or whose rows or bytes do not tile into Q8_0 blocks.
    """
    specs = expected_tensors(cfg)
    _check_types(gf, specs, matrix_types)
    missing = [name for name in specs if name not in gf.tensors]
    if missing:
        raise GGUFError(
            f"{show(gf.name)}: {len(missing)} of the {len(specs)} expected tensors missing: {fold_names(missing)}; "
            "the file is incomplete or of an unknown structure: download or convert it again"
        )
    for name, spec in specs.items():
        if spec.kind == "matrix":
            check_matrix(gf, cfg, name, spec, matrix_types)
        elif tuple(gf.tensors[name].shape) != spec.shape:
            _refuse_shape(gf, cfg, name, spec)
    for layer in range(cfg.n_layers):
        for part in ("k_b", "v_b") if cfg.kv_b_split else ("kv_b",):
            name = f"blk.{layer}.attn_{part}.weight"
            check_kv_b(gf, cfg, name, specs[name], matrix_types)


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
            f"{show(gf.name)}: {n} tensor{'s' * (n > 1)} of a type that tmla does not run ({found}), expected "
            f"{' or '.join(matrix_types)} for matrices and {' or '.join(VECTOR_TYPES)} for norms and routers; "
            f"use a Q8_0 file of the model (llama-quantize makes one){_requantize_hint(gf, specs, unsupported)}"
        )


def _requantize_hint(gf, specs, unsupported):
    """What --requantize could do about tensors of unsupported types, {type: names}; nothing if that is not enough."""

    def loadable(kind, name):
        is_matrix = specs[name].kind == "matrix"
        return is_matrix and kind in REQUANTIZE_TYPES and gf.tensors[name].shape[-1] % Q8_BLOCK == 0

    can = [kind for kind, names in sorted(unsupported.items()) if all(loadable(kind, name) for name in names)]
    if not can:
        return ""
    hint = f", or pass --requantize (requantize=True): it rounds {' and '.join(can)} to Q8_0 while loading"
    cannot = sorted(set(unsupported) - set(can))
    return hint + (f", but cannot load {' and '.join(cannot)}" if cannot else "")


def check_matrix(gf, cfg, name, spec, matrix_types=("Q8_0",)):
    """Check type, shape, block tiling and byte size of one matrix. Raises GGUFError."""
    info, where = gf.tensors[name], f"{show(gf.name)}: tensor {name!r}"
    if info.type not in matrix_types:
        raise GGUFError(f"{where} is {info.type}, expected {' or '.join(matrix_types)}; use a Q8_0 file of the model")
    if tuple(info.shape) != spec.shape:
        _refuse_shape(gf, cfg, name, spec)
    if spec.shape[-1] % Q8_BLOCK:
        raise GGUFError(
            f"{where} has rows of {spec.shape[-1]} values, expected a multiple of {Q8_BLOCK}: they do not tile into "
            "Q8_0 blocks, tmla cannot run this model"
        )
    n_bytes = math.prod(spec.shape) // Q8_BLOCK * Q8_BLOCK_BYTES
    if info.type == "Q8_0" and info.n_bytes != n_bytes:
        raise GGUFError(
            f"{where} has {info.n_bytes} bytes, expected {n_bytes} for Q8_0 {list(spec.shape)}; the header is damaged: "
            "download or convert the file again"
        )


def check_kv_b(gf, cfg, name, spec, matrix_types=("Q8_0",)):
    """Check one `kv_b`, `k_b` or `v_b` tensor by itself, before any kernel indexes it in place.

    Raises
    ------
    GGUFError
        Type, shape, block tiling or byte size, or more values than 32-bit indices reach.
    """
    check_matrix(gf, cfg, name, spec, matrix_types)
    n_values = math.prod(spec.shape)
    if n_values >= 2**31:
        raise GGUFError(
            f"{show(gf.name)}: tensor {name!r} has {n_values} values, expected under 2**31, as kernels index it with "
            "32 bits; tmla cannot run this model"
        )


def _refuse_shape(gf, cfg, name, spec):
    widths = {
        "D": cfg.dim, "H": cfg.n_heads, "C": cfg.kv_lora_rank, "N": cfg.qk_nope_head_dim, "R": cfg.qk_rope_head_dim,
        "V": cfg.v_head_dim, "q_lora": cfg.q_lora_rank, "F": cfg.ffn_dim, "E": cfg.n_experts,
        "expert F": cfg.expert_ffn_dim, "shared F": cfg.shared_ffn_dim,
    }  # fmt: skip
    told = ", ".join(f"{letter} {width}" for letter, width in widths.items() if width)
    raise GGUFError(
        f"{show(gf.name)}: tensor {name!r} has shape {list(gf.tensors[name].shape)}, expected {list(spec.shape)} from "
        f"the metadata ({told}); re-convert the model"
    )


def check_finite_tensor(gf, name):
    """Look at the block scales of a Q8_0 tensor, or at every value of an F32, F16 or BF16 one, before it is loaded.

    Raises
    ------
    GGUFError
        Names the tensor and the first value that is NaN or infinite, by row and block, or by index.
    """
    info = gf.tensors[name]
    if info.type == "Q8_0":
        block = first_nonfinite_block(gf.raw(name))
        if block is None:
            return
        *row, column = np.unravel_index(block, (*info.shape[:-1], info.shape[-1] // Q8_BLOCK))
        what = f"the scale of row {_index(row)}, block {column}"
        value = gf.raw(name)[block * Q8_BLOCK_BYTES :][:2].view("<f2")[0]
    else:
        values = gf.array(name)
        bad = np.argwhere(~np.isfinite(values))
        if not len(bad):
            return
        what, value = f"value {_index(bad[0])}", values[tuple(bad[0])]
    raise GGUFError(
        f"{show(gf.name)}: tensor {name!r}: {what} is {float(value)}, expected a finite number; the weights are "
        "damaged: download or convert the file again"
    )


def _index(numbers):
    return ", ".join(str(int(i)) for i in numbers)


def first_nonfinite_block(raw: np.ndarray) -> int | None:
    """Return the index of the first Q8_0 block whose scale is NaN or infinite, or None.

    Parameters
    ----------
    raw : np.ndarray, u8 [n_blocks * 34]
        Data of a Q8_0 tensor, contiguous; only the scales are looked at.
    """
    scales = raw.view("<u2").reshape(-1, Q8_BLOCK_BYTES // 2)[:, 0]
    bits = np.empty(min(CHUNK_BLOCKS, scales.size), np.uint16)
    for start in range(0, scales.size, CHUNK_BLOCKS):
        part = scales[start : start + CHUNK_BLOCKS]
        exponent = np.bitwise_and(part, INF_BITS, out=bits[: part.size])
        if exponent.max() == INF_BITS:
            return start + int(exponent.argmax())
    return None
