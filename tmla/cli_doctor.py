"""``tmla doctor``: a table on a terminal, and a block of plain text to paste into a bug report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import tmla
from tmla import cli_terminal as terminal
from tmla import doctor, doctor_machine
from tmla.doctor import Outcome

_LABELS = {
    "start": "variants",
    "device": "device",
    "u8": "u8 storage",
    "quants": "Q8_0 quants",
    "f16": "f16 storage",
    "shared": "shared arrays",
    "lanes": "lanes",
    "launch": "launch",
    "bandwidth": "reading",
    "largest": "largest field",
}
_STYLES = {"ok": "green", "wrong": "bold red", "crashed": "bold red", "hung": "bold red", "failed": "bold red"}


def run(args: argparse.Namespace) -> int:
    """Examine the backends, print what was found, return the exit code: 1 if something is wrong with one."""
    machine = doctor_machine.describe(tmla.__version__)
    outcomes: list[Outcome] = []
    for arch in dict.fromkeys(args.arch or doctor.default_archs()):
        with terminal.progress_bar(f"{arch}: each probe takes some seconds, {args.timeout} at most") as progress:
            for n, outcome in enumerate(doctor.examine(arch, args.timeout), 1):
                outcomes.append(outcome)
                if progress is not None:
                    progress(n, doctor.N_PROBES)
    if args.json:
        terminal.write(as_json(machine, outcomes) + "\n")
    else:
        if sys.stdout.isatty():
            print_table(outcomes)
            terminal.say("for a bug report, paste what follows")
        terminal.write(block(machine, outcomes))
    return 1 if any(o.bad for o in outcomes) else 0


def as_json(machine: dict[str, str], outcomes: list[Outcome]) -> str:
    """The report as one JSON object: ``machine``, ``probes``, ``ok``."""
    probes = [dataclasses.asdict(o) | {"bad": o.bad} for o in outcomes]
    return json.dumps({"machine": machine, "probes": probes, "ok": not any(o.bad for o in outcomes)}, indent=2)


def block(machine: dict[str, str], outcomes: list[Outcome]) -> str:
    """The report as plain text: the machine, each backend's findings, what that means."""
    lines = ["tmla doctor", *(f"  {label:<14}{text}" for label, text in machine.items())]
    for arch in dict.fromkeys(o.arch for o in outcomes):
        lines += [arch]
        lines += [f"  {_LABELS[o.probe]:<14}{_judged(o)}" for o in outcomes if o.arch == arch and o.status != "unused"]
    return "\n".join([*lines, *verdict(outcomes)]) + "\n"


def verdict(outcomes: list[Outcome]) -> list[str]:
    """What the findings mean, a line for each kind of backend: right, at fault, not here."""
    archs = list(dict.fromkeys(o.arch for o in outcomes))
    faults = {a: [_LABELS[o.probe] for o in outcomes if o.arch == a and o.bad] for a in archs}
    absent = [o.arch for o in outcomes if o.status == "absent"]
    right = [a for a in archs if not faults[a] and a not in absent]
    lines = [f"at fault: {arch} ({', '.join(names)})" for arch, names in faults.items() if names]
    lines += [f"right: {', '.join(right)}; next: tmla check --arch {right[0]}"] if right else []
    lines += [f"not here: {', '.join(absent)}"] if absent else []
    return lines


def _judged(o: Outcome) -> str:
    if o.status == "ok":
        return o.text
    note = "" if o.needed or o.status == "absent" else " (tmla does not need it here)"
    return f"{'not here' if o.status == 'absent' else o.status.upper()}: {o.text}{note}"


def print_table(outcomes: list[Outcome]) -> None:
    """Write the findings to the terminal as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("backend", "probe", "", "finding"):
        table.add_column(heading, overflow="fold")
    for i, o in enumerate(outcomes):
        first = i == 0 or outcomes[i - 1].arch != o.arch
        if first and i:
            table.add_section()
        cells = (
            "" if not first else o.arch,
            _LABELS[o.probe],
            Text(o.status, _STYLES.get(o.status, "dim")),
            Text(o.text),
        )
        table.add_row(*cells)
    Console().print(table)
