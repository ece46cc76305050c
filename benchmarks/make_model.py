"""Write a GGUF file of any known MLA model's shape, with random Q8_0 blocks, streaming to disk.

    python -m benchmarks.make_model OUT.gguf --shape v2-lite --layers 4 --split

The same shape and seed give the same bytes. Text goes in and out: the vocabulary is a byte-level BPE of the real size.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import sys
import time
import types
import typing
import zlib

import numpy as np
from gguf import GGMLQuantizationType

from benchmarks import model_plan
from benchmarks.gguf_stream import TensorPlan, write_shards
from benchmarks.shapes import BLOCK, SHAPES, ModelShape

CHUNK_BLOCKS = 16384  # Q8_0 blocks made at once: 0.5 MB, so that a chunk stays in the cache
QUANT_STD = 75.85  # of 31 values uniform in -127..127 and one that is +-127
SCALE_STD = (1 + 1 / 12) ** 0.5  # of block scales uniform in 0.5..1.5
VECTOR_TYPES = {"F32": GGMLQuantizationType.F32, "F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}


def _seed_of(seed: int, name: str) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(name.encode())])


def q8_0_chunks(shape: tuple[int, ...], gain, seed: np.random.SeedSequence):
    """Yield u8 [n, 34] arrays of random Q8_0 blocks that fill a tensor.

    Parameters
    ----------
    shape : tuple of int
        NumPy order; the last axis is the row that the blocks tile.
    gain : float or ndarray [rows]
        The values' standard deviation is ``gain / sqrt(shape[-1])``.
    seed : SeedSequence

    Notes
    -----
    Each block's largest value is +-127, as a quantiser leaves it, so dequantising and quantising again gives the
    same bytes.
    """
    row_blocks, width = shape[-1] // BLOCK, BLOCK + 2
    n_blocks = math.prod(shape) // BLOCK
    base = np.asarray(gain, np.float32) / np.float32(shape[-1] ** 0.5 * QUANT_STD * SCALE_STD)
    bits = np.random.Generator(np.random.SFC64(seed))
    for start in range(0, n_blocks, CHUNK_BLOCKS):
        n = min(CHUNK_BLOCKS, n_blocks - start)
        words = bits.integers(0, 2**64 - 1, -(-n * width // 8), np.uint64, endpoint=True)
        out = words.view(np.uint8)[: n * width]
        np.add(out, (out == 128).view(np.uint8), out=out)  # -128 becomes -127
        extra = bits.integers(0, 2**32 - 1, n, np.uint32, endpoint=True)
        column, sign = (extra >> 16) & (BLOCK - 1), (extra >> 21) & 1
        out[np.arange(2, n * width, width, dtype=np.intp) + column] = (127 + 2 * sign).astype(np.uint8)  # 129 is -127
        d = (extra & 0xFFFF).astype(np.float32) / 65536 + np.float32(0.5)
        out.view("<f2")[:: width // 2] = d * (
            base if base.ndim == 0 else base[np.arange(start, start + n) // row_blocks]
        )
        yield out.reshape(n, width)


def vector_values(v: model_plan.Vector, seed: np.random.SeedSequence) -> np.ndarray:
    """Values of a norm, router, bias or rope factor tensor, f32."""
    rng = np.random.default_rng(seed)
    if v.values is not None:
        return v.values.astype(np.float32)
    if v.normal:
        return rng.normal(v.center, v.spread, v.shape).astype(np.float32)
    return rng.uniform(v.center - v.spread, v.center + v.spread, v.shape).astype(np.float32)


def encode_vector(values: np.ndarray, kind: str) -> np.ndarray:
    """f32 values in the given storage type: F32, F16, or BF16 (rounded to nearest even)."""
    if kind == "BF16":
        word = values.view(np.uint32)
        return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype("<u2")
    return values.astype({"F32": "<f4", "F16": "<f2"}[kind])


def plan(shape: ModelShape, seed: int) -> list[TensorPlan]:
    """Every tensor of the file with the generator of its bytes."""

    def one(t: model_plan.Matrix | model_plan.Vector) -> TensorPlan:
        if isinstance(t, model_plan.Matrix):
            return TensorPlan(
                t.name, t.shape, GGMLQuantizationType.Q8_0, lambda: q8_0_chunks(t.shape, t.gain, _seed_of(seed, t.name))
            )
        return TensorPlan(
            t.name,
            t.shape,
            VECTOR_TYPES[shape.vector_type],
            lambda: iter([encode_vector(vector_values(t, _seed_of(seed, t.name)), shape.vector_type)]),
        )

    return [one(t) for t in model_plan.tensors(shape)]


def write_model(path, shape: ModelShape, seed: int = 0, *, n_shards: int = 1) -> list[pathlib.Path]:
    """Write a model of random weights.

    Parameters
    ----------
    path : str or os.PathLike
        The file; with shards, ``NAME-00001-of-0000N.gguf`` beside it.
    shape : ModelShape
    seed : int
        Same shape and seed, same bytes.
    n_shards : int
        Number of files.

    Returns
    -------
    list of pathlib.Path
        The files written.
    """
    return write_shards(pathlib.Path(path), model_plan.metadata(shape), plan(shape, seed), n_shards)


def parse_value(field: dataclasses.Field, text: str):
    """A command-line text as the value of a field of :class:`ModelShape`."""
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    kind = kinds[0]
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{field.name}: {text!r} is neither true nor false")
        return text.lower() in ("true", "1")
    if typing.get_origin(kind) is tuple:
        return tuple(float(x) for x in text.split(","))
    return kind(text)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.make_model", description=__doc__.split("\n")[0])
    p.add_argument("out", nargs="?", type=pathlib.Path, help="file to write")
    p.add_argument("--shape", default="v2-lite", choices=sorted(SHAPES), help="known model (default: v2-lite)")
    p.add_argument("--list", action="store_true", help="list the known shapes with their sizes, and write nothing")
    for flag, field in (
        ("layers", "n_layers"), ("dense-layers", "n_dense_layers"), ("experts", "n_experts"), ("heads", "n_heads"),
        ("experts-used", "n_experts_used"), ("vocab", "n_vocab"), ("q-lora", "q_lora_rank"),
        ("nextn", "n_nextn_layers"),
    ):  # fmt: skip
        p.add_argument(f"--{flag}", dest=field, type=int, help=f"instead of the model's {field}")
    p.add_argument("--split", dest="split", action="store_true", default=None, help="attn_k_b + attn_v_b")
    p.add_argument("--unsplit", dest="split", action="store_false", help="attn_kv_b")
    p.add_argument("--tied", dest="tied_head", action="store_true", default=None, help="no output.weight")
    p.add_argument("--fused", dest="fused_gate_up", action="store_true", default=None, help="ffn_gate_up_exps")
    p.add_argument("--gating", choices=("softmax", "sigmoid"))
    p.add_argument("--vectors", dest="vector_type", choices=sorted(VECTOR_TYPES), help="type of norms and routers")
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of ModelShape")
    p.add_argument("--shards", type=int, default=1, help="number of files")
    p.add_argument("--seed", type=int, default=0)
    return p


def shape_from_args(args: argparse.Namespace) -> ModelShape:
    """The known shape with the command line's changes."""
    fields = {f.name: f for f in dataclasses.fields(ModelShape)}
    changes = {k: v for k, v in vars(args).items() if k in fields and v is not None}
    for item in args.set:
        name, _, text = item.partition("=")
        if name not in fields:
            raise ValueError(f"--set {item}: no such field; one of {', '.join(fields)}")
        changes[name] = parse_value(fields[name], text)
    return SHAPES[args.shape].replace(**changes)


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        for name, shape in SHAPES.items():
            sizes = [(math.prod(t.shape), t.n_bytes) for t in plan(shape, 0)]
            values, size = map(sum, zip(*sizes))
            print(f"{name:16} {values / 1e9:9.3f} G values {size / 1e9:9.3f} GB  {shape.arch}")
        return 0
    if args.out is None:
        parser.error("name the file to write, or use --list")
    try:
        shape = shape_from_args(args)
        t0 = time.perf_counter()
        paths = write_model(args.out, shape, args.seed, n_shards=args.shards)
    except ValueError as e:
        parser.error(str(e))
    size, seconds = sum(os.path.getsize(p) for p in paths), time.perf_counter() - t0
    speed = size / 1e6 / seconds
    print(f"{paths[0]}: {size / 1e6:,.1f} MB in {len(paths)} file(s), {speed:,.0f} MB/s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
