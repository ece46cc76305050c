"""CPU threads: how a kernel's work is shared out among them.

Taichi 1.7.4 cuts every parallel loop of a CPU into one block of iterations a thread, but no block under 512 (its pass
``make_cpu_multithreaded_range_for``; `block_dim` has no say there). A loop of 16 long iterations would so run on one
thread, one of 700 on two, unevenly. Kernels of one stage therefore start every thread once and give each its share::

    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            span = share(i // SPREAD, n)
            stage_part(span[0], span[1], ...)

Kernels of many stages start the threads once for all of them. Each stage is a :class:`Work` cut into parts; a thread
takes the next part that nobody has, and goes on to the next stage when what that one needs is done (:func:`do_all`).
So a thread that comes late or runs slowly holds nobody up for longer than a part takes, and no stage waits for threads
to wake: waking costs 15 to 100 us a loop, taking a part 0.1 us (docs/log.md).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import taichi as ti

from tmla import runtime

SPREAD = 512  # fewest iterations that Taichi gives a thread
PARTS = 8  # parts of a stage for each thread
MAX_WORKS = 16  # stages of one kernel
TAKEN, DONE = 0, 1  # columns of a desk: parts that threads have taken (or found gone), and parts that are done
DESK = (MAX_WORKS, 16)  # a stage's counts have a cache line to themselves


class Work(NamedTuple):
    """A stage for :func:`do_all`: ``body(first, end, *args)`` does things `first` to `end` of `n`, in any order.

    An `early` one needs nothing from the stages between itself and the last one that is not early.
    """

    n: int
    body: Callable
    args: tuple[Any, ...]
    early: bool = False

    @property
    def n_parts(self) -> int:
        """Parts that threads take one by one."""
        return min(self.n, PARTS * slots())


def slots() -> int:
    """Threads of the team."""
    return runtime.caps().threads


def team() -> int:
    """Iterations of a loop that starts every thread of the team once: at each multiple of SPREAD."""
    return slots() * SPREAD


@ti.func
def share(me, n):
    """First and end of the part of `n` things that thread `me` does."""
    n_slots = ti.static(slots())
    return ti.Vector([me * n // n_slots, (me + 1) * n // n_slots])


def _needs(works: list[Work], k: int) -> list[int]:
    """Stages that stage `k` must wait for: all since the last one that waited, and that one."""
    if k == 0 or works[k].early:
        return []
    return list(range(max((j for j in range(k) if not works[j].early), default=0), k))


@ti.func
def do_all(desk: ti.template(), works: ti.template()):
    """One thread's way through the stages; every thread of the team calls this.

    ``desk`` i32 of shape DESK is cleared before the loop over the team (:func:`clear`). Its atomics order memory:
    what one part wrote can be read by the stages that need it. Counts are read by an atomic that changes nothing, as
    a plain load would be taken out of the loop.
    """
    ti.static_assert(len(works) <= MAX_WORKS, "a desk has MAX_WORKS places")
    for k, work in ti.static(enumerate(works)):
        for j in ti.static(_needs(works, k)):
            while ti.atomic_max(desk[j, DONE], 0) < works[j].n_parts:
                pass
        part = ti.atomic_add(desk[k, TAKEN], 1)
        while part < work.n_parts:
            work.body(part * work.n // work.n_parts, (part + 1) * work.n // work.n_parts, *work.args)
            ti.atomic_add(desk[k, DONE], 1)
            part = ti.atomic_add(desk[k, TAKEN], 1)


@ti.func
def clear(desk: ti.template()):
    """Nothing is taken, nothing done: one thread, before the team starts."""
    ti.loop_config(serialize=True)
    for k in range(MAX_WORKS):
        desk[k, TAKEN] = 0
        desk[k, DONE] = 0
