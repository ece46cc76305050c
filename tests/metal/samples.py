"""Sample kernels that the harness is proven on: the shapes of code that the package's stages are made of."""

import numpy as np
import taichi as ti

from . import samples_ops
from .case import Built, Expect, MetalCase, tree

F32, F16 = np.float32, np.float16
LANES = 32  # of a SIMD group on Apple


@ti.kernel
def gemv(w_q: ti.template(), w_d: ti.template(), layer: ti.i32, x: ti.template(), y: ti.template(), bias: ti.f32):
    for o in range(y.shape[0]):
        acc = 0.0
        for b in range(w_d.shape[2]):
            part = 0.0
            for j in range(32):
                i = b * 32 + j
                part += ti.cast(ti.cast(w_q[layer, o, i], ti.i8), ti.f32) * x[i]
            acc += ti.cast(w_d[layer, o, b], ti.f32) * part
        y[o] = acc + bias


def build_gemv():
    rng = np.random.default_rng(1)
    w_q = rng.integers(-127, 128, (2, 5, 96)).astype(np.int8)
    w_d = (rng.uniform(0.5, 1.5, (2, 5, 3)) / 127).astype(F16)
    w_d[1, 2, 1] = 3e-7  # an f16 subnormal is a number
    x = rng.standard_normal(96).astype(F32)
    w = w_q[1].astype(F32) * np.repeat(w_d[1].astype(F32), 32, axis=-1)
    f_q, f_d, f_x, f_y = tree(ti.u8, 2, 5, 96), tree(ti.f16, 2, 5, 3), tree(ti.f32, 96), tree(ti.f32, 5)
    return Built(
        call=lambda: gemv(f_q, f_d, 1, f_x, f_y, 0.25),
        inputs={f_q: w_q.view(np.uint8), f_d: w_d, f_x: x},
        expected={f_y: Expect(w @ x + F32(0.25))},
    )


@ti.func
def lane_sum(value):
    return ti.cast(ti.simt.subgroup.reduce_add(value), ti.f32)


@ti.kernel
def words_gemv(w: ti.template(), x: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=64)
    for i in range(y.shape[0] * LANES):
        lane, o = i & 31, i >> 5
        acc = 0.0
        k = lane
        while k < w.shape[1]:
            word = w[o, k]
            for j in ti.static(range(4)):
                q = ti.cast(ti.cast((word >> (8 * j)) & ti.u32(255), ti.i8), ti.f32)
                acc += q * x[4 * k + j]
            k += LANES
        total = lane_sum(acc)
        if lane == 0:
            y[o] = total


def build_words_gemv():
    rng = np.random.default_rng(2)
    w = rng.integers(-127, 128, (7, 148)).astype(np.int8)  # 37 words a row: lanes with one and with two
    x = rng.standard_normal(148).astype(F32)
    f_w, f_x, f_y = tree(ti.u32, 7, 37), tree(ti.f32, 148), tree(ti.f32, 7)
    return Built(
        call=lambda: words_gemv(f_w, f_x, f_y),
        inputs={f_w: w.view(np.uint32), f_x: x},
        expected={f_y: Expect(w.astype(F32) @ x, atol=1e-3)},
    )


@ti.kernel
def softmax_block(x: ti.template(), n: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=128)
    for i in range(x.shape[0] * 128):
        t, row = i & 127, i >> 7
        s = ti.simt.block.SharedArray((128,), ti.f32)
        best = -1e30
        for j in range((n[0] - t + 127) >> 7):
            best = ti.max(best, x[row, t + j * 128])
        s[t] = best
        ti.simt.block.sync()
        for step in ti.static((64, 32, 16, 8, 4, 2, 1)):
            if t < step:
                s[t] = ti.max(s[t], s[t + step])
            ti.simt.block.sync()
        top = s[0]
        ti.simt.block.sync()
        total = 0.0
        for j in range((n[0] - t + 127) >> 7):
            total += ti.exp(x[row, t + j * 128] - top)
        s[t] = total
        ti.simt.block.sync()
        for step in ti.static((64, 32, 16, 8, 4, 2, 1)):
            if t < step:
                s[t] = s[t] + s[t + step]
            ti.simt.block.sync()
        for j in range((n[0] - t + 127) >> 7):
            y[row, t + j * 128] = ti.exp(x[row, t + j * 128] - top) / s[0]


def build_softmax_block():
    x = np.random.default_rng(3).standard_normal((3, 301)).astype(F32) * 4
    valid = np.arange(301) < 277
    f_x, f_n, f_y = tree(ti.f32, 3, 301), tree(ti.i32, 1), tree(ti.f32, 3, 301)
    top = x[:, :277].max(axis=1, keepdims=True)
    e = np.exp(x - top) * valid
    return Built(
        call=lambda: softmax_block(f_x, f_n, f_y),
        inputs={f_x: x, f_n: np.array([277])},
        expected={f_y: Expect(e / e.sum(axis=1, keepdims=True), atol=1e-6, where=np.broadcast_to(valid, x.shape))},
    )


@ti.kernel
def several_tasks(n: ti.template(), c: ti.template(), x: ti.template(), start: ti.i32, factor: ti.f32):
    for i in range(x.shape[0]):
        x[i] = x[i] * factor
    n[0] = n[0] + start
    end = n[0]
    for i in range(start, end):  # bounds that only global temporaries know
        x[i] = ti.exp(x[i])
        c[i] = i // 3 + i % 3


def build_several_tasks():
    x = np.random.default_rng(4).standard_normal(45).astype(F32)
    y = x * F32(0.5)
    y[3:13] = np.exp(y[3:13])
    c = np.full(45, -1)
    c[3:13] = np.arange(3, 13) // 3 + np.arange(3, 13) % 3
    f_n, f_c, f_x = tree(ti.i32, 1), tree(ti.i32, 45), tree(ti.f32, 45)
    return Built(
        call=lambda: several_tasks(f_n, f_c, f_x, 3, 0.5),
        inputs={f_n: np.array([10]), f_x: x},  # c keeps its poison, -1, where no loop writes
        expected={f_x: Expect(y), f_n: Expect(np.array([13])), f_c: Expect(c)},
    )


CASES = [
    MetalCase("gemv", build_gemv),
    MetalCase("words_gemv", build_words_gemv),
    MetalCase("softmax_block", build_softmax_block),
    MetalCase("several_tasks", build_several_tasks),
    *samples_ops.CASES,
]
