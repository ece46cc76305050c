"""A process with a time limit that cannot harm the one that waits for it: not by crash, hang, or endless output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import IO

MARK = "tmla-doctor: "  # begins a line that holds a finding
_KEPT_BYTES = 1 << 16  # of a process's output: its end
_GRACE_S = 2.0  # for the output of a process that has ended


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes
    ----------
    code : int or None
        Exit code, negative: the signal that ended it; None: it ran out of time.
    output : str
        The end of its stdout and stderr together.
    n_bytes : int
        Bytes of all its output.
    """

    code: int | None
    output: str
    n_bytes: int


def run_limited(command: Sequence[str], timeout_s: float) -> Ended:
    """Run a command in a process group of its own, and end all of the group when it ends or runs out of time.

    Parameters
    ----------
    command : sequence of str
    timeout_s : float
        Seconds it may take.

    Notes
    -----
    Also a KeyboardInterrupt ends the group, before it goes on. The group does not get the terminal's own Ctrl-C.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    tail = _Tail(process.stdout)
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout_s)
        return Ended(code, *tail.read(process))
    finally:
        _end_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):  # inside a driver not even SIGKILL may reach it
            process.wait(_GRACE_S)


class _Tail:
    """Reads a stream to its end in a thread, and keeps the last of it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept, self._n_bytes = b"", 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while part := os.read(self._stream.fileno(), _KEPT_BYTES):
            self._kept = (self._kept + part)[-_KEPT_BYTES:]
            self._n_bytes += len(part)

    def read(self, process: subprocess.Popen[bytes]) -> tuple[str, int]:
        """The end of the output, and how many bytes it was in all, once nobody can write any more."""
        _end_group(process)
        self._thread.join(_GRACE_S)  # one who left the group may hold the pipe
        return self._kept.decode("utf-8", "replace"), self._n_bytes


def _end_group(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all ended already
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
