"""CPU threads share out the stages of one kernel: every part is done once, after all that it needs."""

import subprocess
import sys

import numpy as np
import pytest
import taichi as ti

from tests.conftest import ROOT, backend
from tmla.stages.threads import DESK, MAX_WORKS, SPREAD, Work, _needs, clear, do_all, team

ARCH = backend()


@ti.func
def fill(first, end, a: ti.template(), step: ti.template()):
    for i in range(first, end):
        a[i] = step[0] * 1000 + i


@ti.func
def turn(first, end, a: ti.template(), b: ti.template()):
    """Needs all of `a`: the parts of the other threads too."""
    n = ti.static(a.shape[0])
    for i in range(first, end):
        b[i] = a[n - 1 - i]


@ti.func
def count(first, end, c: ti.template()):
    for i in range(first, end):
        c[i] += 1


@ti.func
def add_up(_first, _end, b: ti.template(), c: ti.template(), total: ti.template()):
    s = 0
    for i in range(b.shape[0]):
        s += b[i]
    for i in range(c.shape[0]):
        s += c[i]
    total[0] = s


@ti.kernel
def run(desk: ti.template(), works: ti.template()):
    clear(desk)
    for i in range(ti.static(team())):
        if i % SPREAD == 0:
            do_all(desk, works)


def stages(n, m, a, b, c, step, total):
    return (
        Work(n, fill, (a, step)),
        Work(n, turn, (a, b)),
        Work(m, count, (c,), early=True),  # beside the one before
        Work(1, add_up, (b, c, total)),
        Work(n, turn, (b, a)),
    )


def check(make, n, m, times):
    """Run the stages `times` times; `make(values)` gives a field of an i32 array's values."""
    a, b, c, step, total = (make(np.full(k, -7777, np.int32)) for k in (n, n, m, 1, 1))
    c.fill(0)
    desk = make(np.full(DESK, -7777, np.int32))
    works = stages(n, m, a, b, c, step, total)
    for k in range(times):
        step[0] = k
        run(desk, works)
        want = k * 1000 + np.arange(n)
        assert (c.to_numpy() == k + 1).all()
        np.testing.assert_array_equal(b.to_numpy(), want[::-1])
        np.testing.assert_array_equal(a.to_numpy(), want)
        assert total[0] == want.sum() + m * (k + 1)


@pytest.mark.skipif(ARCH != "cpu", reason="threads of a CPU")
@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 40), (17, 16), (1000, 7)])
def test_every_part_is_done_once_and_in_time(field, n, m):
    check(field, n, m, 200)


def test_what_a_stage_waits_for():
    late, early = Work(1, fill, ()), Work(1, fill, (), early=True)
    works = [late, late, early, early, late, early, late]
    assert [_needs(works, k) for k in range(len(works))] == [[], [0], [], [], [1, 2, 3], [], [4, 5]]
    assert [_needs([early, early, late], k) for k in range(3)] == [[], [], [0, 1]]


@pytest.mark.skipif(ARCH != "cpu", reason="threads of a CPU")
def test_more_stages_than_a_desk_has_places(field):
    c, desk = field(np.zeros(3, np.int32)), field(np.zeros(DESK, np.int32))
    with pytest.raises(ti.TaichiCompilationError, match="MAX_WORKS"):
        run(desk, tuple(Work(3, count, (c,)) for _ in range(MAX_WORKS + 1)))


PROGRAM = """
import sys
from tests.test_threads import check
from tmla import runtime
from tmla.fields import FieldPool

runtime.init("cpu", threads=int(sys.argv[1]))
pool = FieldPool()

def make(values):
    import taichi as ti
    out = pool.field(ti.i32, values.shape)
    out.from_numpy(values)
    return out

check(make, 50, 9, 40)
"""


@pytest.mark.skipif(ARCH != "cpu", reason="threads of a CPU")
@pytest.mark.parametrize("threads", [1, 7])
def test_one_thread_and_more_than_cores(threads):
    command = [sys.executable, "-c", PROGRAM, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
