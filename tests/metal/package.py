"""What the cases of the package share: Taichi started as the package would on Metal, and fields from arrays."""

import dataclasses
import types

import numpy as np
import taichi as ti

from tmla import runtime

from .case import Expect, tree

TYPES = {"float32": ti.f32, "float16": ti.f16, "uint8": ti.u8, "int32": ti.i32, "uint32": ti.u32, "uint64": ti.u64}


class LateLaunch:
    """Stands for :class:`tmla.runtime.Launch`: the kernel is called, and so compiled, only when it is launched.

    A launch bound ahead passes by the calls that the export records, and would compile for the device at hand.
    """

    def __init__(self, kernel, *args):
        self._kernel, self._args = kernel, args

    def __call__(self):
        self._kernel(*self._args)


def start_taichi():
    """Start the package on "metal", which is software Vulkan here, with the 32 lanes that Apple's SIMD groups have."""
    ti.metal = ti.vulkan
    ti._lib.core.with_metal = lambda: True
    runtime.init("metal")
    runtime._caps = dataclasses.replace(runtime.caps(), lanes=32)
    runtime.Launch = LateLaunch


class Fields:
    """Makes fields and remembers in :attr:`inputs` what they hold; the same calls as the test fixture ``field``."""

    def __init__(self):
        self.inputs = {}

    def __call__(self, array, dtype=None):
        """Field that starts with the values of an array."""
        field = tree(dtype or TYPES[array.dtype.name], *array.shape)
        self.inputs[field] = array
        return field

    def poisoned(self, *shape, dtype=ti.f32):
        """Field that starts as NaN, or -1."""
        return tree(dtype, *shape)

    def number(self, value):
        """One-element i32 field: a position, or a layer."""
        return self(np.array([value], np.int32))

    def q8(self, w_q, w_d):
        """Fields of Q8_0 matrices as GPUs hold them: quants u8 [L, O, I] in words of eight, and scales."""
        return self(np.ascontiguousarray(w_q).view(np.uint64)), self(w_d)


class Record(types.SimpleNamespace):
    """Fields and numbers by name, as one template argument of a kernel."""

    _data_oriented = True
    __hash__ = object.__hash__


def close(array, tolerance=1e-4, where=None):
    """Expectation with the tolerance that the stage tests use: f32 sums in another order."""
    return Expect(array, rtol=tolerance, atol=tolerance, where=where)


def rope_table(n_ctx, r):
    """Cosine and sine of quickly turning pairs, f32 [n_ctx, r/2, 2]."""
    angle = np.arange(n_ctx)[:, None] * 100.0 ** (-np.arange(r // 2) * 2.0 / r)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def only(shape, index):
    """Mask of `shape` that is true at `index`."""
    mask = np.zeros(shape, bool)
    mask[index] = True
    return mask
