"""Write a GGUF v3 file whose tensor data is produced in chunks, so that its size is bounded by the disk alone.

The ``gguf`` package takes whole tensors from memory; one tensor of a large mixture of experts has 4 GB.
"""

import dataclasses
import math
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.constants import GGML_QUANT_SIZES

ALIGNMENT = 32
VERSION = 3

_SCALAR_FORMATS = {
    GGUFValueType.UINT16: "<H",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
}
_ARRAY_TYPES = {
    "int32": GGUFValueType.INT32,
    "uint32": GGUFValueType.UINT32,
    "uint64": GGUFValueType.UINT64,
    "float32": GGUFValueType.FLOAT32,
}


@dataclasses.dataclass(frozen=True)
class Typed:
    """A metadata value whose GGUF type is not the default of its Python type."""

    kind: GGUFValueType
    value: int | float


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """One tensor to be written.

    `shape` is in NumPy order (slowest first); `chunks` returns an iterator over C-contiguous arrays or bytes that add
    up to :attr:`n_bytes`.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    chunks: Callable[[], Iterator]

    @property
    def n_bytes(self) -> int:
        values, size = GGML_QUANT_SIZES[self.kind]
        if self.shape[-1] % values:
            raise ValueError(f"tensor {self.name}: row length {self.shape[-1]} is no multiple of {values}")
        return math.prod(self.shape) // values * size


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def encode_value(value) -> bytes:
    """Type code and bytes of a metadata value: bool, int (u32), float (f32), str, list of str, NumPy array, Typed."""
    if isinstance(value, bool):
        value = Typed(GGUFValueType.BOOL, value)
    elif isinstance(value, int):
        value = Typed(GGUFValueType.UINT32, value)
    elif isinstance(value, float):
        value = Typed(GGUFValueType.FLOAT32, value)
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + struct.pack(_SCALAR_FORMATS[value.kind], value.value)
    if isinstance(value, str):
        return struct.pack("<I", GGUFValueType.STRING) + _string(value)
    if isinstance(value, np.ndarray):
        head = struct.pack("<IIQ", GGUFValueType.ARRAY, _ARRAY_TYPES[value.dtype.name], value.size)
        return head + value.astype(value.dtype.newbyteorder("<")).tobytes()
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, len(value))
    return head + b"".join(_string(item) for item in value)


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def write_gguf(path: pathlib.Path, metadata: dict, tensors: Iterable[TensorPlan]) -> int:
    """Write one file, tensor after tensor, and return its size in bytes.

    Raises
    ------
    ValueError
        A tensor's chunks do not add up to its size, or its rows do not tile its blocks.
    """
    tensors = list(tensors)
    header = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    header += [_string(key) + encode_value(value) for key, value in metadata.items()]
    offset = 0
    for t in tensors:
        dims = t.shape[::-1]  # GGUF counts from the fastest axis
        header.append(_string(t.name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims))
        header.append(struct.pack("<IQ", t.kind, offset))
        offset += t.n_bytes + _padding(t.n_bytes)
    head = b"".join(header)
    with open(path, "wb", buffering=0) as f:
        f.write(head + bytes(_padding(len(head))))
        for t in tensors:
            written = 0
            for chunk in t.chunks():
                view = memoryview(chunk).cast("B")
                written += view.nbytes
                while view:  # an unbuffered write may be partial
                    view = view[f.write(view) :]
            if written != t.n_bytes:
                raise ValueError(f"tensor {t.name}: {written} bytes produced, {t.n_bytes} expected")
            f.write(bytes(_padding(written)))
        return f.tell()


def shard_paths(path: pathlib.Path, n_shards: int) -> list[pathlib.Path]:
    """Names of `n_shards` files as llama.cpp splits them; one shard keeps `path`."""
    if n_shards == 1:
        return [path]
    stem = path.name.removesuffix(".gguf")
    return [path.with_name(f"{stem}-{i + 1:05d}-of-{n_shards:05d}.gguf") for i in range(n_shards)]


def write_shards(
    path: pathlib.Path, metadata: dict, tensors: Iterable[TensorPlan], n_shards: int
) -> list[pathlib.Path]:
    """Write one file, or `n_shards` files of about equal size; the metadata goes into the first."""
    tensors = list(tensors)
    paths = shard_paths(path, n_shards)
    if n_shards == 1:
        write_gguf(path, metadata, tensors)
        return paths
    if n_shards > len(tensors):
        raise ValueError(f"{n_shards} shards for {len(tensors)} tensors; at most one shard per tensor")
    total = sum(t.n_bytes for t in tensors)
    groups: list[list[TensorPlan]] = [[] for _ in paths]
    done, k = 0, 0
    for i, t in enumerate(tensors):
        left = len(tensors) - i
        if groups[k] and k + 1 < n_shards and (done >= total * (k + 1) / n_shards or left <= n_shards - k - 1):
            k += 1
        groups[k].append(t)
        done += t.n_bytes
    for i, (shard, group) in enumerate(zip(paths, groups)):
        split = {
            "split.no": Typed(GGUFValueType.UINT16, i),
            "split.count": Typed(GGUFValueType.UINT16, n_shards),
            "split.tensors.count": Typed(GGUFValueType.INT32, len(tensors)),
        }
        write_gguf(shard, (metadata if i == 0 else {}) | split, group)
    return paths
