"""Silence: what other libraries print while they start is kept off the user's output."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Taichi's start-up lines, which it writes to Python's and to the process's stdout, off the user's output."""
    sys.stdout.flush()
    saved = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)
