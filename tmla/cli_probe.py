"""One probe of ``tmla doctor``, in a process of its own: ``python -m tmla.cli_probe ARCH PROBE [SECONDS]``.

Writes a line of JSON behind :data:`tmla.doctor_process.MARK` for each finding, the last of which counts; Taichi and
drivers may write what they like beside it.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Sequence

from tmla import cli_terminal as terminal
from tmla import runtime
from tmla.doctor_probe import PROBES
from tmla.doctor_process import MARK
from tmla.errors import BackendError


def main(argv: Sequence[str]) -> int:
    """Run the probe named by the arguments.

    Parameters
    ----------
    argv : sequence of str
        Backend, probe, and after how many seconds the system ends this process, should nobody else do it.
    """
    arch, probe, *limit = argv
    if limit and hasattr(signal, "alarm"):
        signal.alarm(int(limit[0]))
    try:
        runtime.init(arch)
    except BackendError as e:
        _tell({"absent": True, "text": str(e).partition("; pass arch")[0]})
        return 0
    for found in PROBES[probe]():
        _tell(dataclasses.asdict(found))
    return 0


def _tell(finding: dict[str, object]) -> None:
    terminal.write(f"\n{MARK}{json.dumps(finding)}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
