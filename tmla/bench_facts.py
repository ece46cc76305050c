"""What a speed is compared with: the bytes a token must read of a file; how fast this machine reads and multiplies."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tmla.config import open_checked

MIN_READ_BYTES = 1 << 28  # of the read ceiling: no processor's cache holds it


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """What a table says about a model file, and what a decoded token has to read of it."""

    filename: str
    model_type: str
    n_bytes: int
    n_params: int
    n_vocab: int
    arch: str
    token_weight_bytes: int
    cache_row_bytes: int  # of all layers, f16
    kv_b_split: bool = False

    def bytes_at(self, position: int, type_kv: str) -> int:
        """Bytes that the token at `position` reads: the active weights, and each cached row once."""
        return self.token_weight_bytes + (position + 1) * self.cache_row_bytes * (2 if type_kv == "f32" else 1)


def file_facts(path: str | os.PathLike[str], *, overrides: Mapping[str, Any] | None = None) -> FileFacts:
    """Read a file's header.

    Raises
    ------
    GGUFError
        As :func:`tmla.load`.
    """
    gf, cfg = open_checked(path, overrides=overrides)
    with gf:
        n_params = active = 0
        for t in gf.tensors.values():
            n_params += int(np.prod(t.shape, dtype=np.int64))
            block = re.match(r"blk\.(\d+)\.", t.name)
            if block and int(block[1]) >= cfg.n_layers:
                continue  # multi-token prediction, ignored
            if "_exps." in t.name:
                active += t.n_bytes * cfg.n_experts_used // cfg.n_experts
            elif t.name == "token_embd.weight" and not cfg.tied_head:
                active += t.n_bytes // t.shape[0]
            else:
                active += t.n_bytes
        size = f"{n_params / 1e9:.0f}B" if n_params >= 1e9 else f"{n_params / 1e6:.0f}M"
        return FileFacts(
            filename=gf.name,
            model_type=f"{cfg.arch} {size} Q8_0",
            n_bytes=gf.n_bytes,
            n_params=n_params,
            n_vocab=cfg.n_vocab,
            arch=cfg.arch,
            token_weight_bytes=active,
            cache_row_bytes=2 * cfg.n_layers * cfg.cache_row_width,
            kv_b_split=cfg.kv_b_split,
        )


def read_ceiling_gb_s(n_bytes: int, threads: int | None = None, repetitions: int = 5) -> float:
    """Fastest plain read of main memory by NumPy, in GB/s.

    Parameters
    ----------
    n_bytes : int
        As many as the work that is judged reads; at least :data:`MIN_READ_BYTES` are taken.
    threads : int, optional
        Default all cores.
    """
    threads = threads or os.cpu_count() or 1
    data = np.ones(max(n_bytes, MIN_READ_BYTES) // 8, np.uint64)
    parts = np.array_split(data, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            start = time.perf_counter_ns()
            total = sum(int(x) for x in pool.map(np.add.reduce, parts))
            elapsed = time.perf_counter_ns() - start
            assert total == data.size
            best = max(best, data.nbytes / elapsed)
    return best


def compute_ceiling_gop_s(n: int = 1024, repetitions: int = 5) -> float:
    """Fastest f32 matrix product of NumPy's BLAS, in 1e9 operations a second; its own number of threads."""
    a, b = np.random.default_rng(0).standard_normal((2, n, n), np.float32)
    best = 0.0
    for _ in range(repetitions):
        start = time.perf_counter_ns()
        a @ b
        best = max(best, 2 * n**3 / (time.perf_counter_ns() - start))
    return best
