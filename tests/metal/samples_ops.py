"""More sample kernels: cross-lane operations, integer atomics, halves, and every elementary function in use."""

import numpy as np
import taichi as ti

from .case import Built, Expect, MetalCase, tree

F32, F16 = np.float32, np.float16
LANES = 32  # of a SIMD group on Apple


@ti.kernel
def lanes(x: ti.template(), k: ti.template(), y: ti.template(), z: ti.template(), turn: ti.i32):
    ti.loop_config(block_dim=64)
    for i in range(x.shape[0]):
        v, j = x[i], k[i]
        y[i, 0] = ti.cast(ti.simt.subgroup.reduce_add(v), ti.f32)
        y[i, 1] = ti.cast(ti.simt.subgroup.reduce_mul(v), ti.f32)
        y[i, 2] = ti.cast(ti.simt.subgroup.reduce_min(v), ti.f32) - ti.cast(ti.simt.subgroup.reduce_max(v), ti.f32)
        y[i, 3] = ti.cast(ti.simt.subgroup.inclusive_add(v), ti.f32)
        y[i, 4] = ti.cast(ti.simt.subgroup.broadcast(v, ti.u32(5)), ti.f32)
        z[i, 0] = ti.simt.subgroup.reduce_and(j)
        z[i, 1] = ti.simt.subgroup.reduce_or(j)
        z[i, 2] = ti.simt.subgroup.reduce_xor(j)
        z[i, 3] = ti.simt.subgroup.reduce_max(j) + turn
        z[i, 4] = ti.simt.subgroup.invocation_id() + 100 * ti.simt.subgroup.group_size()
        z[i, 5] = ti.simt.subgroup.elect()
        ti.simt.subgroup.barrier()


def build_lanes():
    rng = np.random.default_rng(5)
    x, k = rng.uniform(0.5, 1.5, 96 + 32).astype(F32), rng.integers(0, 1 << 20, 128)
    g, h = x.reshape(-1, LANES).astype(np.float64), k.reshape(-1, LANES)
    y, z = np.zeros((4, LANES, 5)), np.zeros((4, LANES, 6), np.int64)
    y[..., 0], y[..., 1] = g.sum(1)[:, None], g.prod(1)[:, None]
    y[..., 2], y[..., 3], y[..., 4] = (g.min(1) - g.max(1))[:, None], g.cumsum(1), g[:, 5:6]
    z[..., 0], z[..., 1] = np.bitwise_and.reduce(h, 1)[:, None], np.bitwise_or.reduce(h, 1)[:, None]
    z[..., 2], z[..., 3] = np.bitwise_xor.reduce(h, 1)[:, None], h.max(1)[:, None] - 2
    z[..., 4], z[..., 5] = np.arange(LANES) + 3200, np.arange(LANES) == 0
    f_x, f_k, f_y, f_z = tree(ti.f32, 128), tree(ti.i32, 128), tree(ti.f32, 128, 5), tree(ti.i32, 128, 6)
    return Built(
        call=lambda: lanes(f_x, f_k, f_y, f_z, -2),
        inputs={f_x: x, f_k: k},
        expected={f_y: Expect(y.reshape(128, 5)), f_z: Expect(z.reshape(128, 6))},
    )


@ti.kernel
def histogram(x: ti.template(), count: ti.template(), top: ti.template(), bits: ti.template()):
    ti.loop_config(block_dim=64)
    for i in range(x.shape[0]):  # a multiple of the block: Taichi puts a barrier before each atomic
        ti.atomic_add(count[x[i]], 1)
        ti.atomic_max(top[None], x[i])
        ti.atomic_or(bits[i & 3], ti.u32(1) << ti.cast(x[i], ti.u32))


def build_histogram():
    x = np.random.default_rng(6).integers(0, 9, 192)
    bits = [np.bitwise_or.reduce(1 << x[np.arange(192) % 4 == j]) for j in range(4)]
    f_x, f_count, f_top, f_bits = tree(ti.i32, 192), tree(ti.i32, 9), tree(ti.i32), tree(ti.u32, 4)
    return Built(
        call=lambda: histogram(f_x, f_count, f_top, f_bits),
        inputs={f_x: x, f_count: np.zeros(9), f_top: np.array(-7), f_bits: np.zeros(4)},
        expected={
            f_count: Expect(np.bincount(x, minlength=9)),
            f_top: Expect(x.max(keepdims=True)[0]),
            f_bits: Expect(np.array(bits)),
        },
    )


class Buffers:
    """A plain object that holds fields, as `state.py` does: a kernel's single template argument."""

    def __init__(self, n):
        self.row, self.out, self.n = tree(ti.f16, n), tree(ti.f16, n), n


@ti.kernel
def halves(b: ti.template(), scale: ti.f32):
    for i in range(b.n):
        b.out[i] = ti.cast(ti.cast(b.row[i], ti.f32) * scale, ti.f16)


@ti.kernel
def halves_again(b: ti.template()):
    for i in range(b.n):
        b.out[i] = b.out[i] * b.row[i] + ti.cast(0.5, ti.f16)


def build_two_launches():
    row = np.random.default_rng(7).standard_normal(33).astype(F16)
    b = Buffers(33)

    def call():
        halves(b, 2.5)
        halves_again(b)
        halves_again(b)

    out = (row.astype(F32) * F32(2.5)).astype(F16)
    for _ in range(2):
        out = (out * row).astype(F16) + F16(0.5)
    return Built(call=call, inputs={b.row: row}, expected={b.out: Expect(out, rtol=4e-3, atol=2e-3)})


@ti.kernel
def elementary(x: ti.template(), y: ti.template(), k: ti.template(), e: ti.f32):
    for i in range(x.shape[0]):
        v = x[i]
        y[i, 0] = ti.rsqrt(v) + ti.sqrt(v) + ti.exp(v) + ti.log(v)
        y[i, 1] = ti.sin(v) + ti.cos(v) + ti.tan(v) + ti.tanh(v) + ti.asin(v) + ti.acos(v)
        y[i, 2] = ti.floor(v * 9) + ti.ceil(v * 9) + ti.round(v * 9) + ti.abs(v - 1)
        y[i, 3] = ti.max(v, e) + ti.min(v, e) + ti.pow(v, e) + ti.atan2(v, e)
        y[i, 4] = v % e + v**3 + ti.select(v > e, v, e) + ti.math.sign(v - e)
        y[i, 5] = ti.bit_cast(ti.bit_cast(v, ti.u32) & ti.u32(0xFFFF0000), ti.f32)
        k[i, 0] = i // 7 + i % 7 + abs(i - 20) + ti.min(i, 9) + ti.max(i, 30)
        k[i, 1] = ti.math.clz(i) + (i << 3) + ((-i) >> 1) + (~i)
        k[i, 2] = ti.cast(ti.cast(i, ti.i64) * 2_000_000_011 >> 31, ti.i32)
        local = ti.Vector([0.0] * 4)
        for j in range(4):
            local[j] = v * j
        y[i, 6] = local[i & 3] + local[(i + 1) & 3]


def build_elementary():
    x = np.random.default_rng(8).uniform(0.05, 0.95, 45).astype(F32)
    v, e, i = x.astype(np.float64), 0.5, np.arange(45)
    y, k = np.zeros((45, 7)), np.zeros((45, 3), np.int64)
    y[:, 0] = v**-0.5 + v**0.5 + np.exp(v) + np.log(v)
    y[:, 1] = np.sin(v) + np.cos(v) + np.tan(v) + np.tanh(v) + np.arcsin(v) + np.arccos(v)
    nine = x * F32(9)
    y[:, 2] = np.floor(nine) + np.ceil(nine) + np.round(nine) + np.abs(v - 1)
    y[:, 3] = np.maximum(v, e) + np.minimum(v, e) + v**e + np.arctan2(v, e)
    y[:, 4] = v % e + v**3 + np.maximum(v, e) + np.sign(v - e)
    y[:, 5] = (x.view(np.uint32) & 0xFFFF0000).astype(np.uint32).view(F32)
    y[:, 6] = v * (i & 3) + v * ((i + 1) & 3)
    k[:, 0] = i // 7 + i % 7 + abs(i - 20) + np.minimum(i, 9) + np.maximum(i, 30)
    k[:, 1] = np.array([32 - int(n).bit_length() for n in i]) + (i << 3) + (-i >> 1) + ~i
    k[:, 2] = i * 2_000_000_011 >> 31
    f_x, f_y, f_k = tree(ti.f32, 45), tree(ti.f32, 45, 7), tree(ti.i32, 45, 3)
    return Built(call=lambda: elementary(f_x, f_y, f_k, e), inputs={f_x: x}, expected={f_y: Expect(y), f_k: Expect(k)})


CASES = [
    MetalCase("lanes", build_lanes),
    MetalCase("histogram", build_histogram),
    MetalCase("two_launches", build_two_launches),
    MetalCase("elementary", build_elementary),
]
