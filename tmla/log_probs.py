"""Probabilities of the next token from logits: in float64, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_BLOCK_VALUES = 1 << 20  # of a float64 temporary: 8 MB


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities, float64 [n, n_vocab], of logits [n, n_vocab]."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def blocks(n_rows: int, n_vocab: int) -> Iterator[slice]:
    """Slices of rows for which the temporaries of :func:`log_softmax` stay small."""
    step = max(1, _BLOCK_VALUES // n_vocab)
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Nats that each target costs, float64 [n]: logits [n, n_vocab], targets int [n]."""
    nats = np.empty(len(targets))
    for part in blocks(*logits.shape):
        logp = log_softmax(logits[part])
        nats[part] = -logp[np.arange(len(logp)), targets[part]]
    return nats


def rows_at_a_time(n_vocab: int) -> int:
    """Rows of f32 logits to ask a model for at once: about 32 MB, and 8 to 512 rows."""
    return min(512, max(8, (1 << 23) // n_vocab))
