"""How fast a Taichi kernel reads the memory of a GPU: the ceiling that stages are compared with there."""

import time

import taichi as ti

from tmla import runtime
from tmla.fields import FieldPool

N_WORDS = 1 << 26  # of 64 bits: 512 MB
THREADS = 1 << 17


@ti.kernel
def _read(words: ti.template(), n_threads: ti.i32, out: ti.template()):
    for i in range(n_threads):
        acc = ti.u64(0)
        for k in range(words.shape[0] // n_threads):
            acc ^= words[k * n_threads + i]
        out[i] = acc


def device_read_gb_s(n_words: int = N_WORDS, repetitions: int = 10) -> float:
    """Fastest read of `n_words` u64 words by neighbouring threads, in GB/s; the running backend's memory."""
    pool = FieldPool()
    n_threads = min(THREADS, n_words)
    words, out = pool.field(ti.u64, (n_words,)), pool.field(ti.u64, (n_threads,))
    words.fill(5)
    best = 0.0
    for i in range(repetitions + 1):
        runtime.sync()
        start = time.perf_counter_ns()
        _read(words, n_threads, out)
        runtime.sync()
        if i:
            best = max(best, (n_words // n_threads * n_threads) * 8 / (time.perf_counter_ns() - start))
    wrong = int((out.to_numpy() != 5 * ((n_words // n_threads) % 2)).sum())
    assert not wrong, f"{wrong} threads read something else"
    pool.destroy()
    return best
