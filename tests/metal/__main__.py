"""``python -m tests.metal``: the gate's table of every kernel, and exit code 1 if one is refused."""

import pathlib
import sys
import tempfile

from . import cases, export, gate, samples, tools


def main():
    if lacks := tools.missing():
        sys.exit("the Metal gate needs " + ", ".join(lacks))
    with tempfile.TemporaryDirectory(prefix="metal_gate_") as folder:
        reports = []
        for registry in (samples.CASES, cases.CASES):  # they start Taichi differently, so each in its own process
            export.export(registry, pathlib.Path(folder))
            reports += [report for case in registry for report in gate.check(pathlib.Path(folder) / case.name)]
    sys.stdout.write(gate.table(reports) + "\n")
    sys.exit(any(report.problems for report in reports))


if __name__ == "__main__":
    main()
