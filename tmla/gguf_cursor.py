"""A bounded reader over the memory map of one GGUF file: integers, strings, metadata values.

No length from the file is used before it is compared with what is left of the file, and of what a header may hold.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType

from tmla.errors import GGUFError
from tmla.gguf_kind import raw_piece, show

# What a sane header never exceeds. The bounds keep a damaged or hostile one from taking memory or time.
# For comparison: a vocabulary of 130,000 tokens and its merges take less than 10 MB.
MAX_HEADER_BYTES = 1 << 26
MAX_ITEMS = 1 << 22  # array elements of one header together; an array within an array counts as NESTED_COST
NESTED_COST = 64
MAX_DEPTH = 3

_NUMBERS = {
    GGUFValueType.UINT8: "u1", GGUFValueType.INT8: "i1", GGUFValueType.UINT16: "u2", GGUFValueType.INT16: "i2",
    GGUFValueType.UINT32: "u4", GGUFValueType.INT32: "i4", GGUFValueType.FLOAT32: "f4", GGUFValueType.BOOL: "u1",
    GGUFValueType.UINT64: "u8", GGUFValueType.INT64: "i8", GGUFValueType.FLOAT64: "f8",
}  # fmt: skip
_DTYPES = {int(kind): np.dtype("<" + code) for kind, code in _NUMBERS.items()}
_STRING, _ARRAY, _BOOL = int(GGUFValueType.STRING), int(GGUFValueType.ARRAY), int(GGUFValueType.BOOL)
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """Position in a header. Each read raises GGUFError if it would leave the file or the bounds above."""

    def __init__(self, path: Path, view: mmap.mmap):
        self.path, self.view, self.size = path, view, len(view)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.pos = 0
        self.items = 0

    def fail(self, text: str) -> GGUFError:
        """Make an error about this file, to be raised by the caller."""
        return GGUFError(f"{show(self.path.name)}: {text}")

    def damaged(self, text: str) -> GGUFError:
        """Make an error about a header that contradicts itself or the file."""
        return self.fail(f"{text}; the header is damaged: download or convert the file again")

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
        """Read an unsigned 32-bit integer; ``what`` names it in errors."""
        self.need(4, what)
        (value,) = _U32.unpack_from(self.view, self.pos)
        self.pos += 4
        return value

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer."""
        self.need(8, what)
        (value,) = _U64.unpack_from(self.view, self.pos)
        self.pos += 8
        return value

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        """Read a string: its length, at most ``limit`` bytes, then UTF-8."""
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

    def value(self, kind: int, what: str) -> Any:
        """Read one metadata value: bool, int, float, str, list of str, or NumPy array (list of those if nested)."""
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what, 1)
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
        """Return the little-endian NumPy type of a number type."""
        if kind not in _DTYPES:
            raise self.damaged(f"{what} has value type {kind}, expected 0 to {max(GGUFValueType)}")
        return _DTYPES[kind]

    def array(self, what: str, depth: int) -> Any:
        """Read element type, length and elements; numbers come as a copy in native byte order."""
        if depth > MAX_DEPTH:
            raise self.damaged(f"{what} nests arrays deeper than {MAX_DEPTH}")
        kind, n = self.u32("the element type of " + what), self.u64("the length of " + what)
        least = 8 if kind == _STRING else 12 if kind == _ARRAY else self.dtype(kind, what).itemsize
        self.need(n * least, what)
        self.items += n * NESTED_COST if kind == _ARRAY else n
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
        """Read ``n`` strings: the long part of a header (200,000 in DeepSeek-V2-Lite), so no method call per string."""
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
