"""Greedy choice on the device: the id of the largest logit, the first of equals."""

import numpy as np
import taichi as ti


@ti.func
def argmax_body(logits: ti.template(), n, token: ti.template()):
    ti.loop_config(serialize=True)
    for _ in range(1):
        best, value = 0, logits[0, 0]
        for i in range(1, n):
            if logits[0, i] > value:
                best, value = i, logits[0, i]
        token[0] = best


@ti.kernel
def _argmax(logits: ti.template(), n: ti.i32, token: ti.template()):
    argmax_body(logits, n, token)


def argmax(logits, n, token):
    """Write the id of the largest of the first `n` logits, f32 [1, n_vocab], to ``token`` i32 [1].

    Reference: :func:`argmax_ref`.
    """
    _argmax(logits, n, token)


def argmax_ref(logits):
    """NumPy reference: the first index of the maximum."""
    return int(np.argmax(logits))
