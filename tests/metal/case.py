"""What a case of the Metal proof is: fields, a call that launches kernels, and what the fields must hold after it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import taichi as ti

Field = Any  # ti.Field, which has no usable static type


@dataclasses.dataclass(frozen=True)
class Expect:
    """Values that a field must hold, compared as ``|found - array| <= atol + rtol * |array|``.

    `where` (bool, same shape) limits the comparison; elsewhere the field may hold anything. `dtype` is what the field's
    bytes mean, where that is not the field's own type: words that hold floats.
    """

    array: np.ndarray
    rtol: float = 1e-4
    atol: float = 1e-5
    where: np.ndarray | None = None
    dtype: type | None = None


@dataclasses.dataclass
class Built:
    """One case, ready to export.

    Parameters
    ----------
    call : callable
        Launches kernels, directly or through stage wrappers, with fields, scalars and arrays. The launches are
        recorded with their arguments and none is executed.
    inputs : dict of field to array
        Contents before the call. A field that is not named starts as NaN (floats) or -1 (integers): outputs are
        poisoned without saying so.
    expected : dict of field to Expect
    """

    call: Callable[[], Any]
    inputs: dict[Field, np.ndarray]
    expected: dict[Field, Expect]


@dataclasses.dataclass(frozen=True)
class MetalCase:
    """A name and a function that builds the case once Taichi runs: ``build() -> Built``.

    It must be in the list ``CASES`` of the module that defines the function.
    """

    name: str
    build: Callable[[], Built]

    @property
    def module(self) -> str:
        """Where the exporting process finds the case."""
        return getattr(self.build, "func", self.build).__module__


def tree(dtype, *shape):
    """A field in a tree of its own, as every field of the package is; no shape means a scalar field."""
    field = ti.field(dtype)
    builder = ti.FieldsBuilder()
    if shape:
        builder.dense(ti.axes(*range(len(shape))), shape).place(field)
    else:
        builder.place(field)
    builder.finalize()
    return field
