"""What the cases of the package share: Taichi started as the package would on Metal, and fields from arrays."""

import dataclasses
import types

import numpy as np
import taichi as ti

from tmla import runtime

from .case import Expect, tree

TYPES = {"float32": ti.f32, "float16": ti.f16, "uint8": ti.u8, "int32": ti.i32, "uint32": ti.u32}


def start_taichi():
    """Start the package on "metal", which is software Vulkan here, with the 32 lanes that Apple's SIMD groups have."""
    ti.metal = ti.vulkan
    ti._lib.core.with_metal = lambda: True
    runtime.init("metal")
    runtime._caps = dataclasses.replace(runtime.caps(), lanes=32)


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


class Record(types.SimpleNamespace):
    """Fields and numbers by name, as one template argument of a kernel."""

    _data_oriented = True
    __hash__ = object.__hash__


def close(array, tolerance=1e-4, where=None):
    """Expectation with the tolerance that the stage tests use: f32 sums in another order."""
    return Expect(array, rtol=tolerance, atol=tolerance, where=where)


def only(shape, index):
    """Mask of `shape` that is true at `index`."""
    mask = np.zeros(shape, bool)
    mask[index] = True
    return mask
