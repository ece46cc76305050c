"""Every fenced `sh` and `python` block of the documents is run as it is printed, or stands here with a reason.

A plain block behind an `sh` block is its output: lines that begin with `tmla: error:` must come, but for their numbers.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^( *)```(sh|python)\n(.*?)^ *```\n(?:\n```\n(.*?)^```$)?", re.M | re.S)
NOT_RUN = {  # beginning of the block -> why not
    "pip install .": "installs",
    "pip install '.[dev]'": "installs, and runs this suite",
    "pip install '.[completion]'": "installs",
    "python -m venv": "installs",
    "python docs/examples/": "tests/test_examples.py runs them and checks what they print",
    "import tmla\n\nmodel = tmla.load()  # the demo": "the README's: tests/test_docs.py runs it",
    "tmla check\n": "half a minute: tests/test_check.py runs it on small files",
    "tmla perplexity model.gguf": "needs a model and another engine",
    "import sys\n\nimport numpy as np\nfrom llama_cpp": "another engine's",
    "ruff check .": "steps of CI",
    "TMLA_DEBUG=1 python -m pytest": "steps of CI",
    'eval "$(tmla completion bash)"': "tests/test_completion.py has bash read it",
}
CHECK = re.compile(r"\btmla check\b")  # among other commands: only looked at


def collect():
    for path in DOCUMENTS:
        if (
            path.name == "benchmarks.md"
        ):  # minutes each, on large files: tests/test_benchmarks.py runs all on a small one
            continue
        for i, (indent, language, code, output) in enumerate(BLOCK.findall(path.read_text(encoding="utf-8"))):
            text = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
            yield pytest.param(language, text, output, id=f"{path.stem}-{i}")


BLOCKS = list({b.values[1]: b for b in collect() if not b.values[1].startswith(tuple(NOT_RUN))}.values())  # each once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the documents' commands are typed: a checkout, as far as they see, in which they may write."""
    here = tmp_path_factory.mktemp("checkout")
    for name in ("tmla", "benchmarks", "docs", "tests", "tools"):
        (here / name).symlink_to(ROOT / name)
    (here / "bin").mkdir()
    for name, start in (("python", ""), ("tmla", "-m tmla ")):  # as in a virtual environment with tmla installed
        (here / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start}"$@"\n')
        (here / "bin" / name).chmod(0o755)
    return here


def run(folder, command):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no sh here")
@pytest.mark.parametrize(("language", "code", "output"), BLOCKS)
def test_it_runs(folder, language, code, output):
    if language == "python":
        done = run(folder, [sys.executable, "-c", code])
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return
    if "--arch metal" in code and sys.platform == "darwin":
        pytest.skip("Metal is there, so it is not refused")
    expected = [line for line in output.splitlines() if line.startswith("tmla: error:")]
    done = run(folder, ["sh", "-ec", CHECK.sub("tmla info", code)])
    assert done.returncode == (2 if expected else 0), done.stderr
    for line in expected:
        assert re.sub(r"\d+", "N", line) in re.sub(r"\d+", "N", done.stderr)


def test_exceptions_are_needed():
    texts = [p.values[1] for p in collect()]
    assert all(any(t.startswith(start) for t in texts) for start in NOT_RUN), "an exception stands for no block"
    assert len(BLOCKS) > 12


def test_no_block_hides_under_another_name():
    """`bash`, `console` and the like would not be run."""
    for path in DOCUMENTS:
        names = set(re.findall(r"^ *```(\w+)$", path.read_text(encoding="utf-8"), re.M))
        assert names <= {"sh", "python"}, f"{path.name} has blocks of {names}"
