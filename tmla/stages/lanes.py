"""Lanes, the threads that run in step, and the compile-time numbers of kernels that count on them.

Device code here never assumes 32 lanes: a software Vulkan device has 8. Widths come from :func:`tmla.runtime.caps`.
"""

import taichi as ti

from tmla import runtime


def width() -> int:
    """Lanes that one cross-lane operation joins."""
    return runtime.caps().lanes


def lane_ops() -> str:
    """ "warp" or "subgroup": which of Taichi's cross-lane operations this backend has."""
    return runtime.caps().lane_ops


def cdiv(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(-a // b)


def log2(n: int) -> int:
    """Exponent of a power of two."""
    assert n > 0, n
    assert n & (n - 1) == 0, n
    return n.bit_length() - 1


def pow2(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


@ti.func
def lane_sum(v):
    """Sum of `v` over the lanes, in every lane."""
    r = v
    if ti.static(lane_ops() == "warp"):
        for k in ti.static(range(log2(width()))):
            bits = ti.simt.warp.shfl_xor_i32(ti.u32(0xFFFFFFFF), ti.bit_cast(r, ti.i32), width() >> (k + 1))
            r += ti.bit_cast(bits, ti.f32)
    else:
        r = ti.cast(ti.simt.subgroup.reduce_add(v), ti.f32)  # Taichi 1.7.4 takes the result for an i32
    return r


@ti.func
def lane_max(v):
    """Largest `v` of the lanes, in every lane."""
    r = v
    if ti.static(lane_ops() == "warp"):
        for k in ti.static(range(log2(width()))):
            bits = ti.simt.warp.shfl_xor_i32(ti.u32(0xFFFFFFFF), ti.bit_cast(r, ti.i32), width() >> (k + 1))
            r = ti.max(r, ti.bit_cast(bits, ti.f32))
    else:
        r = ti.cast(ti.simt.subgroup.reduce_max(v), ti.f32)
    return r


@ti.func
def total_of(part: ti.template(), first, n):
    """Sum of ``part[first : first + n]``, a shared array.

    A loop that is not unrolled: a constant index into a shared array makes Taichi 1.7.4 produce invalid SPIR-V in
    kernels of several loops ("Value ... does not yet exist").
    """
    s = 0.0
    for k in range(n):
        s += part[first + k]
    return s
