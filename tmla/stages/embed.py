"""Embedding: one row of a Q8_0 matrix, dequantised into the residual."""

import taichi as ti

from tmla import runtime
from tmla.stages.linear import Q8_BLOCK, dequantise_ref, q8_value


@ti.func
def embed_body(w_q: ti.template(), w_d: ti.template(), token, scale, x: ti.template()):
    ti.loop_config(serialize=ti.static(not runtime.caps().gpu))  # CPU: done before other threads are awake
    for i in range(x.shape[1]):
        x[0, i] = scale * ti.cast(w_d[0, token, i // Q8_BLOCK], ti.f32) * q8_value(w_q, 0, token, i)


@ti.kernel
def _embed(w_q: ti.template(), w_d: ti.template(), token: ti.i32, scale: ti.f32, x: ti.template()):
    embed_body(w_q, w_d, token, scale, x)


def embed(w_q, w_d, token, scale, x):
    """Write row `token` of the embedding, times `scale`, to the residual: [1, n_vocab, D] -> f32 [1, D].

    ``0 <= token < n_vocab`` is the caller's duty. Reference: :func:`embed_ref`.
    """
    _embed(w_q, w_d, token, scale, x)


def embed_ref(w_q, w_d, token, scale):
    """NumPy reference: u8 [n_vocab, D] -> float64 [D]."""
    return scale * dequantise_ref(w_q[token], w_d[token])
