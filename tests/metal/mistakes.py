"""Kernels that are wrong for Metal, each for one reason: what the gate must refuse, and what only the run can see."""

import numpy as np
import taichi as ti

from .case import Built, Expect, MetalCase, tree

N = 256
X = np.random.default_rng(9).uniform(0.5, 1.5, N).astype(np.float32)
REVERSED = X.reshape(4, 64)[:, ::-1].reshape(N)


@ti.kernel
def shared_add(x: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=64)
    for i in range(N):
        s = ti.simt.block.SharedArray((64,), ti.f32)
        s[i & 63] = x[i]
        ti.simt.block.sync()
        s[i & 63] += 1.0  # an atomic; s[...] = s[...] + 1.0 is not
        ti.simt.block.sync()
        y[i] = s[63 - (i & 63)]


@ti.kernel
def float_atomic(x: ti.template(), y: ti.template()):
    for i in range(N):
        y[i & 3] += x[i]


@ti.kernel
def float_total(x: ti.template(), y: ti.template()):
    total = 0.0
    for i in range(N):
        total += x[i]
    y[0] = total


@ti.kernel
def float64(x: ti.template(), y: ti.template()):
    for i in range(N):
        y[i] = ti.cast(ti.cast(x[i], ti.f64) * 2.0, ti.f32)


@ti.kernel
def large_shared(x: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=64)
    for i in range(N):
        s = ti.simt.block.SharedArray((64 * 129,), ti.f32)
        s[i & 63] = x[i]
        ti.simt.block.sync()
        y[i] = s[63 - (i & 63)]


@ti.kernel
def block_of_96(x: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=96)
    for i in range(N):
        y[i] = x[i]


@ti.kernel
def lanes_truncated(x: ti.template(), y: ti.template()):
    for i in range(N):
        y[i] = ti.simt.subgroup.reduce_add(x[i]) - ti.simt.subgroup.reduce_max(x[i])


@ti.kernel
def infinite(x: ti.template(), y: ti.template()):
    for i in range(N):
        y[i] = x[i] if x[i] > -ti.math.inf else 0.0


@ti.kernel
def too_large(x: ti.template(), y: ti.template()):
    for i in range(N):
        y[i] = ti.max(x[i], -6e38)  # infinite in f32


@ti.kernel
def two_local_vectors(x: ti.template(), y: ti.template()):
    for i in range(N // 2):
        a = ti.Vector([0.0] * 4)
        for j in range(4):
            a[j] = x[i] * j
        y[i] = a[i & 3] + a[1]
    for i in range(N // 2, N):  # shares constants with the loop before it, wherever that went
        b = ti.Vector([0.0] * 4)
        for j in range(4):
            b[j] = x[i] * j
        y[i] = b[i & 3] + b[1]


@ti.kernel
def scan_of_max(x: ti.template(), y: ti.template()):
    for i in range(N):
        y[i] = ti.simt.subgroup.inclusive_max(x[i])


@ti.kernel
def many_fields(fields: ti.template(), y: ti.template()):
    for i in range(N):
        total = 0.0
        for k in ti.static(range(30)):
            total += fields.rows[k][i]
        y[i] = total


@ti.kernel
def copy(x: ti.template(), y: ti.template()):
    for i in range(N):
        y[i] = x[i]


@ti.kernel
def returning(x: ti.template()) -> ti.f32:
    return x[0]


@ti.kernel
def barrier_missing(x: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=64)
    for i in range(N):
        s = ti.simt.block.SharedArray((64,), ti.f32)
        s[i & 63] = x[i]
        y[i] = s[63 - (i & 63)]


@ti.kernel
def barrier_one_missing(x: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=64)
    for i in range(N):
        s = ti.simt.block.SharedArray((64,), ti.f32)
        y[i] = 0.0
        for k in range(2):  # the second time round, no one has waited for the readers
            s[i & 63] = x[i] * (k + 1)
            ti.simt.block.sync()
            y[i] = y[i] + s[63 - (i & 63)]


@ti.kernel
def through_device_memory(x: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=64)
    for i in range(N):
        y[i] = x[i]
        ti.simt.block.sync()  # orders shared arrays alone
        if (i & 63) == 0:
            y[i] = y[i + 1]


@ti.kernel
def barrier_divergent(x: ti.template(), y: ti.template()):
    ti.loop_config(block_dim=64)
    for i in range(N - 10):  # the last block is not full
        s = ti.simt.block.SharedArray((64,), ti.f32)
        s[i & 63] = x[i]
        ti.simt.block.sync()
        y[i] = s[i & 63]


@ti.kernel
def barrier_between_turns_missing(x: ti.template(), y: ti.template(), n: ti.i32):
    ti.loop_config(block_dim=64)
    for i in range(n * 64):  # of an end like this, a threadgroup may take several turns
        s = ti.simt.block.SharedArray((64,), ti.f32)
        s[i & 63] = x[i]
        ti.simt.block.sync()
        y[i] = s[63 - (i & 63)]


@ti.kernel
def lanes_divergent(x: ti.template(), y: ti.template()):
    for i in range(N):
        if x[i] > 1.0:
            y[i] = ti.simt.subgroup.reduce_add(x[i])
        else:
            y[i] = 1.0


@ti.kernel
def out_of_bounds(x: ti.template(), y: ti.template()):
    for i in range(N):
        y[i] = x[i + 1]


@ti.kernel
def unwritten(x: ti.template(), y: ti.template()):
    for i in range(N - 1):
        y[i] = x[i]


def build(kernel, expect=X, call=None):
    def built():
        x, y = tree(ti.f32, N), tree(ti.f32, N)
        return Built(call=lambda: kernel(x, y), inputs={x: X}, expected={y: Expect(expect)})

    return built


def build_turns():
    x, y = tree(ti.f32, N), tree(ti.f32, N)
    expected = {y: Expect(X.reshape(-1, 64)[:, ::-1].reshape(-1))}
    return Built(lambda: barrier_between_turns_missing(x, y, N // 64), {x: X}, expected)


class Rows:
    def __init__(self):
        self.rows = [tree(ti.f32, N) for _ in range(30)]


def build_many_fields():
    rows, y = Rows(), tree(ti.f32, N)
    return Built(lambda: many_fields(rows, y), {row: X for row in rows.rows}, {y: Expect(30 * X)})


def build_shared_tree():
    x, y = ti.field(ti.f32), ti.field(ti.f32)
    builder = ti.FieldsBuilder()
    builder.dense(ti.i, N).place(x)
    builder.dense(ti.i, N).place(y)
    builder.finalize()
    return Built(lambda: copy(x, y), {}, {})


def build_returning():
    x = tree(ti.f32, N)
    return Built(lambda: returning(x), {x: X}, {})


# Name, how it is built, and words that the gate's refusal must hold.
REFUSED = [
    ("shared_add", build(shared_add), "atomic compare-and-swap"),
    ("shared_add_spirv", build(shared_add), "spirv-val failed"),
    ("float_atomic", build(float_atomic), "atomic compare-and-swap"),
    ("float_total", build(float_total), "atomic compare-and-swap"),
    ("float64", build(float64), "f64 not supported"),
    ("large_shared", build(large_shared), "33024 bytes of threadgroup memory"),
    ("block_of_96", build(block_of_96), "power of two"),
    ("lanes_truncated", build(lanes_truncated), "wrap each in ti.cast"),
    ("infinite", build(infinite), "an infinite constant"),
    ("too_large", build(too_large), "an infinite constant"),
    ("two_local_vectors", build(two_local_vectors), "does not yet exist"),
    ("scan_of_max", build(scan_of_max), "doesn't support InclusiveScan"),
    ("many_fields", build_many_fields, "buffer index 32"),
    ("shared_tree", build_shared_tree, "holds 2 fields"),
    ("returning", build_returning, "buffer of kind Rets"),
]
# Name, how it is built, and words that the run's error must hold.
WRONG = [
    ("barrier_missing", build(barrier_missing, REVERSED), "without a barrier between"),
    ("barrier_one_missing", build(barrier_one_missing, 3 * REVERSED), "without a barrier between"),
    ("barrier_between_turns_missing", build_turns, "without a barrier between"),
    ("through_device_memory", build(through_device_memory), "in the same dispatch"),
    ("barrier_divergent", build(barrier_divergent), "finished"),
    ("lanes_divergent", build(lanes_divergent), "divergent"),
    ("out_of_bounds", build(out_of_bounds), "beyond its 256 elements"),
    ("unwritten", build(unwritten), "nan"),
    ("wrong_reference", build(copy, X + 1), "Mismatched elements"),
    ("zero_reference", build(copy, 0 * X), "proves nothing"),
]
CASES = [MetalCase(name, function) for name, function, _ in REFUSED + WRONG]
