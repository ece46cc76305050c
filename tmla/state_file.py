"""The file of a saved state: what stands where, written whole and checked whole. Knows no model.

All numbers are little endian:

| bytes | what |
| --- | --- |
| 8 | ``tmla-kv\\n`` |
| 4 | version of the format, u32: 1 |
| 4 | H, bytes of the header, u32 |
| H | header, JSON: the fields of :class:`Header` |
| 4 n_past | tokens, i32 |
| n_layers n_past row_width (2 or 4) | cached rows, layer by layer, in the cache's own type |
| 32 | BLAKE2b of all bytes before |
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tmla.atomic import replacing
from tmla.errors import StateError
from tmla.gguf_kind import show

MAGIC, VERSION = b"tmla-kv\n", 1
MAX_HEADER_BYTES = 1 << 26  # a long conversation has a few hundred kB
SLAB_BYTES = 1 << 23  # rows that are read or written at a time
VALUE_BYTES = {"f16": 2, "f32": 4}

_START = struct.Struct("<8sII")
_DIGEST_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says about itself.

    Attributes
    ----------
    fingerprint, model : str
        Of the model that filled the cache: :func:`tmla.saved_state.fingerprint`, and its name for messages.
    cache_dtype : {"f16", "f32"}
    n_layers, row_width, n_past : int
        Layers, values of a row (C + R), positions.
    note : JSON value
        The saver's own: the conversation of ``tmla chat``; else None.
    """

    fingerprint: str
    model: str
    cache_dtype: str
    n_layers: int
    row_width: int
    n_past: int
    note: Any = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in one layer."""
        return self.row_width * VALUE_BYTES[self.cache_dtype]

    @property
    def data_bytes(self) -> int:
        """Bytes of tokens and rows."""
        return self.n_past * (4 + self.n_layers * self.row_bytes)

    @property
    def slab_rows(self) -> int:
        """Rows of a layer that are moved at a time."""
        return max(1, SLAB_BYTES // self.row_bytes)


@dataclasses.dataclass(frozen=True)
class StateFile:
    """A file that was read and found whole. Made by :func:`open_state`.

    Attributes
    ----------
    path : pathlib.Path
    header : Header
    tokens : list of int
        [n_past]
    digest : bytes
        BLAKE2b of the contents.
    rows_start : int
        Where the rows begin.
    """

    path: Path
    header: Header
    tokens: list[int]
    digest: bytes
    rows_start: int

    def fail(self, text: str) -> StateError:
        """Make an error about this file, to be raised by the caller."""
        return _error(self.path, text)

    def slabs(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Read the rows: layer, first position, u8 [n, row_bytes], at most 8 MiB at a time.

        Raises
        ------
        StateError
            At the latest at the end: the file is no longer the one that was opened.
        """
        h, changed = self.header, "was changed while it was read; save it again"
        try:
            with open(self.path, "rb") as f:
                digest = hashlib.blake2b(f.read(self.rows_start), digest_size=_DIGEST_BYTES)
                for layer in range(h.n_layers):
                    for first in range(0, h.n_past, h.slab_rows):
                        n = min(h.slab_rows, h.n_past - first)
                        data = f.read(n * h.row_bytes)
                        if len(data) != n * h.row_bytes:
                            raise self.fail(changed)
                        digest.update(data)
                        yield layer, first, np.frombuffer(data, np.uint8).reshape(n, h.row_bytes)
        except OSError as e:
            raise self.fail(f"cannot be read: {_reason(e)}") from None
        if digest.digest() != self.digest:
            raise self.fail(changed)


def write_state(
    path: str | os.PathLike[str], header: Header, tokens: Iterable[int], slabs: Iterable[np.ndarray]
) -> int:
    """Write a file, whole or not at all (:func:`tmla.atomic.replacing`).

    Parameters
    ----------
    path : str or os.PathLike
    header : Header
    tokens : iterable of int
        [n_past]
    slabs : iterable of np.ndarray, u8 [n, row_bytes]
        Rows, layer by layer.

    Returns
    -------
    int
        Bytes written.

    Raises
    ------
    StateError
        The file cannot be written, or would replace one that is no saved state; what was there is still there.
    """
    path = Path(path)
    _refuse_to_replace(path)
    try:
        text = json.dumps(dataclasses.asdict(header), ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as e:
        raise _error(path, f"the note is no JSON value: {e}; nothing was written") from None
    if len(text) > MAX_HEADER_BYTES:
        raise _error(path, f"its header would have {len(text):,} bytes, at most {MAX_HEADER_BYTES:,} are kept")
    digest, n_bytes = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0
    ids = np.fromiter(tokens, "<i4")

    def pieces() -> Iterator[bytes]:
        yield _START.pack(MAGIC, VERSION, len(text)) + text
        yield ids.tobytes()
        for slab in slabs:
            yield slab.tobytes()

    try:
        with replacing(path) as f:
            for piece in pieces():
                f.write(piece)
                digest.update(piece)
                n_bytes += len(piece)
            assert len(ids) == header.n_past
            assert n_bytes == _START.size + len(text) + header.data_bytes, "as many rows as the header says"
            f.write(digest.digest())
    except OSError as e:
        raise _error(path, f"cannot be written: {_reason(e)}; give another place") from None
    return n_bytes + _DIGEST_BYTES


def _refuse_to_replace(path: Path) -> None:
    """A slip of the keyboard must not cost another file."""
    try:
        with open(path, "rb") as f:
            start = f.read(len(MAGIC))
    except OSError:  # there is none, or the write will say why not
        return
    if start not in (b"", MAGIC):
        raise _error(path, f"exists, begins with {start!r} and is no state saved by tmla: it is not replaced")


def open_state(path: str | os.PathLike[str]) -> StateFile:
    """Read a file and check all of it: kind, version, size, types, checksum.

    Raises
    ------
    StateError
        There is no such file, it is none of this kind or version, or it is cut or damaged.
    """
    path = Path(path)
    try:
        if not path.is_file():
            what = "is no regular file" if path.exists() else "does not exist"
            raise _error(path, f"{what}, expected a state saved by tmla")
        with open(path, "rb") as f:
            return _read(path, f, os.fstat(f.fileno()).st_size)
    except OSError as e:
        raise _error(path, f"cannot be read: {_reason(e)}") from None


def _read(path: Path, f: BinaryIO, size: int) -> StateFile:
    start = f.read(_START.size)
    if not start.startswith(MAGIC) or len(start) < _START.size:
        raise _error(path, f"begins with {start[:8]!r}, expected {MAGIC!r}: it is no state saved by tmla")
    _, version, n_header = _START.unpack(start)
    if version != VERSION:
        raise _error(path, f"has version {version} of the format, expected {VERSION}; save it again with this tmla")
    if n_header > min(size, MAX_HEADER_BYTES):
        raise _error(path, f"claims a header of {n_header:,} bytes in {size:,}; {_DAMAGED}")
    text = f.read(n_header)
    header = _header(path, text)
    rows_start = _START.size + n_header + 4 * header.n_past
    expected = _START.size + n_header + header.data_bytes + _DIGEST_BYTES
    if size != expected:
        raise _error(path, f"has {size:,} bytes, expected {expected:,} by its header; {_DAMAGED}")
    ids = f.read(4 * header.n_past)
    digest = hashlib.blake2b(start + text + ids, digest_size=_DIGEST_BYTES)
    left = header.n_past * header.n_layers * header.row_bytes
    while left and (piece := f.read(min(left, 1 << 20))):
        digest.update(piece)
        left -= len(piece)
    if left or f.read() != digest.digest():
        raise _error(path, f"does not agree with its own checksum; {_DAMAGED}")
    return StateFile(path, header, np.frombuffer(ids, "<i4").tolist(), digest.digest(), rows_start)


_DAMAGED = "it is cut or damaged: save it again"


def _header(path: Path, text: bytes) -> Header:
    kinds = {"fingerprint": str, "model": str, "cache_dtype": str, "n_layers": int, "row_width": int, "n_past": int}
    try:
        data = json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise _error(path, f"has a header that is no JSON; {_DAMAGED}") from None
    if not isinstance(data, dict) or data.keys() != {*kinds, "note"}:
        raise _error(path, f"has a header without the expected fields; {_DAMAGED}")
    for name, kind in kinds.items():
        if type(data[name]) is not kind:
            raise _error(path, f"has {name} {show(data[name])} in its header, expected {kind.__name__}; {_DAMAGED}")
    header = Header(**data)
    if header.cache_dtype not in VALUE_BYTES or min(header.n_layers, header.row_width) < 1 or header.n_past < 0:
        raise _error(path, f"has impossible numbers in its header; {_DAMAGED}")
    return header


def _error(path: Path, text: str) -> StateError:
    return StateError(f"{show(path.name)}: {text}")


def _reason(e: OSError) -> str:
    return (e.strerror or str(e)).lower()
