"""Test data of the stages: Q8_0 matrices as arrays and as fields of the running backend, banks, one tolerance."""

import types

import numpy as np

from tmla import runtime
from tmla.stages.router import Routing


def random_q8(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random Q8_0 matrices: u8 quants [..., I] and f16 scales [..., I/32], values around 1/sqrt(I)."""
    w_q = rng.integers(-127, 128, shape).astype(np.int8).view(np.uint8)
    spread = 1.0 / (70.0 * np.sqrt(shape[-1]))
    w_d = (rng.uniform(0.5, 1.5, (*shape[:-1], shape[-1] // 32)) * spread).astype(np.float16)
    return w_q, w_d


def q8_fields(field, w_q: np.ndarray, w_d: np.ndarray, layout: str | None = None):
    """Fields of a stack of Q8_0 matrices, u8 [L, O, I] and f16 [L, O, I/32], in one layout (default: the backend's)."""
    if (layout or runtime.caps().layout) == "words":
        w_q = np.ascontiguousarray(w_q).view(np.uint64)
    return field(w_q), field(w_d)


class Bank(types.SimpleNamespace):
    """Fields and numbers of some layers, as a kernel argument; its first layer is number `first`."""

    _data_oriented = True
    __hash__ = object.__hash__

    def add(self, field, **matrices) -> None:
        """Take (w_q, w_d) arrays as fields named ``name_q``, ``name_d``."""
        for name, arrays in matrices.items():
            q, d = q8_fields(field, *arrays)
            setattr(self, name + "_q", q)
            setattr(self, name + "_d", d)


def routing(**changes) -> Routing:
    """A routing that is a plain softmax, but for the changes."""
    plain = {
        "n_used": 3,
        "sigmoid": False,
        "n_groups": 1,
        "n_groups_used": 1,
        "normalise": False,
        "scale": 1.0,
        "has_bias": False,
        "min_sum": 1e-20,
    }
    return Routing(**(plain | changes))


def number(field, value: int):
    """A one-element i32 field: a position, or a layer."""
    return field(np.array([value], np.int32))


def close(got: np.ndarray, ref: np.ndarray, tol: float = 1e-4) -> None:
    """Compare with one tolerance: f32 sums in another order. A zero reference proves nothing."""
    assert np.abs(ref).max() > 0.05
    np.testing.assert_allclose(got, ref, rtol=tol, atol=tol)
