"""Copies cached rows out of the fields and into them, some rows at a time and bit by bit.

As in :mod:`tmla.upload`: on CPU NumPy reads and writes a field's memory, on a GPU small kernels copy its words.
"""

from collections.abc import Iterator

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.upload import host_views


class CacheRows:
    """Rows of a model's latent cache as bytes.

    Parameters
    ----------
    banks : sequence of AttentionBank
        With ``first``, ``n``, ``cache``, ``cache_dtype`` and ``row_width``. Must outlive this object.
    """

    def __init__(self, banks):
        runtime.sync()
        self._views = [] if runtime.caps().gpu else host_views([b.cache for b in banks])
        self._place = [(bank, i, k) for k, bank in enumerate(banks) for i in range(bank.n)]
        self._row_bytes = banks[0].row_width * {"f16": 2, "f32": 4}[banks[0].cache_dtype]

    def get(self, layer: int, first: int, n: int) -> np.ndarray:
        """Rows ``first`` to ``first + n`` of a layer, u8 [n, bytes of a row], without the padding of words."""
        bank, i, k = self._place[layer]
        if self._views:
            return self._views[k][i, first : first + n].view(np.uint8)
        words = np.empty((n, bank.cache.shape[2]), np.uint64)
        _get_words(bank.cache, i, first, words)
        return words.view(np.uint8)[:, : self._row_bytes]

    def put(self, layer: int, first: int, rows: np.ndarray) -> None:
        """Write rows, u8 [n, bytes of a row], to position `first` and on; the padding of words becomes zero."""
        bank, i, k = self._place[layer]
        if self._views:
            self._views[k][i, first : first + len(rows)].view(np.uint8)[...] = rows
            return
        padded = np.zeros((len(rows), bank.cache.shape[2] * 8), np.uint8)
        padded[:, : rows.shape[1]] = rows
        _put_words(padded.view(np.uint64), bank.cache, i, first)

    def all_of(self, n_past: int, slab_rows: int) -> Iterator[np.ndarray]:
        """The first `n_past` rows of every layer, in order, at most `slab_rows` at a time."""
        for layer in range(len(self._place)):
            for first in range(0, n_past, slab_rows):
                yield self.get(layer, first, min(slab_rows, n_past - first))


@ti.kernel
def _get_words(cache: ti.template(), layer: ti.i32, first: ti.i32, words: ti.types.ndarray(ti.u64, 2)):
    for t, i in ti.ndrange(words.shape[0], words.shape[1]):
        words[t, i] = cache[layer, first + t, i]


@ti.kernel
def _put_words(words: ti.types.ndarray(ti.u64, 2), cache: ti.template(), layer: ti.i32, first: ti.i32):
    for t, i in ti.ndrange(words.shape[0], words.shape[1]):
        cache[layer, first + t, i] = words[t, i]
