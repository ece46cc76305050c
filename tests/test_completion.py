"""``tmla completion``: the script is one that a shell understands, and completes what the parser knows."""

import re
import shutil
import subprocess
import sys

import pytest

from tmla import cli

BASH = shutil.which("bash")
ASK = """source {script}
complete -p tmla >/dev/null || exit 3
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_tmla
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(capsys):
    def call(shell):
        assert cli.main(["completion", shell]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return call


@pytest.mark.skipif(BASH is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tmla ch", {"chat", "check"}),
        ("tmla run --ca", {"--cache"}),
        ("tmla run --arch v", {"vulkan"}),
        ("tmla chat --cache f", {"f16", "f32"}),
        ("tmla info mod", {"model.gguf"}),
        ("tmla template --messages mess", {"messages.json"}),
        ("tmla completion ", {"bash", "zsh", "tcsh"}),
    ],
)
def test_bash_completes(script, tmp_path, words, expected):
    for name in ("model.gguf", "messages.json", "other"):
        (tmp_path / name).touch()
    (tmp_path / "tmla.bash").write_text(script("bash"))
    ask = ASK.format(script="tmla.bash", words=words if words[-1] != " " else words + "''")
    done = subprocess.run([BASH, "-c", ask], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert found == expected or (words[-1] == " " and expected <= found)


@pytest.mark.parametrize(("shell", "first"), [("bash", "#"), ("zsh", "#compdef tmla\n"), ("tcsh", "#")])
def test_every_option_is_in_the_script(script, capsys, shell, first):
    text = script(shell)
    assert text.startswith(first)
    for command in ("run", "chat", "info", "check", "template"):
        assert cli.main([command, "--help"]) == 0
        for option in re.findall(r"--([a-z][\w-]+)", capsys.readouterr().out):
            assert option in text, f"{shell} does not know --{option}"


def test_without_shtab_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "pip install 'tmla[completion]'" in err


def test_the_shell_must_be_named(capsys):
    assert cli.main(["completion"]) == 2
    assert cli.main(["completion", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
