"""Files that are there whole or not at all: written beside their place, and put into it at the end."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` when the body ends well.

    Until then, and for good if the body or the process ends otherwise (an error, Ctrl-C, a kill), `path` is as it was.
    The new file's data is on the disk before it takes the name; only its owner may read it.

    Parameters
    ----------
    path : str or os.PathLike
        A link is followed: the file that it names is replaced.

    Yields
    ------
    BinaryIO
        To be written.

    Raises
    ------
    OSError
        The file cannot be written, or `path` is something else than a regular file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise OSError(None, "is no regular file, and will not be replaced by one")
    fd, part = tempfile.mkstemp(prefix=".tmla-", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Let the new name reach the disk, where folders can be synced: the file is complete with or without."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(fd)
    finally:
        os.close(fd)
