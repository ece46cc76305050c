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
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tmla.errors import GGUFError
from tmla.gguf_cursor import Cursor
from tmla.gguf_kind import not_gguf, quote, raw_piece, show

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18  # DeepSeek-V3 has about 1,100; 46,000 if each expert were three tensors of its own
MAX_NAME_BYTES = 65_535
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
_PAGE = 4096

_TYPES = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType if t in GGML_QUANT_SIZES}


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
    """Map one file and read its header; of the tensor data only the last page is looked at.

    Raises
    ------
    GGUFError
        The path is no regular readable file, the file is no little-endian GGUF of version 2 or 3, or its header
        does not fit the file.
    """
    try:
        info = path.stat()  # before opening: a pipe would wait for a writer
        if stat.S_ISDIR(info.st_mode):
            raise GGUFError(
                f"{show(path, 400)}: is a directory, expected a GGUF file; give the path of one{_inside(path)}"
            )
        if not stat.S_ISREG(info.st_mode):
            raise GGUFError(f"{show(path, 400)}: is a pipe or device, expected a GGUF file; save it to disk first")
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(4096)
            if not head.startswith(b"GGUF") or size < 24:
                raise GGUFError(f"{show(path.name)}: {not_gguf(head, size, f)}")
            view = mmap.mmap(f.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise GGUFError(f"{show(path, 400)}: no such file; check the path{_inside(path.parent)}") from None
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GGUFError(f"{show(path, 400)}: cannot be read ({reason}); check the path and its permissions") from None
    return _Header(path, view).shard()


def _inside(folder: Path) -> str:
    """Hint naming the first few GGUF files of a folder, or nothing."""
    try:
        names = sorted(e.name for e in os.scandir(folder) if e.name.endswith(".gguf"))
    except (OSError, ValueError):
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (there: {', '.join(show(n) for n in names[:3])}{more})" if names else ""


class _Header(Cursor):
    """The parts of a header in the order of the file."""

    def shard(self) -> Shard:
        self.pos = 4  # behind the magic
        self.version()
        n_tensors = self.count("tensor", 24, MAX_TENSORS)
        n_keys = self.count("metadata key", 13, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for i in range(n_keys):
            key = self.name(f"metadata key {i}")
            if key in metadata:
                raise self.damaged(f"metadata key {quote(key)} is there twice")
            metadata[key] = self.value(self.u32(f"the type of {quote(key)}"), f"metadata key {quote(key)}")
        alignment = self.alignment(metadata)
        raw = [self.tensor(i) for i in range(n_tensors)]
        start = -(-self.pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_name, n_bytes, offset in raw:
            if name in tensors:
                raise self.damaged(f"tensor {quote(name)} is there twice")
            if offset % alignment:
                raise self.damaged(
                    f"tensor {quote(name)} has data offset {offset}, expected a multiple of the alignment {alignment}"
                )
            tensors[name] = TensorInfo(name, shape, type_name, n_bytes, start + offset)
        order = sorted(tensors.values(), key=lambda t: t.offset)
        data_end = self.layout(order) if order else self.pos
        notes = self.tail(data_end, -(-data_end // alignment) * alignment, metadata)
        if order and order[-1].n_bytes >= _PAGE and not any(self.view[data_end - _PAGE : data_end]):
            notes += (
                f"{show(self.path.name)}: the tensor data ends in {_PAGE} zeros; unless the model has such rows, the "
                "download reserved its space but did not finish",
            )
        return Shard(self.path, metadata, tensors, np.frombuffer(self.view, np.uint8), notes)

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

    def name(self, what: str) -> str:
        """Read a name; zeros where one should be would otherwise pass for an empty one."""
        text = self.text(what, MAX_NAME_BYTES)
        if not text:
            raise self.damaged(f"{what}, at byte {self.pos}, is empty, expected a name")
        return text

    def alignment(self, metadata: dict[str, Any]) -> int:
        n = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(n) is not int or not 1 <= n <= MAX_ALIGNMENT or n & (n - 1):
            raise self.damaged(f"general.alignment is {show(n)}, expected a power of two from 1 to {MAX_ALIGNMENT}")
        return n

    def tensor(self, i: int) -> tuple[str, tuple[int, ...], str, int, int]:
        """Name, shape, type, bytes and offset (from the data's start) of one tensor."""
        name = self.name(f"the name of tensor {i}")
        what = f"tensor {quote(name)}"
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

    def layout(self, order: list[TensorInfo]) -> int:
        """Check that tensors, ordered by offset, lie apart and inside the file; return where the last one ends."""
        last_end, last = 0, None
        for t in order:
            if last is not None and t.offset < last_end:
                raise self.damaged(f"tensors {quote(last.name)} and {quote(t.name)} overlap at byte {t.offset}")
            last_end, last = t.offset + t.n_bytes, t
            if last_end > self.size:
                n_out = sum(u.offset + u.n_bytes > self.size for u in order)
                raise self.fail(
                    f"tensor {quote(t.name)} ({t.type} {list(t.shape)}) lies at bytes {t.offset} to {last_end}, "
                    f"but the file ends at byte {self.size} ({n_out} of {len(order)} tensors are not whole); the "
                    "download or copy was cut short, or the header is damaged: fetch the file again"
                    f"{raw_piece(self.path.name)}"
                )
        return last_end

    def tail(self, data_end: int, padded_end: int, metadata: dict[str, Any]) -> tuple[str, ...]:
        """Refuse a second GGUF file behind the tensor data; return a note about anything else there."""
        for at in (data_end, padded_end):
            if self.view[at : at + 4] == b"GGUF":
                count = metadata.get("split.count", 0)
                parts = f"{count} shards" if type(count) is int and count > 1 else "GGUF files"
                raise self.fail(
                    f"a second GGUF file begins at byte {at} of {self.size}: {parts} were joined with cat, which makes "
                    "no GGUF; keep the shards as separate files and give any one, or use llama-gguf-split --merge"
                )
        if self.size > padded_end:
            return (f"{show(self.path.name)}: {self.size - padded_end} bytes behind the last tensor are ignored",)
        return ()
