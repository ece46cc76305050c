"""What a user's type checker sees: the package as it is installed, with ``py.typed``."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

import tmla

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = """
import numpy as np
import tmla

model = tmla.load("model.gguf", arch="cpu", n_ctx="max")
reveal_type(model)
reveal_type(model.config.softmax_scale)
reveal_type(model.memory)
logits: np.ndarray = model.prefill([1, 2, 3])
ids: list[int] = model.decode_greedy(int(logits.argmax()), 4)
for chunk in tmla.stream_generate(model, ids, max_tokens=8, temperature=0.5):
    reveal_type(chunk.text)
    reveal_type(chunk.stats)
reveal_type(tmla.chat(model, [{"role": "user", "content": "Hello"}]))
reveal_type(tmla.reference.logits("model.gguf", ids))
try:
    tmla.load()
except tmla.GGUFError as e:
    reveal_type(e)

wrong: int = tmla.generate(model, "text")
tmla.load(arch=3)
model.prefill("text")
model.forward(1)
"""
REVEALED = ["tmla.model.Model", "float", "dict[str, int]", "str", "tmla.generate.Stats | None", "str"]
MISTAKES = ["assignment", "arg-type", "arg-type", "attr-defined"]


def test_a_users_program_is_checked(tmp_path):
    """A fresh environment whose site-packages hold tmla: without py.typed every name would be Any."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv").glob("lib*/python*/site-packages"))
    (site / "tmla").symlink_to(ROOT / "tmla")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "--no-error-summary", "--follow-imports"]
    command += ["silent", "--ignore-missing-imports", "--config-file", os.devnull, "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    lines = done.stdout.splitlines()
    revealed = [line.split('"')[1] for line in lines if "Revealed type" in line]
    assert [r.replace("builtins.", "") for r in revealed[:6]] == REVEALED, done.stdout + done.stderr
    assert "ndarray" in revealed[6]
    assert revealed[7] == "tmla.errors.GGUFError"
    errors = [line.rpartition("[")[2].rstrip("]") for line in lines if ": error:" in line]
    assert errors == MISTAKES, done.stdout


def test_the_mark_is_part_of_the_package():
    assert (pathlib.Path(tmla.__file__).parent / "py.typed").read_text() == ""
