"""Matrices of other types as Q8_0: dequantised and quantised again while they are read, a slab of rows at a time.

Both directions are the ``gguf`` package's own; its quantiser gives the bytes of ggml's ``quantize_row_q8_0_ref`` (ties
away from zero). A file opened here stands in for a :class:`tmla.gguf_file.GGUFFile`: who reads `q8_0_blocks` in slices
need not know.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf import quants as gguf_quants

from tmla import config
from tmla.config import MLAConfig
from tmla.errors import GGUFError
from tmla.gguf_file import Q8_BLOCK, Q8_BLOCK_BYTES, GGUFFile, open_gguf, q8_0_split
from tmla.gguf_kind import show
from tmla.tensor_check import REQUANTIZE_TYPES, check_tensors

SLAB_VALUES = 1 << 19  # weights held in f32 at a time by one worker: 2 MB
MAX_WORKERS = 8  # so at most 16 MB of f32 in all


class RequantizedFile(GGUFFile):
    """An open file of which every matrix reads as Q8_0. Made by :func:`open_requantized`.

    `tensors` still says what is in the file; `q8_0_blocks` gives the Q8_0 that it becomes.
    """

    def __init__(self, gf: GGUFFile):
        vars(self).update(vars(gf))
        self._base = gf

    def close(self) -> None:
        """Close the underlying file."""
        super().close()
        self._base.close()

    def q8_0_blocks(self, name: str) -> Any:
        """Return a matrix as Q8_0 blocks, u8 [rows, I/32, 34].

        Returns
        -------
        np.ndarray or Q8Rows
            A view for a Q8_0 tensor, else rows that are requantised when a slice of them is taken.

        Raises
        ------
        GGUFError
            There is no such tensor, its type cannot be loaded, or its rows do not tile into blocks.
        """
        info = self.info(name)
        if info.type == "Q8_0":
            return super().q8_0_blocks(name)
        where = f"{show(self.name)}: tensor {name!r}"
        if info.type not in REQUANTIZE_TYPES:
            raise GGUFError(f"{where} is {info.type}, expected Q8_0 or {', '.join(REQUANTIZE_TYPES)}; use a Q8_0 file")
        if info.shape[-1] % Q8_BLOCK:
            raise GGUFError(
                f"{where} has rows of {info.shape[-1]} values, expected a multiple of {Q8_BLOCK}: they do not tile "
                "into Q8_0 blocks, tmla cannot run this model"
            )
        return Q8Rows(self, name)

    def q8_0_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop`` of a matrix, requantised by this thread: u8 [stop - start, I/32, 34].

        Raises
        ------
        GGUFError
            A value is NaN or infinite, or too large for an f16 scale. Names tensor, row and block.
        """
        width = self.info(name).shape[-1]
        values = self.rows(name, start, stop)
        with np.errstate(all="ignore"):  # block scales that vanish or overflow; the latter are looked at below
            blocks = gguf_quants.quantize(values, GGMLQuantizationType.Q8_0)
        blocks = blocks.reshape(stop - start, width // Q8_BLOCK, Q8_BLOCK_BYTES)
        bad = ~np.isfinite(q8_0_split(blocks)[1])
        if bad.any():
            row, block = (int(i) for i in np.argwhere(bad)[0])
            part = values[row, block * Q8_BLOCK :][:Q8_BLOCK]
            worst = part[np.argmax(np.where(np.isfinite(part), np.abs(part), np.inf))]
            raise GGUFError(
                f"{show(self.name)}: tensor {name!r}: row {start + row}, block {block} has the value {float(worst)}, "
                "expected finite ones that an f16 scale times 127 can hold; the weights are damaged: download or "
                "convert the file again"
            )
        return blocks


class Q8Rows:
    """Rows of a matrix that become Q8_0 when they are sliced: ``rows[a:b]`` is u8 [b - a, I/32, 34].

    ``np.asarray(rows)`` takes all of them; temporaries stay small either way.
    """

    def __init__(self, gf: RequantizedFile, name: str):
        self._gf, self._name = gf, name
        shape = gf.tensors[name].shape
        self.shape = (math.prod(shape[:-1]), shape[-1] // Q8_BLOCK, Q8_BLOCK_BYTES)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, step = rows.indices(len(self))
        assert step == 1, "rows are taken in order"
        size = max(1, SLAB_VALUES // (self.shape[1] * Q8_BLOCK))
        out = np.empty((max(0, stop - start), *self.shape[1:]), np.uint8)

        def fill(first: int) -> None:
            last = min(first + size, stop)
            out[first - start : last - start] = self._gf.q8_0_rows(self._name, first, last)

        slabs = range(start, stop, size)
        if len(slabs) < 2:
            for first in slabs:
                fill(first)
            return out
        n_workers = min(MAX_WORKERS, os.cpu_count() or 1, len(slabs))
        with concurrent.futures.ThreadPoolExecutor(n_workers) as pool:  # NumPy lets go of the lock while it computes
            for _ in pool.map(fill, slabs):
                pass
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)


def open_requantized(gf: GGUFFile) -> RequantizedFile:
    """Return the same file with every matrix readable as Q8_0; closing it closes `gf`."""
    return RequantizedFile(gf)


def open_checked(
    path: str | os.PathLike, *, overrides: Mapping[str, Any] | None = None, requantize: bool = False
) -> tuple[GGUFFile, MLAConfig]:
    """Open a file and check all that can be checked without reading weights, as :func:`tmla.config.open_checked`.

    Parameters
    ----------
    path : str or os.PathLike
        The file, or any of its shards.
    overrides : dict, optional
        Metadata keys to replace or add.
    requantize : bool
        Accept the types of :data:`tmla.tensor_check.REQUANTIZE_TYPES` for matrices, too. What becomes of them is said
        in ``cfg.notes``.

    Returns
    -------
    gf : GGUFFile or RequantizedFile
        Open; the caller closes it.
    cfg : MLAConfig

    Raises
    ------
    GGUFError
    """
    if not requantize:
        return config.open_checked(path, overrides=overrides)
    gf = open_requantized(open_gguf(path, overrides=overrides))
    try:
        cfg = MLAConfig.from_gguf(gf)
        check_tensors(gf, cfg, matrix_types=("Q8_0", *REQUANTIZE_TYPES))
    except BaseException:
        gf.close()
        raise
    counts = {kind: len(names) for kind, names in matrices_by_type(gf, cfg).items() if kind != "Q8_0"}
    if counts:
        told = ", ".join(f"{n} matri{'ces' if n > 1 else 'x'} of {kind}" for kind, n in counts.items())
        cfg = dataclasses.replace(cfg, notes=(*cfg.notes, f"Requantised to Q8_0 while loading: {told}."))
    return gf, cfg


def matrices_by_type(gf: GGUFFile, cfg: MLAConfig) -> dict[str, list[str]]:
    """Return type -> names of the matrices of that type that decoding reads."""
    out: dict[str, list[str]] = {}
    for name, spec in cfg.expected_tensors().items():
        if spec.kind == "matrix":
            out.setdefault(gf.tensors[name].type, []).append(name)
    return dict(sorted(out.items()))
