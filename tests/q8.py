"""Q8_0 test data, as arrays and as fields of the running backend's layout."""

import numpy as np

from tmla import runtime


def random_q8(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random Q8_0 matrices: u8 quants [..., I] and f16 scales [..., I/32], values around 1/sqrt(I)."""
    w_q = rng.integers(-127, 128, shape).astype(np.int8).view(np.uint8)
    spread = 1.0 / (70.0 * np.sqrt(shape[-1]))
    w_d = (rng.uniform(0.5, 1.5, (*shape[:-1], shape[-1] // 32)) * spread).astype(np.float16)
    return w_q, w_d


def q8_fields(field, w_q: np.ndarray, w_d: np.ndarray, layout: str | None = None):
    """Fields of a stack of Q8_0 matrices, u8 [L, O, I] and f16 [L, O, I/32], in one layout (default: the backend's)."""
    if (layout or runtime.caps().layout) == "words":
        w_q = np.ascontiguousarray(w_q).view(np.uint32)
    return field(w_q), field(w_d)


def close(got: np.ndarray, ref: np.ndarray, tol: float = 1e-4) -> None:
    """Compare with one tolerance: f32 sums in another order. A zero reference proves nothing."""
    assert np.abs(ref).max() > 0.05
    np.testing.assert_allclose(got, ref, rtol=tol, atol=tol)
