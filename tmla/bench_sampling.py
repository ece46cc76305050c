"""What choosing a token costs on the host."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from tmla.sampling import Sampler

N_VOCAB = 102_400  # DeepSeek-V2-Lite's
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("temperature 0.8", {"temperature": 0.8}),
    ("top-k 40, top-p 0.95", {"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
    ("top-p 0.95", {"temperature": 0.8, "top_p": 0.95}),
    ("min-p 0.05", {"temperature": 0.8, "min_p": 0.05}),
)
_ZIPF = 1.5  # probability falls as rank to this power: some hundred tokens hold 95 %, as in text


def logits_like_text(n_vocab: int, seed: int = 0) -> np.ndarray:
    """Logits f32 [n_vocab] in no order, whose probabilities fall as a power of the rank."""
    logits = -_ZIPF * np.log(np.arange(1, n_vocab + 1))
    return np.random.default_rng(seed).permutation(logits).astype(np.float32)


def flat_logits(n_vocab: int, seed: int = 0) -> np.ndarray:
    """Logits f32 [n_vocab] of a normal distribution, as random weights give: the hard case for top-p."""
    return np.random.default_rng(seed).normal(0.0, 2.0, n_vocab).astype(np.float32)


def sampling_us(n_vocab: int = N_VOCAB, repetitions: int = 50) -> dict[str, float]:
    """Median time of one choice, in us, for each of :data:`SETTINGS`; the last once more among flat logits."""
    logits = logits_like_text(n_vocab)
    out = {name: _median_us(logits, values, repetitions) for name, values in SETTINGS}
    out["top-p 0.95, flat logits"] = _median_us(flat_logits(n_vocab), {"temperature": 0.8, "top_p": 0.95}, repetitions)
    return out


def _median_us(logits: np.ndarray, values: dict[str, Any], repetitions: int) -> float:
    sampler, times = Sampler(**values, seed=0), []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        sampler(logits)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[1:])
