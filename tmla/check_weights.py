"""Weights in NumPy for the checks: of a file's layer, by the names that the fields have."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tmla import plan
from tmla.config import MLAConfig
from tmla.gguf_file import GGUFFile, q8_0_split
from tmla.stages.linear import matvec_q8_ref

SLAB_VALUES = 1 << 22  # weights dequantised at a time: 32 MB


class Weights(Protocol):
    """Weights of one layer, by the names of its :func:`layer_roles`."""

    def blocks(self, name: str, expert: int | None = None) -> np.ndarray:
        """Q8_0 blocks u8 [rows, I/32, 34] of a matrix, or of one expert's part of it."""

    def vector(self, name: str) -> np.ndarray:
        """A norm, router or bias in its shape."""


class FileWeights:
    """Weights of one layer of a file; see :class:`Weights`."""

    def __init__(self, gf: GGUFFile, cfg: MLAConfig, number: int):
        self._gf, self._n_experts, self._block = gf, cfg.n_experts, f"blk.{number}."
        self._roles = layer_roles(cfg, moe=cfg.is_moe_layer[number])

    def blocks(self, name: str, expert: int | None = None) -> np.ndarray:
        role = self._roles[name]
        parts = [self._gf.q8_0_blocks(self._tensor(source)) for source, _ in role.sources]
        blocks = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if expert is None:
            return np.asarray(blocks)  # those of a requantised file are made now
        rows = role.rows // self._n_experts
        start = expert * rows if role.half is None else (2 * expert + role.half) * rows
        return blocks[start : start + rows]

    def vector(self, name: str) -> np.ndarray:
        ((source, _),) = self._roles[name].sources
        return self._gf.array(self._tensor(source))

    def _tensor(self, source: str) -> str:
        return self._block + source + ("" if "." in source else ".weight")


def layer_roles(cfg: MLAConfig, *, moe: bool) -> dict[str, plan.Role]:
    """Roles of a whole layer, by field name."""
    return plan.attention_roles(cfg) | plan.ffn_roles(cfg, moe=moe)


def split(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q8_0 blocks u8 [rows, I/32, 34] as the references take them: quants u8 [rows, I], scales f16 [rows, I/32]."""
    quants, scales = q8_0_split(blocks)
    return quants.reshape(len(blocks), -1), scales


def slab_rows(width: int) -> int:
    """Rows of a matrix that are dequantised at a time."""
    return max(1, SLAB_VALUES // width)


def product(blocks: np.ndarray, x: np.ndarray) -> np.ndarray:
    """:func:`tmla.stages.linear.matvec_q8_ref` a slab of rows at a time: float64 [rows]."""
    step = slab_rows(x.size)
    return np.concatenate([matvec_q8_ref(*split(blocks[r : r + step]), x) for r in range(0, len(blocks), step)])
