"""CPU threads, and how the iterations of a loop are shared out among them.

Taichi 1.7.4 cuts every parallel loop of a CPU into one block of iterations a thread, but no block under 512 (its pass
``make_cpu_multithreaded_range_for``; `block_dim` has no say there). A loop of 16 long iterations would so run on one
thread, one of 700 on two, unevenly. Stages share out work themselves instead::

    for i in range(slots() * SPREAD):
        if i % SPREAD == 0:
            span = share(i, n)
            for k in range(span[0], span[1]):
                ...
"""

import taichi as ti

from tmla import runtime

SPREAD = 512  # fewest iterations that Taichi gives a thread


def slots() -> int:
    """Parts that a loop is cut into: one a CPU thread."""
    return runtime.caps().threads


@ti.func
def share(i, n):
    """First and end of the part of `n` things that iteration `i` of ``range(slots() * SPREAD)`` does."""
    s = i // SPREAD
    n_slots = ti.static(slots())
    return ti.Vector([s * n // n_slots, (s + 1) * n // n_slots])
