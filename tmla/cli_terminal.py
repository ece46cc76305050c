"""What the commands share: output that survives closed pipes and odd terminals, progress, Ctrl-C, logging."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]


def prepare_streams() -> None:
    """Let text that the terminal's encoding lacks come out as ``?`` instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(text: str) -> None:
    """Write one line to stderr: all that is not the result."""
    sys.stderr.write(f"tmla: {text}\n")
    sys.stderr.flush()


def drop_stdout() -> None:
    """After a broken pipe: nothing more is written, and the interpreter's own flush at the end stays quiet."""
    try:
        fd = sys.stdout.fileno()
    except (OSError, ValueError):  # captured, or closed
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


class ModelText:
    """Writes the text of a model to stdout; on a terminal, control characters are made visible.

    A model may choose any byte: an escape sequence must not reach the terminal. A pipe gets the text as it is.
    """

    def __init__(self) -> None:
        self._visible = sys.stdout.isatty()
        self._at_line_start = True

    def write(self, text: str) -> None:
        """Write a piece at once."""
        if text:
            self._at_line_start = text.endswith("\n")
            write(printable(text) if self._visible else text)

    def end(self) -> None:
        """End the last line if it was begun."""
        if not self._at_line_start:
            write("\n")
            self._at_line_start = True


def printable(text: str) -> str:
    """The text with control characters other than tab and newline as ``^[`` and the like, C1 as U+FFFD."""
    if text.isprintable():
        return text
    return "".join(_visible(c) for c in text)


def _visible(c: str) -> str:
    n = ord(c)
    if c in "\t\n" or (n >= 0x20 and not 0x7F <= n < 0xA0):
        return c
    return f"^{chr(n ^ 0x40)}" if n < 0x80 else "\ufffd"


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """Show a bar on stderr while the body runs, and give the callback (done, total) that fills it; None if piped."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)  # the bar swings until a total is known

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done >= total:
                bar.stop()  # gives the cursor back

        yield progress


@contextlib.contextmanager
def ctrl_c_ends_process() -> Iterator[None]:
    """Let Ctrl-C end the process at once, by the signal (130 in a shell).

    For the compilation of kernels: it runs for seconds in native code, during which Python can't answer. Nothing has
    been printed and the terminal is as it was, so nothing needs to be put in order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def logging_to_stderr(verbosity: int) -> Iterator[None]:
    """Send the package's log to stderr while the body runs: nothing at 0, steps at 1, details at 2."""
    log = logging.getLogger("tmla")
    if not verbosity:
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    level = log.level
    log.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def peak_memory() -> int | None:
    """Largest resident size of this process so far, in bytes, mapped file pages included; None where unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
