"""``tmla doctor`` behind its output: runs the probes of each backend, and judges how they ended.

A backend's driver can crash, hang, or answer wrongly. So each probe is a process with a time limit
(:mod:`tmla.doctor_process`), and whatever becomes of it is a finding of one line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tmla.doctor_process import MARK, Ended, run_limited

TIMEOUT_S = 60.0
_GPU_ONLY = ("shared", "lanes")
_PROBES = ("device", "u8", "quants", "f16", *_GPU_ONLY, "launch", "bandwidth", "largest")
N_PROBES = 1 + len(_PROBES)  # of a backend, at most
_WIDE = 400  # characters of a finding
_CODE = "import sys; sys.path[0] = {root!r}; from tmla.cli_probe import main; sys.exit(main(sys.argv[1:]))"

Command = Callable[[str, str, float], list[str]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one probe.

    Attributes
    ----------
    arch, probe : str
    status : {"ok", "wrong", "crashed", "hung", "failed", "absent", "unused"}
        "failed": ended without a finding, by an error of its own; "absent": there is no such backend here; "unused":
        tmla's kernels for this backend do not need it, nothing was run.
    text : str
        One line.
    data : dict
        The probe's numbers.
    needed : bool
        tmla's results on this backend rest on it.
    seconds : float
    """

    arch: str
    probe: str
    status: str
    text: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    needed: bool = True
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """A wrong result, or none, of what the backend's results rest on."""
        return self.needed and self.status in ("wrong", "crashed", "hung", "failed")


def default_archs(platform: str = sys.platform) -> tuple[str, ...]:
    """Backends that can be there on a system, the default one first."""
    return ("metal", "cpu", "vulkan") if platform == "darwin" else ("cpu", "vulkan", "cuda")


def probe_command(arch: str, probe: str, timeout_s: float) -> list[str]:
    """The command of one probe. It finds this very package, whatever the working directory holds.

    The process asks the system to end it some time after its limit: should we be killed, it does not stay.
    """
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    return [sys.executable, "-c", _CODE.format(root=root), arch, probe, str(math.ceil(timeout_s) + 5)]


def examine(arch: str, timeout_s: float = TIMEOUT_S, command: Command = probe_command) -> Iterator[Outcome]:
    """Run all probes of a backend, one after another: they measure.

    Parameters
    ----------
    arch : {"metal", "cuda", "vulkan", "cpu"}
    timeout_s : float
        Seconds that each probe may take.
    command : callable
        Gives the command of a probe: (arch, probe, timeout_s) -> list of str.

    Yields
    ------
    Outcome
        First that of ``start``; no other if the backend does not start.
    """
    start = _run(arch, "start", timeout_s, command)
    yield start
    if start.status != "ok":
        return
    for probe in _PROBES[arch == "cpu" :]:  # a CPU's name stands above the findings
        if probe in _GPU_ONLY and not start.data.get("gpu"):
            yield Outcome(arch, probe, "unused", "not used by the kernels for CPUs", needed=False)
            continue
        needed = probe != "device" and (probe != "u8" or start.data.get("layout") == "bytes")
        yield dataclasses.replace(_run(arch, probe, timeout_s, command), needed=needed)


def _run(arch: str, probe: str, timeout_s: float, command: Command) -> Outcome:
    before = time.monotonic()
    ended = run_limited(command(arch, probe, timeout_s), timeout_s)
    outcome = judge(arch, probe, ended, timeout_s)
    return dataclasses.replace(outcome, seconds=round(time.monotonic() - before, 2))


def judge(arch: str, probe: str, ended: Ended, timeout_s: float) -> Outcome:
    """What a probe's end and output mean. Findings before a bad end count: the text says both.

    Parameters
    ----------
    arch, probe : str
    ended : Ended
    timeout_s : float
        Limit that it ran under.
    """
    found = [f for line in ended.output.splitlines() if line.startswith(MARK) and (f := _finding(line)) is not None]
    last = found[-1] if found else {}
    text, data = clean(str(last.get("text", ""))), last.get("data", {})
    status, trouble = _trouble(ended, timeout_s)
    if last.get("absent") is True:
        return Outcome(arch, probe, "absent", text, needed=False)
    if found and not status:
        return Outcome(arch, probe, "ok" if last["right"] else "wrong", text, data)
    if found and last["right"]:
        return Outcome(arch, probe, "ok", f"{text}; then {trouble}", data)
    if not status:
        status, trouble = (
            "failed",
            f"ended with code {ended.code} and no finding, after {ended.n_bytes:,} bytes of output",
        )
        trouble += f"; the last line: {line}" if (line := last_line(ended.output)) else ""
    return Outcome(arch, probe, status, f"{text}; {trouble}" if text else trouble, data)


def _finding(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line[len(MARK) :])
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("data", {}), dict):
        return None
    return found if isinstance(found.get("right"), bool) or found.get("absent") is True else None


def _trouble(ended: Ended, timeout_s: float) -> tuple[str, str]:
    """Status and words for a bad end; both empty for a good one."""
    line = last_line(ended.output)
    said = f"; the last line: {line}" if line else ""
    if ended.code is None:
        return "hung", f"took longer than {timeout_s:g} s and was ended{said}"
    if ended.code < 0:
        return "crashed", f"crashed with {_signal_name(-ended.code)}{said}"
    if caught := re.search(r"[Rr]eceived signal (\d+)", ended.output):  # Taichi's own handler
        return "crashed", f"crashed with {_signal_name(int(caught[1]))}"
    if ended.code:
        return "failed", line or f"ended with code {ended.code}"
    return "", ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(output: str) -> str:
    """The last line that says something and is no finding, made fit for a report."""
    lines = [line.strip() for line in output.splitlines() if not line.startswith(MARK)]
    return clean(next((line for line in reversed(lines) if line), ""))


def clean(text: str) -> str:
    """Make a line fit for a report: printable, not endless, and of a path only the last part."""
    text = "".join(c if c.isprintable() else " " for c in text)
    text = text.replace(str(pathlib.Path.home()), "~")
    text = re.sub(r"(?<![\w.])(?:/home|/Users|[A-Za-z]:\\Users)[/\\][^\s/\\:'\"]+", "~", text)
    text = re.sub(r"(?:(?<![\w.])~?/|\b[A-Za-z]:[\\/])(?:[^\s/\\:'\"]+[\\/])+", "", text)
    return text if len(text) <= _WIDE else text[: _WIDE - 3] + "..."
