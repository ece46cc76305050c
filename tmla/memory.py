"""How much memory this machine can give, and what a plan would take of it."""

import bisect
import ctypes
import os
import pathlib
import sys
from collections.abc import Callable

from tmla.errors import BackendError

RESERVE_BYTES = 600 << 20  # interpreter, compiler, staging buffers: what a load takes beyond its plan at most


def available_bytes() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say."""
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "darwin":  # unified memory: the GPU's as well; the system keeps about a quarter
        size, length = ctypes.c_uint64(0), ctypes.c_size_t(8)
        libc = ctypes.CDLL(None)
        if libc.sysctlbyname(b"hw.memsize", ctypes.byref(size), ctypes.byref(length), None, 0) == 0:
            return int(size.value * 3 // 4)
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def gib(n_bytes: float) -> str:
    """Bytes as text: ``1.5 GiB``."""
    return f"{n_bytes / 2**30:.2f} GiB"


def largest_n_ctx(planned: Callable[[int], int], limit: int, available: int) -> int:
    """Most positions, at most `limit`, for which the planned bytes fit; 0 when one position does not."""
    return bisect.bisect_right(range(1, limit + 1), available - RESERVE_BYTES, key=planned)


def check_fits(name: str, n_ctx: int, planned: Callable[[int], int], available: int | None) -> None:
    """Refuse a plan that is larger than the memory, and say what would fit.

    Raises
    ------
    BackendError
        Names the model, what it needs, what there is, and the context that would fit.
    """
    if available is None:
        return
    need = planned(n_ctx) + RESERVE_BYTES
    if need <= available:
        return
    fits = largest_n_ctx(planned, n_ctx, available)
    remedy = (
        f"a context of {fits} (--ctx {fits}) would fit"
        if fits
        else "weights and scratch alone do not fit; take a smaller model"
    )
    raise BackendError(
        f"{name}: weights, cache of {n_ctx} positions and scratch need {gib(need)}, {gib(available)} are free; {remedy}"
    )
