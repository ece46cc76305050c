"""Opens a GGUF file, or all shards of one, and gives its metadata and tensors. Knows no model.

Opening reads the header alone; tensors are views on a memory map. See :mod:`tmla.gguf_scan` for the checks.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf import quants as gguf_quants

from tmla.errors import GGUFError
from tmla.gguf_kind import quote, show
from tmla.gguf_override import apply_overrides, parse_override
from tmla.gguf_scan import Shard, TensorInfo, scan

__all__ = ["GGUFFile", "TensorInfo", "open_gguf", "parse_override", "q8_0_dequantize", "q8_0_split"]

Q8_BLOCK = 32  # values that share one f16 scale
Q8_BLOCK_BYTES = 34  # f16 scale, then 32 int8 quants

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})(?P<ext>(?i:\.gguf))", re.S | re.A)


class GGUFFile:
    """An open GGUF file with all its shards. Made by :func:`open_gguf`; also a context manager.

    Attributes
    ----------
    path, name : pathlib.Path, str
        The path as given, and its last part.
    paths : tuple of pathlib.Path
        All shards in order; a single file is its own only shard.
    metadata : dict
        Key -> bool, int, float, str, numeric array (np.ndarray) or list of str; of the first shard, overrides applied.
    overridden : dict
        The overrides as applied.
    tensors : dict
        Name -> :class:`TensorInfo`, in file order.
    n_bytes : int
        Bytes of all shards on disk.
    notes : tuple of str
        What was found odd but harmless, one sentence each.

    Raises
    ------
    GGUFError
        Two shards hold the same tensor, or an override does not fit.
    """

    def __init__(self, path: Path, shards: list[Shard], overrides: Mapping[str, Any] | None = None):
        self.path, self.name = path, path.name
        self.paths = tuple(s.path for s in shards)
        self.metadata, self.overridden = apply_overrides(shards[0].metadata, overrides)
        self.tensors: dict[str, TensorInfo] = {}
        for i, s in enumerate(shards):
            for t in s.tensors.values():
                if t.name in self.tensors:
                    raise GGUFError(
                        f"{show(s.path.name)}: tensor {quote(t.name)} is also in "
                        f"{show(self.paths[self.tensors[t.name].shard].name)}, expected each in one shard; "
                        "the shards do not belong together: download them again"
                    )
                self.tensors[t.name] = dataclasses.replace(t, shard=i)
        self.n_bytes = sum(s.data.size for s in shards)
        self.notes = tuple(note for s in shards for note in s.notes)
        self._data: list[np.ndarray] = [s.data for s in shards]

    def close(self) -> None:
        """Let go of the memory maps. Views that were handed out stay valid and keep theirs until they are dropped."""
        self._data = []

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors, {len(self.paths)} files)"

    def info(self, name: str) -> TensorInfo:
        """Return the entry of tensor `name`; GGUFError if the file has none of that name."""
        if name not in self.tensors:
            raise GGUFError(f"{show(self.name)}: there is no tensor {quote(name)}; the conversion was incomplete")
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes of tensor `name` as they are: u8 [n_bytes], a read-only view on the memory map.

        GGUFError if there is no such tensor, or the file was closed.
        """
        t = self.info(name)
        if not self._data:
            raise GGUFError(f"{show(self.name)}: the file was closed before {quote(name)} was read; open it again")
        return self._data[t.shard][t.offset : t.offset + t.n_bytes]

    def q8_0_blocks(self, name: str) -> np.ndarray:
        """Return the blocks of the Q8_0 tensor `name`, u8 [rows, I/32, 34], without copying.

        A block is an f16 scale and 32 int8 quants (``block_q8_0`` in ggml-common.h); rows counts all leading axes.
        GGUFError if the tensor is of another type.
        """
        t = self.info(name)
        if t.type != "Q8_0":
            raise GGUFError(
                f"{show(self.name)}: tensor {quote(name)} has type {t.type}, expected Q8_0; convert the model to Q8_0"
            )
        return self.raw(name).reshape(math.prod(t.shape[:-1]), t.shape[-1] // Q8_BLOCK, Q8_BLOCK_BYTES)

    def array(self, name: str) -> np.ndarray:
        """Return the values of tensor `name` as a new array, f32 in the tensor's shape.

        F32, F16 and BF16 are exact, Q8_0 is ``d * q`` in f32; other quantised types go through the gguf package.

        Raises
        ------
        GGUFError
            There is no such tensor, or its type holds no values that the gguf package can read.
        """
        t = self.info(name)
        return self.rows(name, 0, math.prod(t.shape[:-1])).reshape(t.shape)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return some rows of a tensor as a new array: a large tensor can be read piece by piece.

        Parameters
        ----------
        name : str
        start, stop : int
            ``0 <= start <= stop <= rows``, where all leading axes count as one.

        Returns
        -------
        numpy.ndarray, f32 [stop - start, I]

        Raises
        ------
        GGUFError
            As :meth:`array`.
        """
        t = self.info(name)
        n_rows = math.prod(t.shape[:-1])
        assert 0 <= start <= stop <= n_rows
        row_bytes = t.n_bytes // n_rows
        raw = self.raw(name)[start * row_bytes : stop * row_bytes]
        if t.type == "F32":
            out = raw.view("<f4").astype(np.float32)
        elif t.type == "F16":
            with np.errstate(all="ignore"):  # NaN and infinity are for the caller to judge
                out = raw.view("<f2").astype(np.float32)
        elif t.type == "BF16":
            out = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif t.type == "Q8_0":
            out = q8_0_dequantize(raw.reshape(-1, Q8_BLOCK_BYTES))
        else:
            try:
                with np.errstate(all="ignore"):
                    out = gguf_quants.dequantize(raw.reshape(-1, row_bytes), GGMLQuantizationType[t.type])
            except NotImplementedError:
                raise GGUFError(
                    f"{show(self.name)}: tensor {quote(name)} has type {t.type}, which the gguf package cannot turn "
                    "into numbers; convert the model to Q8_0"
                ) from None
        return out.reshape(stop - start, t.shape[-1])


def q8_0_split(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split Q8_0 blocks, u8 [..., 34], into quants u8 [..., 32] (int8 bits) and scales f16 [...]; both are views."""
    return blocks[..., 2:], blocks[..., :2].view("<f2")[..., 0]


def q8_0_dequantize(blocks: np.ndarray) -> np.ndarray:
    """Values of Q8_0 blocks, u8 [..., 34] -> f32 [..., 32]: scale times quant, in f32."""
    quants, scales = q8_0_split(blocks)
    with np.errstate(all="ignore"):
        out = quants.view(np.int8).astype(np.float32)
        out *= scales.astype(np.float32)[..., None]
    return out


def open_gguf(path: str | os.PathLike[str], *, overrides: Mapping[str, Any] | None = None) -> GGUFFile:
    """Open a GGUF file; of a sharded one, any shard opens all.

    Parameters
    ----------
    path : str or os.PathLike
        GGUF version 2 or 3, little-endian.
    overrides : dict, optional
        Metadata key -> value, applied over the file's own; see :func:`parse_override` for text from a command line.

    Returns
    -------
    GGUFFile
        With every offset, size and count checked against the file; no tensor data has been read.

    Raises
    ------
    GGUFError
        The file is missing, damaged, incomplete, another format, or an override does not fit. One line: file, what was
        found, what was expected, what to do.
    """
    path = Path(path)
    first = scan(path)
    count = first.metadata.get("split.count", 0)
    match = _SHARD_NAME.fullmatch(path.name)
    named = (int(match["no"]), int(match["count"])) if match else (0, 0)
    if type(count) is int and count in (0, 1):  # llama-gguf-split --merge leaves a 0
        if named[1] > 1:
            note = (
                f"{show(path.name)}: named like shard {named[0]} of {named[1]}, but without the "
                "metadata of a shard (split.count): opened by itself"
            )
            first = dataclasses.replace(first, notes=(*first.notes, note))
        return GGUFFile(path, [first], overrides)
    if match is None or named[1:] != (count,) or not 1 <= named[0] <= named[1]:
        raise GGUFError(
            f"{show(path.name)}: is one of {show(count)} shards (split.count), expected a name that ends in "
            f"-00001-of-{show(count):0>5}.gguf; give the shards the names they were published with"
        )
    paths = [path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}{match['ext']}") for i in range(count)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise GGUFError(
            f"{show(path.name)}: shard {', '.join(show(m) for m in missing[:3])}{more} is missing, expected all "
            f"{count} in one folder; download it there"
        )
    shards = [first if p == path else scan(p) for p in paths]
    _check_shards(shards, count)
    return GGUFFile(path, shards, overrides)


def _check_shards(shards: list[Shard], count: int) -> None:
    for i, s in enumerate(shards):
        found = s.metadata.get("split.count"), s.metadata.get("split.no")
        if found[0] is None:
            raise GGUFError(
                f"{show(s.path.name)}: has no split.count, expected shard {i + 1} of {count}; "
                "another file stands in its place: download it again"
            )
        if found != (count, i) or any(type(v) is not int for v in found):
            no = found[1] + 1 if type(found[1]) is int else "an unnumbered one"
            raise GGUFError(
                f"{show(s.path.name)}: says it is shard {show(no)} of {show(found[0])}, expected {i + 1} of {count}; "
                "a shard was renamed, or two were mixed up: download it again"
            )
    want = shards[0].metadata.get("split.tensors.count")
    n = sum(len(s.tensors) for s in shards)
    if want is not None and want != n:
        raise GGUFError(
            f"{show(shards[0].path.name)}: the {count} shards hold {n} tensors, expected {show(want)} "
            "(split.tensors.count); they do not belong together: download them again"
        )
