"""Copies from the file into fields.

On CPU a field's memory is the process's own: NumPy writes it directly, at the speed of a copy and with nothing to
compile. On a GPU small kernels copy slabs: a software Vulkan device takes 65,535 work groups a dispatch.
"""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import taichi as ti

from tmla import runtime
from tmla.gguf_file import q8_0_split
from tmla.stages.linear import Q8_BLOCK
from tmla.stages.words import WORD

SLAB_BLOCKS = 1 << 19  # Q8_0 blocks per copy: 17 MB
THREAD_BLOCKS = 1 << 17  # where CPU threads share the copy: 4 MB
HUGE_PAGE = 2 << 20
_NUMPY = {ti.u8: np.uint8, ti.f16: np.float16, ti.f32: np.float32, ti.i32: np.int32}


class Writer:
    """Writes arrays into fields of the running backend.

    Parameters
    ----------
    fields : sequence of ti.Field
        Every field that will be written, still zero.
    """

    def __init__(self, fields: Sequence):
        self._views = {} if runtime.caps().gpu else {id(f): v for f, v in zip(fields, host_views(fields))}
        for view in self._views.values():
            _ask_for_huge_pages(view)

    def put_q8(self, blocks, w_q, w_d, layer: int, row0: int) -> None:
        """Copy Q8_0 rows, u8 [rows, I/32, 34] or what gives such slices, to row `row0` and on of a layer."""
        n_rows, n_block = blocks.shape[:2]
        in_threads = bool(self._views) and isinstance(blocks, np.ndarray)
        step = max(1, (THREAD_BLOCKS if in_threads else SLAB_BLOCKS) // n_block)

        def put(r: int) -> None:
            part = blocks[r : r + step]
            quants, scales = q8_0_split(part)
            if self._views:
                rows = slice(row0 + r, row0 + r + len(part))
                self._views[id(w_q)][layer, rows].reshape(quants.shape)[...] = quants
                self._views[id(w_d)][layer, rows] = scales
            else:
                words = np.ascontiguousarray(quants).reshape(len(part), -1).view(np.uint64)
                _put_words(words, np.ascontiguousarray(scales), len(part), w_q, w_d, layer, row0 + r)

        slabs = range(0, n_rows, step)
        if in_threads and len(slabs) > 1:  # NumPy copies without Python's lock
            with ThreadPoolExecutor(min(runtime.caps().threads, len(slabs))) as threads:
                list(threads.map(put, slabs))  # an error of a thread is raised here
        else:
            for r in slabs:
                put(r)

    def put_f32(self, values: np.ndarray, f, layer: int) -> None:
        """Copy one layer's values into ``f[layer]``."""
        values = np.ascontiguousarray(values, np.float32)
        if self._views:
            self._views[id(f)][layer] = values.reshape(f.shape[1:])
        else:
            _put_f32(values.reshape(-1), f, layer)

    def put_all(self, values: np.ndarray, f) -> None:
        """Copy an array of a field's shape and type."""
        if self._views:
            self._views[id(f)][...] = values
        else:
            f.from_numpy(values)


def host_views(fields: Sequence) -> list[np.ndarray]:
    """The memory of CPU fields as arrays. A view must not outlive its field."""
    ends: list = []
    for i in range(0, len(fields), 32):  # Taichi warns of longer unrolled loops
        ends += _ends(fields[i : i + 32])
    views = []
    for f, (first, last) in zip(fields, ends):
        dtype, size = np.dtype(_NUMPY[f.dtype]), int(np.prod(f.shape))
        assert last - first == (size - 1) * dtype.itemsize, "a field's elements lie side by side"
        memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(first)
        views.append(np.frombuffer(memory, dtype).reshape(f.shape))
    return views


def _ask_for_huge_pages(zeros: np.ndarray) -> None:
    """Let Linux back a field that is all zero by pages of 2 MB: reads then run a third faster (docs/log.md).

    Taichi has touched the small pages already, so they are given back first; pages given back read as zero again. Only
    whole huge pages inside the field are touched. Where the kernel does not do it, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return
    start = -(-zeros.ctypes.data // HUGE_PAGE) * HUGE_PAGE
    n = (zeros.ctypes.data + zeros.nbytes - start) // HUGE_PAGE * HUGE_PAGE
    if n <= 0:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(start, n, mmap.MADV_HUGEPAGE) == 0:
        madvise(start, n, mmap.MADV_DONTNEED)


def _ends(fields: Sequence) -> list:
    """Addresses of the first and the last element of each field."""
    n = len(fields)
    first = [[0] * len(f.shape) for f in fields]
    last = [[size - 1 for size in f.shape] for f in fields]

    @ti.kernel
    def ask(out: ti.types.ndarray(ti.u64, 2)):
        for k in ti.static(range(n)):
            out[k, 0] = ti.get_addr(fields[k], first[k])
            out[k, 1] = ti.get_addr(fields[k], last[k])

    out = np.zeros((n, 2), np.uint64)
    ask(out)
    return out.tolist()


@ti.kernel
def _put_words(
    quants: ti.types.ndarray(ti.u64, 2),
    scales: ti.types.ndarray(ti.f16, 2),
    n: ti.i32,
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.i32,
    row0: ti.i32,
):
    for i in range(n * w_d.shape[2]):
        o = i // w_d.shape[2]
        b = i - o * w_d.shape[2]
        for j in ti.static(range(Q8_BLOCK // WORD)):
            w_q[layer, row0 + o, b * (Q8_BLOCK // WORD) + j] = quants[o, b * (Q8_BLOCK // WORD) + j]
        w_d[layer, row0 + o, b] = scales[o, b]


@ti.kernel
def _put_f32(values: ti.types.ndarray(ti.f32, 1), f: ti.template(), layer: ti.i32):
    if ti.static(len(f.shape) == 2):
        for i in range(f.shape[1]):
            f[layer, i] = values[i]
    else:
        for i in range(f.shape[1] * f.shape[2]):
            f[layer, i // f.shape[2], i % f.shape[2]] = values[i]
