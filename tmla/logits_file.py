"""Logits of one engine in a file, for another to be compared with: a NumPy ``.npz``.

======== ======================= =====================================================================
``tokens``  any integers [T]      ids as they were fed
``logits``  f32 [T, n_vocab]      row i: of the token that follows ``tokens[i]``; C order
``starts``  any integers [W]      where the cache was emptied, the first 0; may be left out: once, at 0
======== ======================= =====================================================================

Other arrays are not looked at. Rows are read and written some at a time; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from tmla.atomic import replacing
from tmla.errors import ParameterError
from tmla.gguf_kind import show

_DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    SyntaxError,
    MemoryError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)  # fmt: skip  (what zipfile and NumPy raise for files that are none)


@contextlib.contextmanager
def write_logits(
    path: str | os.PathLike[str], tokens: np.ndarray, starts: np.ndarray, n_vocab: int
) -> Iterator[Callable[[np.ndarray], None]]:
    """Write a file row by row; it is there when the body has ended well.

    Parameters
    ----------
    path : str or os.PathLike
    tokens : np.ndarray, int [T]
    starts : np.ndarray, int [W]
    n_vocab : int

    Yields
    ------
    callable
        Takes rows, f32 [n, n_vocab], T in all.

    Raises
    ------
    ParameterError
        The file cannot be written.
    """
    n_put = 0

    def put(rows: np.ndarray) -> None:
        nonlocal n_put
        n_put += len(rows)
        member.write(np.ascontiguousarray(rows, "<f4").tobytes())

    try:
        with replacing(path) as f, zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as z:
            for name, ids in (("tokens", tokens), ("starts", starts)):
                with z.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, np.asarray(ids, "<i8"), allow_pickle=False)
            with z.open("logits.npy", "w", force_zip64=True) as member:
                shape = (len(tokens), n_vocab)
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                yield put
                assert n_put == len(tokens), "a row for each token"
    except OSError as e:
        raise ParameterError(
            f"{show(Path(path).name)}: cannot be written: {(e.strerror or str(e)).lower()}; give another place"
        ) from None


class LogitsFile:
    """An open file of logits; also a context manager. The headers are checked here, the rows as they are read.

    Attributes
    ----------
    name : str
    tokens : np.ndarray, int64 [T]
    starts : np.ndarray, int64 [W]
    n_vocab : int

    Raises
    ------
    ParameterError
        The file is none, an array is missing or of another type or shape, or holds Python objects.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.name = show(Path(path).name)
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError:
            raise ParameterError(f"{self.name}: no such file") from None
        except _DAMAGED as e:
            raise self._fail(f"is no .npz file ({e}); write it with numpy.savez") from None
        try:
            self.tokens = self._ids("tokens")
            self.starts = self._ids("starts") if "starts.npy" in self._zip.namelist() else np.zeros(1, np.int64)
            self._member, shape, dtype = self._open("logits", 2)
            if dtype.str != "<f4":
                raise self._fail(f"has logits in {dtype}, expected float32; write logits.astype('<f4')")
            if shape[0] != len(self.tokens):
                raise self._fail(f"has {shape[0]} rows of logits and {len(self.tokens)} tokens, expected as many")
            self.n_vocab = shape[1]
            self._check()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> LogitsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._zip.close()

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return int(np.diff([*self.starts, len(self.tokens)]).max())

    def windows(self) -> Iterator[np.ndarray]:
        """Tokens of each window."""
        return iter(np.split(self.tokens, self.starts[1:]))

    def read(self, n: int) -> np.ndarray:
        """The next `n` rows, f32 [n, n_vocab]; ParameterError if the file ends, is damaged or they are not finite."""
        try:
            data = self._member.read(4 * n * self.n_vocab)
        except _DAMAGED as e:
            raise self._fail(f"cannot be read ({e}); write it again") from None
        if len(data) != 4 * n * self.n_vocab:
            raise self._fail("ends within its logits; write it again")
        rows = np.frombuffer(data, "<f4").reshape(n, self.n_vocab)
        if not np.isfinite(rows).all():
            raise self._fail("has logits that are not finite; look at the engine that wrote them")
        return rows

    def _check(self) -> None:
        n = len(self.tokens)
        if not n or not self.n_vocab:
            raise self._fail("has no tokens or no vocabulary, expected at least one of each")
        bad = np.flatnonzero((self.tokens < 0) | (self.tokens >= self.n_vocab))
        if bad.size:
            raise self._fail(f"has token {self.tokens[bad[0]]} at {bad[0]}, expected 0 to {self.n_vocab - 1}")
        s = self.starts
        if not len(s) or s[0] != 0 or (np.diff(s) <= 0).any() or s[-1] >= n:
            raise self._fail(f"has starts that do not rise from 0 and stay below {n}")

    def _ids(self, name: str) -> np.ndarray:
        member, shape, dtype = self._open(name, 1)
        if dtype.kind not in "iu":
            raise self._fail(f"has {name!r} in {dtype}, expected integers")
        try:
            data = member.read(shape[0] * dtype.itemsize)
        except _DAMAGED as e:
            raise self._fail(f"cannot be read ({e}); write it again") from None
        return np.frombuffer(data, dtype).astype(np.int64)

    def _open(self, name: str, n_axes: int) -> tuple[IO[bytes], tuple[int, ...], np.dtype]:
        """An array of the archive behind its header, which agrees with the array's size."""
        try:
            entry = self._zip.getinfo(f"{name}.npy")
        except KeyError:
            raise self._fail(f"has no array {name!r}, expected 'tokens' and 'logits'") from None
        try:
            member = self._zip.open(entry)
            version = np.lib.format.read_magic(member)
            read_header = _HEADERS.get(version)
            if read_header is None:
                raise ValueError(f"version {version} of the format")
            shape, fortran, dtype = read_header(member)
        except _DAMAGED as e:
            raise self._fail(f"has an array {name!r} that cannot be read ({e}); write it again") from None
        if dtype.hasobject:
            raise self._fail(f"has Python objects in {name!r}, which are never unpickled; expected plain numbers")
        if len(shape) != n_axes or min(shape, default=0) < 0:
            raise self._fail(
                f"has {name!r} of shape {list(shape)}, expected {'[T, n_vocab]' if n_axes == 2 else '[n]'}"
            )
        if fortran and n_axes > 1:
            raise self._fail(f"has {name!r} in Fortran order; write numpy.ascontiguousarray of it")
        if member.tell() + math.prod(shape) * dtype.itemsize != entry.file_size:
            raise self._fail(f"has {entry.file_size:,} bytes for {name!r} of shape {list(shape)}; write it again")
        return member, shape, dtype

    def _fail(self, text: str) -> ParameterError:
        return ParameterError(f"{self.name}: {text}")


_HEADERS: dict[tuple[int, int], Callable[..., tuple[tuple[int, ...], bool, np.dtype]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
