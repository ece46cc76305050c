"""``tmla check``: the table of errors."""

from __future__ import annotations

import argparse

from tmla import cli_terminal as terminal
from tmla.check import Report, run_check


def check(args: argparse.Namespace) -> int:
    """Check the file, print the table, return the exit code: 1 if an error is above its tolerance."""
    report = run_check(
        args.file,
        arch=args.arch,
        n_tokens=args.tokens,
        threads=args.threads,
        overrides=dict(args.override),
        requantize=args.requantize,
        step=terminal.progress_bar,
    )
    terminal.write(table(report))
    return 0 if report.ok else 1


def table(report: Report) -> str:
    """The report as text: one line a stage, then what was done, then the verdict."""
    rows = [("stage", "where", "max error", "tolerance", "")]
    for r in report.results:
        rows.append((r.what, r.where, f"{r.error:.1e}", f"{r.tolerance:.0e}", "ok" if r.ok else "MISS"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, [*widths, 0])).rstrip() for row in rows]
    missed = [f"{r.what} ({r.where})" for r in report.results if not r.ok]
    n = len(report.results)
    verdict = f"{len(missed)} of {n} above tolerance: {', '.join(missed)}" if missed else f"all {n} within tolerance"
    return "\n".join([*lines, "", *report.notes, f"{report.arch}: {verdict}"]) + "\n"
