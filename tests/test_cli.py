"""The command line: what it prints where, exit codes, bad files, full contexts, Ctrl-C, closed pipes."""

import json
import logging
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import tmla
from benchmarks.make_model import SHAPES
from tests.conftest import ROOT, backend, oracle_dir
from tests.mixed_types import write_mixed
from tmla import cli, cli_run, cli_terminal, info, runtime
from tmla.config import open_checked
from tmla.errors import TmlaError
from tmla.generate import generate
from tmla.loading import demo_path

ARCH = backend()
BAD_FILES = sorted((oracle_dir() / "bad").glob("*.gguf"))
NOT_FINITE = {"bad_inf_scales", "bad_nan_norm", "bad_nan_scales"}  # in the data: found at load, not by info
N_CTX = 64


def child(*args):
    command = [sys.executable, "-m", "tmla", *map(str, args)]
    return subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)


def refused(capsys, *args):
    """The one line on stderr of a command that ends with 2 and prints nothing else."""
    assert cli.main([str(a) for a in args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("tmla: error: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.fixture(scope="module")
def mini(oracle):
    return oracle / "dsv2_mini.gguf"


@pytest.fixture(scope="module")
def arrays(oracle):
    return np.load(oracle / "dsv2_mini.npz")


@pytest.fixture(scope="module")
def model(mini):
    return tmla.load(mini, arch=ARCH, n_ctx=N_CTX, cache_dtype="f32")


@pytest.fixture
def run(model, mini, monkeypatch, capsys):
    """``tmla run`` on the loaded model: exit code, stdout, stderr."""
    monkeypatch.setattr(cli_run, "load", lambda path, **kw: model)

    def call(*args):
        code = cli.main(["run", str(mini), *map(str, args)])
        return code, *capsys.readouterr()

    return call


# usage


@pytest.mark.parametrize(
    "command", [[], ["run"], ["chat"], ["info"], ["check"], ["template"], ["perplexity"], ["compare"], ["doctor"]]
)
def test_help_names_the_exit_codes(command, capsys):
    assert cli.main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    for code in ("0  ", "1  ", "2  ", "130", "141"):
        assert f"\n  {code}" in out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tmla {tmla.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["run", "m.gguf"], "-p/--prompt"),
        (["run", "m.gguf", "-p", "x", "--tokens", "1"], "not allowed with"),
        (["run", "m.gguf", "-p", "x", "-n", "-2"], "-2 is too small"),
        (["run", "m.gguf", "-p", "x", "--ctx", "0"], "0 is too small"),
        (["run", "m.gguf", "-p", "x", "--ctx", "many"], "'many' is no whole number"),
        (["run", "m.gguf", "-p", "x", "--threads", "0"], "0 is too small"),
        (["run", "m.gguf", "-p", "x", "--arch", "abacus"], "abacus"),
        (["run", "m.gguf", "-p", "x", "--cache", "q4"], "q4"),
        (["run", "m.gguf", "--tokens", "1,two"], "'two' is no whole number"),
        (["run", "m.gguf", "-p", "x", "--override", "key"], "no equals sign"),
        (["check", "m.gguf", "--tokens", "1"], "1 is too small"),
        (["info", "m.gguf", "--fast"], "--fast"),
        (["chat", "m.gguf", "--raw", "--template", "t"], "not allowed with"),
        (["template", "m.gguf"], "--messages"),
        (["perplexity"], "TEXT"),
        (["perplexity", "m.gguf", "t.txt", "--ctx", "1"], "1 is too small"),
        (["compare", "m.gguf"], "--logits"),
        (["compare", "m.gguf", "--logits", "l.npz", "--max-kl", "much"], "--max-kl"),
        (["doctor", "--arch", "abacus"], "abacus"),
        (["doctor", "--timeout", "0"], "0 is too small"),
        (["doctor", "m.gguf"], "m.gguf"),
    ],
)
def test_usage_errors(args, message, capsys):
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert captured.out == ""


@pytest.mark.parametrize(
    "args",
    [
        ["run", "-p", "x"], ["chat"], ["info"], ["check"], ["template", "--messages", "m"], ["perplexity", "t"],
        ["compare", "--logits", "l"],
    ],
)  # fmt: skip
def test_no_file_is_the_demo_model_and_said(args, monkeypatch, capsys):
    files = []
    monkeypatch.setattr(cli, f"_{args[0]}", lambda args: files.append(args.file) or 0)
    assert cli.main(args) == 0
    assert files == [str(demo_path())]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tmla: no FILE given: this is the demo model")
    assert err.count("\n") == 1


def test_info_of_the_demo_model(capsys):
    assert cli.main(["info", "--json"]) == 0
    d = json.loads(capsys.readouterr().out)
    assert (d["file"], d["architecture"], d["trained_context"]) == ("demo.gguf", "deepseek2", 2048)


def test_parameters_are_refused_before_loading(mini, monkeypatch, capsys):
    monkeypatch.setattr(cli_run, "load", lambda *args, **kw: pytest.fail("loaded"))
    assert "temperature is -1" in refused(capsys, "run", mini, "-p", "x", "--temp", "-1")
    assert "top_p is 0" in refused(capsys, "run", mini, "-p", "x", "--top-p", "0")
    assert "stop string" in refused(capsys, "run", mini, "-p", "x", "--stop", "")


def test_missing_file_and_backend(mini, capsys):
    assert "no such file" in refused(capsys, "run", "nowhere.gguf", "-p", "x")
    other = "metal" if sys.platform != "darwin" else "cuda"
    assert other in refused(capsys, "run", mini, "-p", "x", "--arch", other)


# files that cannot be used


@pytest.mark.skipif(not BAD_FILES, reason="the oracle files are not beside this checkout; set TMLA_ORACLE")
@pytest.mark.parametrize("path", BAD_FILES, ids=lambda p: p.stem)
def test_bad_files(path, capsys):
    assert path.name in refused(capsys, "run", path, "-p", "Hello")
    if path.stem in NOT_FINITE:
        assert cli.main(["info", str(path)]) == 0
    else:
        assert path.name in refused(capsys, "info", path)


def test_there_are_26_bad_files(oracle):
    assert len(BAD_FILES) == 26


def test_errors_stay_on_one_printable_line(capsys, monkeypatch):
    def fail(args):
        raise TmlaError("first\nsecond\tthird")

    monkeypatch.setattr(cli, "_info", fail)
    assert refused(capsys, "info", "m.gguf") == "tmla: error: first second third\n"


def test_bad_file_in_a_process(oracle):
    p = child("run", oracle / "bad" / "bad_nan_scales.gguf", "-p", "x")
    out, err = p.communicate(timeout=60)
    assert (p.returncode, out) == (2, b"")
    assert err.startswith(b"tmla: error: bad_nan_scales.gguf: tensor 'blk.1.attn_output.weight'")
    assert err.count(b"\n") == 1


# info


def described(capsys, path, *args):
    assert cli.main(["info", str(path), "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "form", "gating", "cache_bytes"),
    [
        ("dsv2_lite", "unsplit", "softmax", 3 * (96 + 32) * 2),
        ("dsv2_lite_27l", "unsplit", "softmax", 27 * (32 + 16) * 2),
        ("dsv2_split", "split", "softmax", None),
        ("dsv3", "split", "sigmoid", 3 * (64 + 32) * 2),
        ("glm47flash", "split", "sigmoid", None),
        ("youtu", "split", None, None),
        ("minicpm3", "unsplit", None, 3 * (96 + 32) * 2),
        ("plm", "unsplit", None, None),
    ],
)
def test_info(oracle, capsys, monkeypatch, name, form, gating, cache_bytes):
    monkeypatch.setattr(runtime, "init", lambda *args, **kw: pytest.fail("a backend was started"))
    path = oracle / f"{name}.gguf"
    d = described(capsys, path)
    gf, cfg = open_checked(path)
    gf.close()
    assert (d["attention_form"], d["gating"]) == (form, gating)
    assert d["cache_bytes_per_token"] == (cache_bytes or d["layers"] * cfg.cache_row_width * 2)
    assert d["softmax_scale"] == cfg.softmax_scale
    assert d["gating_source"]
    assert d["notes"] == list(cfg.notes)
    assert len(set(d["notes"])) == len(d["notes"])
    assert d["memory"]["cache"] == 4096 * d["cache_bytes_per_token"]
    assert d["memory"]["total"] == sum(d["memory"][key] for key in ("weights", "cache", "scratch"))
    assert 0.9 < d["memory"]["weights"] / d["file_bytes"] < 1.0 or d["ignored_tensors"]
    assert d["ignored_tensors"] == list(cfg.ignored_tensors)

    assert cli.main(["info", str(path)]) == 0
    text = capsys.readouterr().out
    for part in (form, cfg.gating_source, repr(cfg.softmax_scale), *cfg.notes):
        assert part in text


def test_info_takes_options(mini, capsys):
    d = described(capsys, mini, "--ctx", "100", "--cache", "f32", "--override", "deepseek2.expert_gating_func=2")
    assert (d["n_ctx"], d["cache_dtype"], d["gating"]) == (100, "f32", "sigmoid")
    assert d["memory"]["cache"] == 100 * d["cache_bytes_per_token"]
    assert d["overrides"] == {"deepseek2.expert_gating_func": 2}
    assert d["notes"][0] == "'deepseek2.expert_gating_func' was overridden with 2." or "overridden" in d["notes"][0]
    assert described(capsys, mini, "--ctx", "max")["n_ctx"] == 163840


def test_info_foresees_what_is_allocated(model):
    planned = info.planned_bytes(model.config, N_CTX, "f32", ARCH)
    assert planned == model.memory


def test_info_makes_names_printable(mini, capsys):
    name = "general.name=evil \x1b[31m\x07name"
    assert cli.main(["info", str(mini), "--override", name]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()


# run


def test_greedy_ids_are_the_references(run, arrays):
    prompt = ",".join(map(str, arrays["tokens"]))
    code, out, err = run("--tokens", prompt, "--ids", "-n", 16, "--ignore-eos")
    assert code == 0
    assert out == ",".join(map(str, arrays["np_greedy"])) + "\n"
    lines = err.splitlines()
    assert lines[0].startswith("tmla: oracle dsv2_mini: deepseek2")
    assert "kv_b unsplit" in lines[1]
    assert "softmax scale 0.198703" in lines[1]
    assert lines[-2].startswith(f"tmla: {ARCH}: load ")
    for part in ("prompt 48 tokens, ", "decode 16 tokens, ", "tok/s", "peak memory "):
        assert part in lines[-2]
    assert lines[-1] == "tmla: ended: as many tokens as asked for (-n)"


def test_text_is_streamed_as_generated(run, model):
    code, out, _ = run("-p", "The house", "-n", 20, "--ignore-eos")
    assert code == 0
    text = generate(model, "The house", max_tokens=20, ignore_eos=True)
    assert out == text + "\n" * (not text.endswith("\n"))


def test_prompt_from_stdin(run, monkeypatch, tmp_path):
    path = tmp_path / "prompt"
    path.write_text("The house")
    with path.open() as f:
        monkeypatch.setattr(sys, "stdin", f)
        assert run("-p", "-", "-n", 5)[:2] == run("-p", "The house", "-n", 5)[:2]


def test_sampling_options_count(run):
    def ids(*args):
        return run("--tokens", "5,6,7", "--ids", "-n", 12, "--ignore-eos", *args)[1]

    assert ids("--temp", 1.5, "--seed", 3) == ids("--temp", 1.5, "--seed", 3)
    assert ids("--temp", 1.5, "--seed", 3) != ids("--temp", 1.5, "--seed", 4)
    assert ids("--temp", 1.5, "--seed", 3, "--top-k", 1) == ids()
    assert ids("--temp", 1.5, "--seed", 3, "--min-p", 1) == ids()


def test_stop_and_no_tokens(run, model):
    text = generate(model, "The house", max_tokens=20, ignore_eos=True)
    stop = text[3:5]
    code, out, err = run("-p", "The house", "-n", 20, "--ignore-eos", "--stop", "not there", "--stop", stop)
    assert (code, out.removesuffix("\n")) == (0, text[: text.index(stop)].removesuffix("\n"))
    assert err.endswith("tmla: ended: a stop string came\n")
    assert run("-p", "The house", "-n", 0)[:2] == (0, "")


def test_full_context_ends_well(run):
    code, out, err = run("--tokens", "5,6,7", "--ids", "-n", -1, "--ignore-eos")
    assert code == 0
    assert len(out.split(",")) == N_CTX - 3 + 1  # the last token chosen needs no place
    assert err.endswith("tmla: ended: the context is full (--ctx)\n")


@pytest.mark.parametrize("prompt", [["--tokens", ",".join(["5"] * 30)], ["-p", "The house of the rising sun, again"]])
def test_long_prompt_is_refused_before_loading(mini, monkeypatch, capsys, prompt):
    monkeypatch.setattr(cli_run, "load", lambda *args, **kw: pytest.fail("loaded"))
    line = refused(capsys, "run", mini, *prompt, "--ctx", "12")
    assert "but the context holds 12" in line
    n_tokens = int(line.split("the prompt has ")[1].split()[0])
    assert line.endswith(f"--ctx {n_tokens}\n")
    assert n_tokens > 12


def test_ids_outside_the_vocabulary(run):
    code, out, err = run("--tokens", "5,100000")
    assert (code, out) == (2, "")
    assert "token id 100000" in err


def test_verbose_logs_and_stops_logging(run):
    log = logging.getLogger("tmla")
    before = log.handlers[:], log.level
    noisy = run("-p", "x", "-n", 1, "-v")[2]
    assert (log.handlers, log.level) == before
    assert "Gating is softmax" in noisy
    assert "Gating is softmax" not in run("-p", "x", "-n", 1)[2]


def test_as_a_library_it_is_quiet():
    code = "import logging, tmla\nlogging.getLogger('tmla.model').warning('nobody asked')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_loading_is_logged(mini, caplog):
    """Steps at INFO, details at DEBUG, each under its module's name."""
    caplog.set_level(logging.DEBUG, "tmla")
    tmla.load(mini, arch=ARCH, n_ctx=8)
    records = {(r.name, r.levelname): r.getMessage() for r in caplog.records}
    assert mini.name in records["tmla.model", "INFO"]
    assert "layers " in records["tmla.model", "DEBUG"]


def test_options_reach_the_model(model, mini, monkeypatch):
    asked = {}
    monkeypatch.setattr(cli_run, "load", lambda path, **kw: asked.update(kw, path=path) or model)
    options = ["--arch=cpu", "--ctx=max", "--cache=f32", "--threads=3", "--override=a.b=true", "--override=a.c=0.5"]
    assert cli.main(["run", str(mini), "-p", "x", "-n", "1", *options]) == 0
    assert asked.pop("progress")(1, 2) is None
    assert asked == {
        "path": str(mini),
        "arch": "cpu",
        "n_ctx": "max",
        "cache_dtype": "f32",
        "threads": 3,
        "overrides": {"a.b": True, "a.c": 0.5},
        "requantize": False,
    }


# --requantize


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A small model with matrices in Q4_0, Q8_0 and F16."""
    kinds = {"output.weight": "F16", "token_embd.weight": "Q8_0"}
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return write_mixed(path, SHAPES["tiny"], lambda name, shape: kinds.get(name, "Q4_0"))


def test_other_types_need_the_option(mixed, capsys):
    for args in (["info", mixed], ["run", mixed, "-p", "x"], ["check", mixed]):
        assert "or pass --requantize" in refused(capsys, *args)


def test_info_requantize(mixed, mini, capsys):
    assert cli.main(["info", str(mixed), "--requantize", "--json"]) == 0
    out, err = capsys.readouterr()
    d = json.loads(out)
    assert len(set(d["notes"])) == len(d["notes"])
    assert sum("Requantised to Q8_0" in note for note in d["notes"]) == 1
    first, second = err.splitlines()
    assert first.startswith("tmla: requantising to Q8_0: matrices 1 F16, ")
    assert "relative rms error of " in second
    assert " % of Q4_0" in second
    assert cli.main(["info", str(mini), "--requantize"]) == 0
    assert capsys.readouterr().err == "tmla: nothing to requantise: all matrices are Q8_0\n"


@pytest.mark.parametrize("command", ["run", "check"])
def test_requantize_is_said_before_loading(mixed, monkeypatch, capsys, command):
    asked = {}

    def stop(path, **kw):
        asked.update(kw)
        raise TmlaError("enough")

    monkeypatch.setattr(cli_run, "load", stop)
    monkeypatch.setattr("tmla.check.load", stop)
    args = ["-p", "x"] if command == "run" else ["--tokens", "2"]
    assert cli.main([command, str(mixed), "--requantize", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert asked["requantize"] is True
    assert [line.split()[1] for line in err.splitlines()] == ["requantising", "rounding", "error:"]


@pytest.mark.slow
def test_check_requantize(mixed, monkeypatch, capsys):
    monkeypatch.setattr("tmla.check.check_odd_shapes", lambda cfg: [])  # tests/test_check.py has them
    assert cli.main(["check", str(mixed), "--requantize", "--tokens", "2", "--arch", ARCH]) == 0
    out, err = capsys.readouterr()
    assert "within tolerance\n" in out
    assert "requantising to Q8_0" in err


# the terminal


def test_control_characters_stay_off_the_terminal():
    assert cli_terminal.printable("plain ünïcode 漢字\ttab\n") == "plain ünïcode 漢字\ttab\n"
    assert cli_terminal.printable("a\x1b[2Jb\x07\x00\x7f\x9b") == "a^[[2Jb^G^@^?\ufffd"


class Terminal:
    """A pseudo-terminal in the place of stderr."""

    def __init__(self, monkeypatch):
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        monkeypatch.setattr(sys, "stderr", self.stream)
        monkeypatch.setenv("TERM", "xterm")

    def text(self):
        self.stream.close()
        os.set_blocking(self._master, False)
        chunks = []
        try:
            while chunk := os.read(self._master, 4096):
                chunks.append(chunk)
        except OSError:  # closed, or nothing more
            pass
        os.close(self._master)
        return b"".join(chunks).decode()


def test_progress_bar_gives_the_terminal_back(monkeypatch):
    terminal = Terminal(monkeypatch)

    def interrupted():
        with cli_terminal.progress_bar("loading") as progress:
            progress(1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    text = terminal.text()
    assert "loading" in text
    assert text.count("\x1b[?25l") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor was hidden, and shows again


def test_full_progress_bar_gives_the_terminal_back_at_once(monkeypatch):
    terminal = Terminal(monkeypatch)
    with cli_terminal.progress_bar("loading") as progress:
        progress(2, 2)
        text = terminal.text()  # before the bar's end
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_no_progress_bar_when_piped(capsys):
    with cli_terminal.progress_bar("loading") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


# Ctrl-C and closed pipes


@pytest.mark.parametrize("command", ["run", "info", "check", "doctor"])
def test_interrupt_is_130(command, monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, f"_{command}", interrupted)
    args = {"run": ["m.gguf", "-p", "x"], "doctor": []}.get(command, ["m.gguf"])
    assert cli.main([command, *args]) == 130
    assert capsys.readouterr() == ("", "")


def test_compiling_leaves_ctrl_c_to_the_system(mini, model, monkeypatch):
    """Kernels are compiled in native code for seconds, while Python answers to no signal."""

    def load(path, progress, **kw):
        progress(1, 2)
        handlers.append(signal.getsignal(signal.SIGINT))
        progress(2, 2)  # all weights are in: what follows is compilation
        handlers.append(signal.getsignal(signal.SIGINT))
        return model

    before = signal.getsignal(signal.SIGINT)
    handlers = []
    monkeypatch.setattr(cli_run, "load", load)
    assert cli.main(["run", str(mini), "-p", "x", "-n", "1"]) == 0
    assert handlers == [before, signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_is_given_back():
    before = signal.getsignal(signal.SIGINT)
    with cli_terminal.ctrl_c_ends_process():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_while_decoding(mini):
    p = child("run", mini, "--tokens", "5,6,7", "-n", "-1", "--ctx", "20000", "--ignore-eos", "--ids", "--arch", ARCH)
    first = p.stdout.read(4)
    start = time.perf_counter()
    p.send_signal(signal.SIGINT)
    rest, err = p.communicate(timeout=60)
    took_s = time.perf_counter() - start
    assert p.returncode == 130
    assert took_s < 5.0  # a second on a machine that does nothing else
    out = (first + rest).decode()
    assert out.endswith("\n")
    ids = [int(i) for i in out.split(",")]
    assert err.decode().splitlines()[-1] == f"tmla: interrupted after {len(ids)} tokens"
    assert b"Traceback" not in err


def test_reader_that_goes_away(mini):
    p = child("run", mini, "--tokens", "5,6,7", "-n", "-1", "--ctx", "20000", "--ignore-eos", "--ids", "--arch", ARCH)
    p.stdout.read(8)
    p.stdout.close()
    err = p.stderr.read()
    assert p.wait(timeout=60) == 141
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err
