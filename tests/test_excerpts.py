"""Error messages of Taichi's compiler are the same with excerpts that are made once."""

import subprocess
import sys
import textwrap

import pytest

from tmla.excerpts import ShortLines

LINES = ["", " ", "x", "  x = 1  ", "a" * 80, "a" * 81, "    " + "b " * 50, "\tx = 1"]
LINES += [" " * 12 + "^" * 20, "x = 1\n", "é — ü" * 9]


@pytest.mark.parametrize("width", [80, 30])
def test_short_lines_are_wrapped_as_before(width):
    for line in LINES:
        assert ShortLines(width=width).wrap(line) == textwrap.TextWrapper(width=width).wrap(line)


PROGRAM = """
import sys, warnings
import taichi as ti
if sys.argv[1] == "quick":
    from tmla.excerpts import quicken
    quicken()
    quicken()
ti.init(arch=ti.cpu, log_level=ti.ERROR, offline_cache=False)
x = ti.field(ti.f32, 4)

@ti.func
def wrong(i, a: ti.template()):
    if ti.static(a):
        x[i] = x[i, 1] + nobody
    return x[i]

@ti.kernel
def fill(a: ti.template()):
    for i in range(4):
        x[i] = wrong(i, False) + \\
            wrong(i, False) + wrong(i, a)

fill(False)
for _ in range(2):
    try:
        fill(True)
    except Exception as e:
        print(type(e).__name__, e)
"""


def test_messages_are_those_of_taichi(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = {}
    for how in ("plain", "quick"):
        done = subprocess.run([sys.executable, str(program), how], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        said[how] = done.stdout
    assert said["plain"].count("^^^") >= 4
    assert said["quick"] == said["plain"]
