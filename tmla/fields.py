"""Fields on the running backend: made by name, counted in bytes, freed together."""

import contextlib
import math
from collections.abc import Iterator

import taichi as ti

from tmla import runtime
from tmla.errors import BackendError

MAX_FIELD = 2**31 - 1  # bytes and elements of one field: above, Taichi 1.7.4 wraps or ends the process


class FieldPool:
    """Fields that live and die together, each in a tree of its own.

    One tree per field is a rule, not a taste: children of one tree are packed without alignment on Vulkan and Metal,
    so that u8 and f16 fields of odd size corrupt their neighbours (taichi#8770).
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self._trees: list = []

    def field(self, dtype, shape: tuple[int, ...], name: str = "a field"):
        """Allocate one zeroed field of `dtype` and `shape`.

        Raises
        ------
        BackendError
            It is larger than a field can be, the memory does not suffice, or the device does not reach its end:
            names the field by `name`, its bytes and what can be done.
        """
        n = math.prod(shape)
        n_bytes = n * dtype_bytes(dtype)
        what = f"{name}, {dtype} {list(shape)}, takes {n_bytes:,} bytes"
        if max(n, n_bytes) > MAX_FIELD:
            raise BackendError(f"{what} and {n:,} elements in one field, at most {MAX_FIELD:,} fit; {_smaller()}")
        out = ti.field(dtype)
        builder = ti.FieldsBuilder()
        builder.dense(ti.axes(*range(len(shape))), shape).place(out)
        try:
            with _no_log():
                self._trees.append(builder.finalize())
        except RuntimeError as e:
            beside = f"beside {self.n_bytes:,} bytes of the same kind"
            raise BackendError(f"{what}, which could not be allocated {beside} ({_reason(e)}); {_smaller()}") from None
        caps = runtime.running()
        promised = caps.max_buffer if caps is not None else None
        if promised is not None and n_bytes > promised and not _reaches_end(out):
            raise BackendError(
                f"{what}, but a kernel does not reach its end: the device promises {promised:,} bytes a buffer "
                f"(maxStorageBufferRange); {_smaller()}"
            )
        if n_bytes % 4 and caps is not None and caps.arch == "vulkan":
            out.fill(0)  # Taichi zeroes whole words there, and leaves up to three bytes behind them as they were
        self.n_bytes += n_bytes
        return out

    def destroy(self) -> None:
        """Free every field of the pool. Fields of a runtime that was reset are gone already.

        On Metal the memory stays taken until the process ends: Taichi 1.7.4 cannot free a tree there.
        """
        trees, self._trees = self._trees, []
        if runtime.running() is None or runtime.caps().arch == "metal":
            trees = []
        for tree in trees:
            tree.destroy()
        self.n_bytes = 0


class FieldCounter:
    """Stands in for a :class:`FieldPool`: adds up bytes and allocates nothing."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def field(self, dtype, shape: tuple[int, ...], name: str = "") -> None:
        """Count one field."""
        self.n_bytes += math.prod(shape) * dtype_bytes(dtype)


def dtype_bytes(dtype) -> int:
    """Size in bytes of one element of a Taichi type used here."""
    return {ti.u8: 1, ti.f16: 2, ti.f32: 4, ti.i32: 4, ti.u64: 8}[dtype]


@contextlib.contextmanager
def _no_log() -> Iterator[None]:
    """Keep Taichi from logging an error that becomes one of ours."""
    ti.set_logging_level(ti.CRITICAL)
    try:
        yield
    finally:
        ti.set_logging_level(ti.ERROR)


def _smaller() -> str:
    caps = runtime.running()
    other = "" if caps is None or caps.arch == "cpu" else ", or use arch='cpu'"
    return f"ask for a smaller context or take a smaller model{other}"


def _reason(e: RuntimeError) -> str:
    return str(e).strip().splitlines()[-1].rpartition("] ")[2]  # without Taichi's file and line


def _reaches_end(f) -> bool:
    """Does a kernel reach the last element of a zeroed field that is larger than the device promises?"""
    first, last = (0,) * len(f.shape), tuple(size - 1 for size in f.shape)
    f[last] = 1
    reached = f[last] == 1 and f[first] == 0
    f[last] = 0
    return reached
