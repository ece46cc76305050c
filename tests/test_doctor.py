"""``tmla doctor``: real probes on the backend under test, probes that end in every bad way, and what is printed."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.conftest import ROOT, backend
from tmla import cli, cli_doctor, cli_probe, doctor, doctor_device, doctor_machine, doctor_probe, runtime
from tmla import doctor_kernels as kernels
from tmla.doctor import Outcome, clean, examine, judge
from tmla.doctor_probe import PROBES, SMALLEST_NORMAL, Found, judge_f16
from tmla.doctor_process import MARK, Ended, run_limited

ARCH = backend()
GOOD = json.dumps({"right": True, "text": "fine", "data": {"layout": "bytes", "gpu": False}})
WRONG = json.dumps({"right": False, "text": "3 of 4 wrong", "data": {"wrong": 3}})
SAY = "import os, sys, time, signal; say = lambda text: os.write(1, text.encode()); "


def python(code):
    return [sys.executable, "-S", "-E", "-c", SAY + code]


def faked(codes):
    """A command for :func:`examine`: the code of a probe by its name, or a good end."""

    def command(arch, probe, timeout_s):
        return python(codes.get(probe, f"say({MARK + GOOD + chr(10)!r})"))

    return command


def outcome(code, probe="u8", timeout_s=20.0):
    found = {o.probe: o for o in examine("cpu", timeout_s, faked({probe: code}))}
    return found[probe]


@pytest.fixture(autouse=True)
def _one_probe(monkeypatch):
    monkeypatch.setattr(doctor, "_PROBES", ("device", "u8"))


# real probes


@pytest.fixture
def small(arch, monkeypatch):
    monkeypatch.setattr(doctor_probe, "_share_of_memory", lambda part: 16 << 20)
    monkeypatch.setattr(doctor_probe, "_BATCHES", 2)


@pytest.mark.parametrize("name", PROBES)
def test_probe_is_right_here(name, arch, small):
    if name in ("shared", "lanes") and arch == "cpu":
        pytest.skip("the kernels for CPUs use neither")
    found = list(PROBES[name]())
    assert [f.right for f in found] == [True] * len(found)
    assert found
    assert all(f.text.isprintable() and len(f.text) < 300 for f in found)
    json.dumps([f.data for f in found])


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("u8", "copy_row"),
        ("quants", "read_quants"),
        ("f16", "read_scales"),
        ("bandwidth", "fill_words"),
        ("largest", "mark"),
    ],
)
def test_a_kernel_that_does_nothing_is_noticed(name, kernel, arch, small, monkeypatch):
    monkeypatch.setattr(kernels, kernel, lambda *args: None)
    assert not list(PROBES[name]())[-1].right


def test_a_launch_that_does_not_count_is_noticed(arch, small, monkeypatch):
    monkeypatch.setattr(kernels, "count_by", lambda *args: None)
    assert [f.right for f in PROBES["launch"]()] == [False]


def test_bits_of_a_word_in_wrong_places_are_noticed(arch, small, monkeypatch):
    real = doctor_probe._upload
    monkeypatch.setattr(doctor_probe, "_upload", lambda values, scales: real(np.roll(values, 1, axis=1), scales))
    assert [f.right for f in PROBES["quants"]()] == [False]


@pytest.mark.skipif(ARCH == "cpu", reason="the kernels for CPUs use neither")
@pytest.mark.parametrize(("name", "kernel"), [("shared", "block_sums"), ("lanes", "lane_results")])
def test_wrong_sums_are_noticed(name, kernel, arch, small, monkeypatch):
    monkeypatch.setattr(kernels, kernel, lambda *args: None)
    assert [f.right for f in PROBES[name]()] == [False]


def test_probes_in_processes():
    """Two for the way through a process; the rest runs above, in this one."""
    found = list(examine(ARCH))
    assert [(o.probe, o.status) for o in found if o.probe != "device"] == [("start", "ok"), ("u8", "ok")]
    assert found[0].data["arch"] == ARCH
    assert found[-1].needed == (found[0].data["layout"] == "bytes")


def test_a_backend_that_is_not_here_is_said_at_once():
    other = "metal" if sys.platform != "darwin" else "cuda"
    (found,) = examine(other)
    assert (found.status, found.bad) == ("absent", False)
    assert f"arch '{other}' is not available on this machine: " in found.text
    assert "pass arch" not in found.text


def test_taichi_on_another_backend_is_no_start(monkeypatch):
    """TI_ARCH lets Taichi start on CPU, whatever was asked for; so does a driver that it cannot use."""
    code = "from tmla import cli_probe, runtime\nruntime._has = lambda arch: True\n"
    code += "raise SystemExit(cli_probe.main(['vulkan', 'start']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"TI_ARCH": "x64"}
    )
    found = judge("vulkan", "start", Ended(done.returncode, done.stdout + done.stderr, 0), 1.0)
    assert found.status == "absent"
    assert "(Taichi ran on 'x64' instead)" in found.text or sys.platform == "darwin"


# f16


def f16_arrays():
    bits = np.arange(1 << 16).astype(np.uint16)
    return bits.copy(), bits.view(np.float16).astype(np.float32), bits.copy()


def test_exact_f16():
    found = judge_f16(*f16_arrays())
    assert (found.right, found.text) == (True, "all 65,536 patterns exact, with subnormals, inf and -0")


def test_flushed_subnormals_are_wrong_and_explained():
    copy, value, written = f16_arrays()
    tiny = np.abs(value) < SMALLEST_NORMAL
    value[tiny] = np.copysign(np.float32(0), value[tiny])
    found = judge_f16(copy, value, written)
    assert not found.right
    assert found.data["read_wrong"] == {"subnormal": 2 * 1023}
    assert "2046 subnormal patterns read as f32 wrong; scales below 6.1e-05 are lost" in found.text
    assert "0.0078" in found.text


@pytest.mark.parametrize(
    ("pattern", "stored_as", "kind"),
    [(0x8000, 0, "zero"), (0x7C00, 0x7BFF, "inf"), (0x7E00, 0x7C00, "nan"), (0x3C00, 0x3C01, "normal")],
)
def test_one_wrong_pattern_is_named(pattern, stored_as, kind):
    copy, value, written = f16_arrays()
    copy[pattern] = stored_as
    found = judge_f16(copy, value, written)
    assert (found.right, found.data["stored_wrong"]) == (False, {kind: 1})
    assert f"1 {kind} patterns stored wrong" in found.text


def test_harmless_differences_are_told_apart():
    copy, value, written = f16_arrays()
    copy[0x7E01] = 0x7E00
    written[1] = 0
    found = judge_f16(copy, value, written)
    assert found.right
    assert not found.data["nan_payloads_kept"]
    assert found.data["subnormals_lost_in_writing"] == 1
    assert found.text.count("harmless") == 2
    written[0x3C00] = 0
    assert not judge_f16(copy, value, written).right


# probes that end badly


def test_right_and_wrong_findings():
    good = outcome(f"say({MARK + GOOD!r})")
    assert (good.status, good.text, good.data["layout"], good.bad) == ("ok", "fine", "bytes", False)
    wrong = outcome(f"say({MARK + WRONG!r})")
    assert (wrong.status, wrong.data, wrong.bad) == ("wrong", {"wrong": 3}, True)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_crash_by_signal():
    found = outcome("say('half a li'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (found.status, found.bad) == ("crashed", True)
    assert found.text == "crashed with SIGSEGV; the last line: half a li"
    assert outcome("say('Received signal 11 (x)'); sys.exit(3)").text == "crashed with SIGSEGV"


def test_hang_is_ended_with_its_children():
    before = time.monotonic()
    code = "import subprocess; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']); "
    code += "say(f'{p.pid}\\n'); time.sleep(60)"
    ended = run_limited(python(code), 1.0)
    assert time.monotonic() - before < 20
    assert ended.code is None
    found = judge("cpu", "u8", ended, 1.0)
    assert (found.status, found.bad) == ("hung", True)
    assert found.text.startswith("took longer than 1 s and was ended; the last line: ")
    _wait_until_gone(int(ended.output))


def _wait_until_gone(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":  # ended, and not yet asked for its code
                    return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} still runs")


def test_finding_before_a_hang_counts():
    found = outcome(f"say({MARK + GOOD + chr(10)!r}); time.sleep(60)", timeout_s=1.0)
    assert (found.status, found.text) == ("ok", "fine; then took longer than 1 s and was ended")
    found = outcome(f"say({MARK + WRONG + chr(10)!r}); sys.exit(1)")
    assert (found.status, found.bad) == ("failed", True)


def test_rubbish_is_no_finding():
    rubbish = [f"{MARK}{{", f"{MARK}[1]", f'{MARK}{{"right": 1}}', f'{MARK}{{"right": true, "data": 3}}', "\x1b[2J\x00"]
    found = outcome(f"os.write(1, {chr(10).join(rubbish).encode()!r} + bytes(range(256)))")
    assert (found.status, found.bad) == ("failed", True)
    assert "no finding" in found.text
    assert found.text.isprintable()


def test_flood_is_read_and_forgotten():
    ended = run_limited(python("[os.write(1, b'x' * 65536) for _ in range(512)]; say('\\nend')"), 30.0)
    assert (ended.code, ended.n_bytes) == (0, 512 * 65536 + 4)
    assert len(ended.output) <= 1 << 16
    assert ended.output.endswith("end")
    endless = outcome("\nwhile True: os.write(1, b'y' * 65536)", timeout_s=1.0)
    assert endless.status == "hung"
    assert len(endless.text) < 600


def test_an_error_is_its_last_line_without_paths():
    found = outcome("raise RuntimeError('no such thing: /home/someone/private/libvulkan.so')")
    assert (found.status, found.bad) == ("failed", True)
    assert found.text == "RuntimeError: no such thing: libvulkan.so"


def test_backend_that_does_not_start_ends_there():
    found = list(examine("cpu", 20.0, faked({"start": "os.abort()"})))
    assert [(o.probe, o.status) for o in found] == [("start", "crashed")]
    assert found[0].bad


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("/home/alice/x/y.py: bad", "y.py: bad"),
        ("in /home/alice", "in ~"),
        ("in /Users/alice/", "in ~/"),
        ('File "/usr/lib/python3/foo.py", line 3', 'File "foo.py", line 3'),
        ("[runtime.cpp:f@7] 12/01/26 1.5 GB/s", "[runtime.cpp:f@7] 12/01/26 1.5 GB/s"),
        ("C:\\Users\\alice", "~"),
        ("a\x1b[31mb\nc", "a [31mb c"),
    ],
)
def test_clean(text, cleaned):
    assert clean(text) == cleaned


def test_clean_bounds_the_length():
    assert len(clean("x" * 10_000)) == 400


def test_u8_is_no_fault_where_words_are_used():
    words = json.dumps({"right": True, "text": "fine", "data": {"layout": "words", "gpu": True}})
    codes = {"start": f"say({MARK + words!r})", "u8": f"say({MARK + WRONG!r})"}
    found = list(examine("vulkan", 20.0, faked(codes)))
    assert [(o.status, o.bad) for o in found] == [("ok", False), ("ok", False), ("wrong", False)]
    assert "WRONG: 3 of 4 wrong (tmla does not need it here)" in cli_doctor.block({}, found)


# the command


@pytest.fixture
def fakes(monkeypatch):
    """``tmla doctor`` over faked probes: probe -> code."""
    codes = {}
    real = doctor.examine
    monkeypatch.setattr(doctor, "examine", lambda arch, timeout_s: real(arch, timeout_s, faked(codes)))
    return codes


def test_block_and_exit_codes(fakes, capsys):
    assert cli.main(["doctor", "--arch", "cpu", "vulkan"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "tmla doctor"
    assert lines[-1] == "right: cpu, vulkan; next: tmla check --arch cpu"
    assert out.count("fine") == 2 + 3  # a CPU is not asked for its name
    assert err == ""
    fakes["u8"] = f"say({MARK + WRONG!r})"
    assert cli.main(["doctor", "--arch", "cpu", "cpu", "--timeout", "20"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("cpu") == 1
    assert lines[-2:] == ["  u8 storage    WRONG: 3 of 4 wrong", "at fault: cpu (u8 storage)"]


def test_absent_backends_are_no_fault(fakes, capsys):
    fakes["start"] = f"say({MARK + json.dumps({'absent': True, 'text': 'no GPU'})!r})"
    assert cli.main(["doctor", "--arch", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == ["cuda", "  variants      not here: no GPU", "not here: cuda"]


def test_json(fakes, capsys):
    fakes["u8"] = f"say({MARK + WRONG!r})"
    assert cli.main(["doctor", "--arch", "cpu", "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert out["ok"] is False
    assert {"tmla", "system", "machine", "memory"} <= set(out["machine"])
    assert [(p["arch"], p["probe"], p["status"], p["bad"]) for p in out["probes"]] == [
        ("cpu", "start", "ok", False),
        ("cpu", "u8", "wrong", True),
    ]


def test_table(fakes, capsys, monkeypatch):
    outcomes = [Outcome("cpu", "start", "ok", "fine"), Outcome("vulkan", "u8", "wrong", "[bold]3 of 4[/] wrong")]
    monkeypatch.setenv("COLUMNS", "100")
    cli_doctor.print_table(outcomes)
    out = capsys.readouterr().out
    assert "[bold]3 of 4[/] wrong" in out
    assert all(word in out for word in ("backend", "vulkan", "u8 storage"))


def test_no_personal_data(monkeypatch):
    monkeypatch.setenv("VK_DRIVER_FILES", "/home/someone/secret.json")
    text = repr(doctor_machine.describe("0.1.0"))
    assert "VK_DRIVER_FILES" in text
    assert "secret" not in text
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4


def test_backends_of_each_system():
    assert doctor.default_archs("darwin") == ("metal", "cpu", "vulkan")
    assert doctor.default_archs("linux") == ("cpu", "vulkan", "cuda")


def test_interrupt_ends_at_once_and_leaves_nothing(tmp_path):
    pid_file = tmp_path / "pid"
    probe = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"from tmla import cli, doctor\nimport sys\nreal, probe = doctor.examine, {probe!r}\n"
    code += "doctor.examine = lambda arch, s: real(arch, s, lambda *args: [sys.executable, '-S', '-c', probe])\n"
    code += "sys.exit(cli.main(['doctor', '--arch', 'cpu']))"
    p = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (pid_file.exists() and pid_file.read_text()):
        assert p.poll() is None
        time.sleep(0.05)
    start = time.monotonic()
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=30)
    assert (p.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert time.monotonic() - start < 10
    _wait_until_gone(int(pid_file.read_text()))


def test_probe_command_line(capsys, monkeypatch, arch):
    monkeypatch.setitem(PROBES, "u8", lambda: iter([Found(True, "a"), Found(False, "b", {"n": 1})]))
    assert cli_probe.main([arch, "u8"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
    assert [json.loads(line.removeprefix(MARK))["text"] for line in found] == ["a", "b"]


def test_device_names_are_asked_without_a_start():
    for arch in runtime.ARCHS:
        if sys.platform != "darwin" or arch != "metal":
            assert isinstance(doctor_device.describe(arch), dict)
