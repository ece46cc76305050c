"""The kernels of ``tmla doctor``: the first that a Mac's user runs."""

import functools

import numpy as np
import taichi as ti

from tests.q8 import random_q8
from tmla import doctor_kernels as kernels

from .case import Built, Expect, MetalCase
from .package import Fields, start_taichi  # noqa: F401 (the export looks for the last)

LANES = 32


def exact(array, dtype=None):
    return Expect(np.asarray(array), 0, 0, dtype=dtype)


def build_block_sums():
    field, n_blocks = Fields(), 3
    x = np.random.default_rng(70).integers(-50, 50, n_blocks * kernels.SHARED).astype(np.float32)
    out = field.poisoned(n_blocks)
    call = functools.partial(kernels.block_sums, field(x), out)
    return Built(call, field.inputs, {out: exact(x.reshape(n_blocks, -1).sum(1))})


def build_lanes():
    field = Fields()
    x = np.random.default_rng(71).integers(-1000, 1000, 2 * kernels.BLOCK).astype(np.float32)
    total, top = field.poisoned(x.size), field.poisoned(x.size)
    groups = x.reshape(-1, LANES)
    expected = {total: exact(groups.sum(1).repeat(LANES)), top: exact(groups.max(1).repeat(LANES))}
    return Built(functools.partial(kernels.lane_results, field(x), total, top), field.inputs, expected)


def build_quants():
    field = Fields()
    w_q, _ = random_q8(np.random.default_rng(72), 1, 3, 96)
    words = field(np.ascontiguousarray(w_q).view(np.uint64))
    one, other = field.poisoned(3, 96), field.poisoned(3, 96)

    def call():
        kernels.read_quants(words, one)
        kernels.read_words(words, other)

    quants = exact(w_q[0].view(np.int8).astype(np.float32))
    return Built(call, field.inputs, {one: quants, other: quants})


def build_scales():
    field = Fields()
    bits = np.random.default_rng(73).integers(0, 0x7C00, (1, 5, 32)).astype(np.uint16)  # finite
    bits[0, 0, :4] = 0, 1, 0x3FF, 0x8000
    scales = bits.view(np.float16)
    value = field.poisoned(5, 32)
    copy, written = (field.poisoned(5, 32, dtype=ti.f16) for _ in range(2))
    call = functools.partial(kernels.read_scales, field(scales), copy, value, written)
    same = exact(scales[0])
    return Built(call, field.inputs, {copy: same, written: same, value: exact(scales[0].astype(np.float32))})


def build_large():
    field, n_threads = Fields(), 256
    words, out = field.poisoned(4 * n_threads, dtype=ti.u64), field.poisoned(n_threads, dtype=ti.u64)

    def call():
        kernels.fill_words(words, n_threads)
        kernels.sum_words(words, out, True)

    i = np.arange(4 * n_threads, dtype=np.uint64) * np.uint64(kernels.FACTOR)
    return Built(call, field.inputs, {words: exact(i), out: exact(i.reshape(4, n_threads).sum(0))})


def build_marks():
    field = Fields()
    words, out = field.poisoned(301, dtype=ti.u64), field.poisoned(101, dtype=ti.u64)

    def call():
        kernels.mark(words, 3, 101)
        kernels.read_marks(words, 3, out)

    return Built(call, field.inputs, {out: exact(np.arange(1, 102, dtype=np.uint64))})


def build_counts():
    field = Fields()
    n = field(np.zeros(64, np.int32))

    def call():
        kernels.count(n)
        kernels.count_by(n, 2)

    return Built(call, field.inputs, {n: exact(np.full(64, 3, np.int32))})


def build_copy():
    field = Fields()
    values = (np.arange(257) % 256).astype(np.uint8)
    target = field.poisoned(257, dtype=ti.u8)
    return Built(functools.partial(kernels.copy_row, field(values), target), field.inputs, {target: exact(values)})


CASES = [
    MetalCase("doctor_block_sums", build_block_sums),
    MetalCase("doctor_lanes", build_lanes),
    MetalCase("doctor_quants", build_quants),
    MetalCase("doctor_scales", build_scales),
    MetalCase("doctor_large_field", build_large),
    MetalCase("doctor_marks", build_marks),
    MetalCase("doctor_launches", build_counts),
    MetalCase("doctor_u8", build_copy),
]
