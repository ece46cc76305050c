"""Reads the header of one GGUF file from a memory map. Every count, length and offset is checked before it is used.

The ``gguf`` package's reader builds several NumPy arrays per string and checks little; this scanner walks the same
bytes with plain integers. Layout: ``ggml/docs/gguf.md``, versions 2 and 3, which are equal for little-endian files.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from .errors import GGUFError
from .gguf_kind import not_gguf, raw_piece, show

# What a sane header never exceeds. The bounds keep a damaged or hostile one from taking memory or time:
# DeepSeek-V3 has 129,280 tokens, 127,741 merges, 1,025 tensors and a header of 6 MB.
MAX_HEADER_BYTES = 1 << 27
MAX_ITEMS = 1 << 22  # all array elements of one header together
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME_BYTES = 65_535
MAX_DEPTH = 3
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_NUMBERS = {
    GGUFValueType.UINT8: "u1", GGUFValueType.INT8: "i1", GGUFValueType.UINT16: "u2", GGUFValueType.INT16: "i2",
    GGUFValueType.UINT32: "u4", GGUFValueType.INT32: "i4", GGUFValueType.FLOAT32: "f4", GGUFValueType.BOOL: "u1",
    GGUFValueType.UINT64: "u8", GGUFValueType.INT64: "i8", GGUFValueType.FLOAT64: "f8",
}  # fmt: skip
_DTYPES = {int(kind): np.dtype("<" + code) for kind, code in _NUMBERS.items()}
_STRING, _ARRAY, _BOOL = int(GGUFValueType.STRING), int(GGUFValueType.ARRAY), int(GGUFValueType.BOOL)
_TYPES = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType if t in GGML_QUANT_SIZES}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and what it is. ``shape`` is in NumPy order, slowest axis first: ``[O, I]``, ``[E, O, I]``.

    ``type`` is ggml's name ("Q8_0", "F32", ...), ``offset`` counts bytes from the start of file ``shard``.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    offset: int
    shard: int = 0

    @property
    def n_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One scanned file: metadata, tensors in file order, and its bytes (u8 [size], read-only, on the memory map)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: np.ndarray
    notes: tuple[str, ...]


def scan(path: Path) -> Shard:
    """Map one file and read its header; nothing of the tensor data is touched.

    Raises
    ------
    GGUFError
        The path is no regular readable file, the file is no little-endian GGUF of version 2 or 3, or its header
        does not fit the file.
    """
    try:
        info = path.stat()  # before opening: a pipe would wait for a writer
        if stat.S_ISDIR(info.st_mode):
            raise GGUFError(f"{show(path)}: is a directory, expected a GGUF file; give the path of one{_inside(path)}")
        if not stat.S_ISREG(info.st_mode):
            raise GGUFError(f"{show(path)}: is a pipe or device, expected a GGUF file; save it to disk first")
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(4096)
            if not head.startswith(b"GGUF") or size < 24:
                raise GGUFError(f"{show(path.name)}: {not_gguf(head, size, f)}")
            view = mmap.mmap(f.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise GGUFError(f"{show(path)}: no such file; check the path{_inside(path.parent)}") from None
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GGUFError(f"{show(path)}: cannot be read ({reason}); check the path and its permissions") from None
    return _Scanner(path, view, size).shard()


def _inside(folder: Path) -> str:
    """Hint naming the first few GGUF files of a folder, or nothing."""
    try:
        names = sorted(e.name for e in os.scandir(folder) if e.name.endswith(".gguf"))
    except (OSError, ValueError):
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (there: {', '.join(show(n) for n in names[:3])}{more})" if names else ""


class _Scanner:
    def __init__(self, path: Path, view: mmap.mmap, size: int):
        self.path, self.view, self.size = path, view, size
        self.end = min(size, MAX_HEADER_BYTES)
        self.pos = 4  # behind the magic
        self.items = 0
        self.notes: list[str] = []

    def fail(self, text: str) -> GGUFError:
        return GGUFError(f"{show(self.path.name)}: {text}")

    def damaged(self, text: str) -> GGUFError:
        return self.fail(f"{text}; the header is damaged: download or convert the file again")

    # primitive reads, each bounded

    def need(self, n: int, what: str) -> None:
        """Refuse if fewer than ``n`` bytes are left for ``what``."""
        if n <= self.end - self.pos:
            return
        if n > self.size:
            raise self.damaged(f"{what} at byte {self.pos} claims {n} bytes, the whole file has {self.size}")
        if self.end < self.size:
            raise self.damaged(f"the header goes on behind byte {self.end} ({what}), expected at most that much")
        raise self.fail(
            f"the file ends at byte {self.size}, within its header ({what} at byte {self.pos} needs {n} bytes); "
            f"the download or copy was cut short: fetch the file again{raw_piece(self.path.name)}"
        )

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.view, self.pos)
        self.pos += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.view, self.pos)
        self.pos += 8
        return value

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        n = self.u64("the length of " + what)
        if n > limit:
            raise self.damaged(f"{what} at byte {self.pos} claims {n} bytes, expected at most {limit}")
        self.need(n, what)
        raw = self.view[self.pos : self.pos + n]
        try:
            value = raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8 at byte {self.pos + error.start}") from None
        self.pos += n
        return value

    # metadata values

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what, depth + 1)
        dtype = self.dtype(kind, what)
        self.need(dtype.itemsize, what)
        (value,) = np.frombuffer(self.view, dtype, 1, self.pos).tolist()
        if kind == _BOOL:
            if value > 1:
                raise self.damaged(f"{what} is a boolean of value {value}, expected 0 or 1")
            value = bool(value)
        self.pos += dtype.itemsize
        return value

    def dtype(self, kind: int, what: str) -> np.dtype:
        if kind not in _DTYPES:
            raise self.damaged(f"{what} has value type {kind}, expected 0 to {max(GGUFValueType)}")
        return _DTYPES[kind]

    def array(self, what: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.damaged(f"{what} nests arrays deeper than {MAX_DEPTH}")
        kind, n = self.u32("the element type of " + what), self.u64("the length of " + what)
        least = 8 if kind == _STRING else 12 if kind == _ARRAY else self.dtype(kind, what).itemsize
        self.need(n * least, what)
        self.items += n
        if self.items > MAX_ITEMS:
            raise self.damaged(f"{what} brings the array elements to {self.items}, expected at most {MAX_ITEMS}")
        if kind == _STRING:
            return self.strings(n, what)
        if kind == _ARRAY:
            return [self.array(what, depth + 1) for _ in range(n)]
        raw = np.frombuffer(self.view, _DTYPES[kind], n, self.pos)
        self.pos += raw.nbytes
        if kind == _BOOL:
            if n and raw.max() > 1:
                raise self.damaged(f"{what} is an array of booleans with value {raw.max()}, expected 0 or 1")
            return raw.astype(np.bool_)
        return raw.astype(raw.dtype.newbyteorder("="))

    def strings(self, n: int, what: str) -> list[str]:
        """``n`` strings in a row: the long part of a header (200,000 in DeepSeek-V2-Lite), so no call per string."""
        view, end, pos, unpack = self.view, self.end, self.pos, _U64.unpack_from
        out: list[str] = []
        for _ in range(n):
            if pos + 8 > end:
                self.pos = pos
                self.need(8, f"element {len(out)} of {what}")
            (k,) = unpack(view, pos)
            start, pos = pos + 8, pos + 8 + k
            if pos > end:
                self.pos = start
                self.need(k, f"element {len(out)} of {what}")
            try:
                out.append(view[start:pos].decode())
            except UnicodeDecodeError as error:
                raise self.damaged(f"element {len(out)} of {what} is not UTF-8 at byte {start + error.start}") from None
        self.pos = pos
        return out

    # the parts of the file, in order

    def shard(self) -> Shard:
        self.version()
        n_tensors = self.count("tensor", 24, MAX_TENSORS)
        n_keys = self.count("metadata key", 13, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for i in range(n_keys):
            key = self.text(f"metadata key {i}", MAX_NAME_BYTES)
            if key in metadata:
                raise self.damaged(f"metadata key {show(key)!r} is there twice")
            metadata[key] = self.value(self.u32(f"the type of {show(key)!r}"), f"metadata key {show(key)!r}")
        alignment = self.alignment(metadata)
        raw = [self.tensor(i) for i in range(n_tensors)]
        start = -(-self.pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_name, n_bytes, offset in raw:
            if name in tensors:
                raise self.damaged(f"tensor {show(name)!r} is there twice")
            if offset % alignment:
                raise self.damaged(
                    f"tensor {show(name)!r} has data offset {offset}, expected a multiple of the alignment {alignment}"
                )
            tensors[name] = TensorInfo(name, shape, type_name, n_bytes, start + offset)
        self.layout(tensors, start, alignment, metadata)
        return Shard(self.path, metadata, tensors, np.frombuffer(self.view, np.uint8), tuple(self.notes))

    def version(self) -> None:
        version = self.u32("the version")
        if version in (2, 3):
            return
        if version == 1:
            raise self.fail(
                "GGUF version 1 (2023), expected version 2 or 3; convert the original model again, or get a newer file"
            )
        if version & 0xFFFF == 0 and version:
            raise self.fail(
                f"big-endian GGUF (version field 0x{version:08x}), expected little-endian; "
                "convert with gguf-convert-endian FILE little, or get the little-endian file"
            )
        raise self.fail(
            f"GGUF version {version}, expected 2 or 3; the file is damaged, or newer than this tmla: "
            "download it again, or update tmla"
        )

    def count(self, what: str, least: int, limit: int) -> int:
        n = self.u64(f"the {what} count")
        if n > limit or n * least > self.size:
            most = min(limit, self.size // least)
            raise self.damaged(f"claims {n} {what}s, expected at most {most} in {self.size} bytes")
        return n

    def alignment(self, metadata: dict[str, Any]) -> int:
        n = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(n) is not int or not 1 <= n <= MAX_ALIGNMENT or n & (n - 1):
            raise self.damaged(f"general.alignment is {show(n)}, expected a power of two from 1 to {MAX_ALIGNMENT}")
        return n

    def tensor(self, i: int) -> tuple[str, tuple[int, ...], str, int, int]:
        """Name, shape, type, bytes and offset (from the data's start) of one tensor."""
        name = self.text(f"the name of tensor {i}", MAX_NAME_BYTES)
        what = f"tensor {show(name)!r}"
        n_dims = self.u32(f"the number of dimensions of {what}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.damaged(f"{what} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
        dims = [self.u64(f"a dimension of {what}") for _ in range(n_dims)]
        type_id, offset = self.u32(f"the type of {what}"), self.u64(f"the data offset of {what}")
        if type_id not in _TYPES:
            raise self.fail(
                f"{what} has type number {type_id}, which the installed gguf package does not know; "
                "the type was retired (convert the model again), is newer (update gguf), or the header is damaged"
            )
        type_name, block, block_bytes = _TYPES[type_id]
        if 0 in dims:
            raise self.damaged(f"{what} has dimensions {dims}, expected none to be 0")
        if dims[0] % block:
            raise self.damaged(f"{what} is {type_name} with rows of {dims[0]} values, expected a multiple of {block}")
        n_elements = math.prod(dims)
        n_bytes = n_elements // block * block_bytes
        if n_elements >= 1 << 63 or n_bytes >= 1 << 63:
            raise self.damaged(f"{what} has dimensions {dims}, whose product does not fit 63 bits")
        return name, tuple(reversed(dims)), type_name, n_bytes, offset

    def layout(self, tensors: dict[str, TensorInfo], start: int, alignment: int, metadata: dict[str, Any]) -> None:
        """Tensor data lies inside the file, apart from each other, and nothing strange comes behind it."""
        order = sorted(tensors.values(), key=lambda t: t.offset)
        last_end, last = start if order else self.pos, None
        for t in order:
            if last is not None and t.offset < last_end:
                raise self.damaged(f"tensors {show(last.name)!r} and {show(t.name)!r} overlap at byte {t.offset}")
            last_end, last = t.offset + t.n_bytes, t
            if last_end > self.size:
                n_out = sum(u.offset + u.n_bytes > self.size for u in order)
                raise self.fail(
                    f"tensor {show(t.name)!r} ({t.type} {list(t.shape)}) lies at bytes {t.offset} to {last_end}, "
                    f"but the file ends at byte {self.size} ({n_out} of {len(order)} tensors are not whole); the "
                    "download or copy was cut short, or the header is damaged: fetch the file again"
                    f"{raw_piece(self.path.name)}"
                )
        padded = -(-last_end // alignment) * alignment
        for at in {last_end, padded}:
            if self.view[at : at + 4] == b"GGUF":
                count = metadata.get("split.count", 0)
                parts = f"{count} shards" if type(count) is int and count > 1 else "GGUF files"
                raise self.fail(
                    f"a second GGUF file begins at byte {at} of {self.size}: {parts} were joined with cat, which makes "
                    "no GGUF; keep the shards as separate files and give any one, or use llama-gguf-split --merge"
                )
        if self.size > padded:
            self.notes.append(f"{show(self.path.name)}: {self.size - padded} bytes behind the last tensor are ignored")
