"""Model files with matrices of other types than Q8_0: random values, or random blocks where gguf has no quantiser."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as gguf_quants

from benchmarks import model_plan
from benchmarks.gguf_stream import TensorPlan, write_gguf
from benchmarks.make_model import vector_values
from benchmarks.shapes import ModelShape

# where a block's f16 scales stand (scale, or scale and minimum), their ratio, and the spread of values for scale 1
_BLOCKS = {
    "Q2_K": ([(80, 1.0), (82, 1.5)], 14.0),
    "Q3_K": ([(108, 1.0)], 44.0),
    "Q4_K": ([(0, 1.0), (2, 7.5)], 300.0),
    "Q5_K": ([(0, 1.0), (2, 15.5)], 600.0),
    "Q6_K": ([(208, 1.0)], 1370.0),
    "IQ4_NL": ([(0, 1.0)], 69.0),
    "IQ4_XS": ([(0, 1.0)], 1270.0),
}


def encode(kind: str, n_rows: int, width: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """Random rows of a type, u8 [n_rows, row bytes], whose values have a standard deviation near `std`."""
    if kind not in _BLOCKS:
        values = (std * rng.standard_normal((n_rows, width))).astype(np.float32)
        out = gguf_quants.quantize(values, GGMLQuantizationType[kind])
        return np.ascontiguousarray(out).view(np.uint8).reshape(n_rows, -1)
    n_values, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (n_rows * width // n_values, n_bytes), np.uint8)
    scales, spread = _BLOCKS[kind]
    d = std / spread * rng.uniform(0.7, 1.3, (len(blocks), 1))
    for at, ratio in scales:
        blocks[:, at : at + 2] = (d * ratio).astype(np.float16).view(np.uint8)
    return blocks.reshape(n_rows, -1)


def q4_k_m(name: str, shape: tuple[int, ...]) -> str:
    """Types of a file as llama-quantize mixes them; rows that no K block tiles fall back to other types."""
    if shape[-1] % 256:
        return "Q5_0" if "down_exps" in name else "Q8_0"
    if name == "output.weight" or "ffn_down" in name:
        return "Q6_K"
    return "Q5_K" if "kv_a_mqa" in name else "Q4_K"


def write_mixed(path, shape: ModelShape, kind_of, seed: int = 0):
    """Write a model whose matrix `name` has the type ``kind_of(name, shape)``; returns `path`."""

    def one(i, t):
        rng = np.random.default_rng([seed, i])
        if isinstance(t, model_plan.Vector):
            data, kind = vector_values(t, np.random.SeedSequence([seed, i])), "F32"
        else:
            kind = kind_of(t.name, t.shape)
            n_rows, width = int(np.prod(t.shape[:-1])), t.shape[-1]
            data = encode(kind, n_rows, width, float(np.mean(t.gain)) / width**0.5, rng)
        return TensorPlan(t.name, t.shape, GGMLQuantizationType[kind], lambda: iter([data]))

    write_gguf(path, model_plan.metadata(shape), [one(i, t) for i, t in enumerate(model_plan.tensors(shape))])
    return path
