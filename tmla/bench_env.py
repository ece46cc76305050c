"""Where a number was measured: machine, backend that ran, versions, commit. No host name, no path."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys

PACKAGES = ("taichi", "numpy", "gguf", "llama_cpp_python")
ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where a number was measured."""

    cpu: str
    n_cpus: int
    gpu: str
    system: str
    python: str
    versions: dict[str, str]
    commit: str  # empty outside a checkout
    arch: str  # the backend that ran
    threads: int | None
    date: str
    load_average: float | None = None  # of the last minute, before the run: what else ran

    def line(self) -> str:
        """One line that belongs above every table."""
        versions = ", ".join(f"{k.replace('_', '-')} {v}" for k, v in self.versions.items())
        device = f"{self.gpu}; {self.cpu}" if self.gpu and self.gpu != self.cpu else self.cpu
        threads = f", {self.threads} threads" if self.threads else ""
        load = "" if self.load_average is None else f"; load average before: {self.load_average:.1f}"
        return (
            f"{device} ({self.n_cpus} CPUs), {self.system}; arch that ran: {self.arch}{threads}; "
            f"tmla {self.commit or 'of no checkout'}, Python {self.python}, {versions}; {self.date}{load}"
        )


def environment(arch: str, threads: int | None = None, load: float | None = None) -> Environment:
    """Describe this machine, the packages and the checkout.

    Parameters
    ----------
    arch : str
        The backend that ran.
    threads : int, optional
        CPU threads.
    load : float, optional
        :func:`load_average` before the run.
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Environment(
        cpu=cpu_name(),
        n_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=gpu_name(arch),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions=versions,
        commit=commit(),
        arch=arch,
        threads=threads,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        load_average=load,
    )


def load_average() -> float | None:
    """Processes that wanted to run in the last minute; None where the system does not tell. Ask before the run."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu_name(arch: str) -> str:
    """Name of the graphics processor that `arch` runs on; empty on CPU or when the system does not tell."""
    if arch in ("cuda", "vulkan"):
        return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0]
    return cpu_name() if arch == "metal" else ""


def commit() -> str:
    """Short hash of the checkout that holds this package, ``-dirty`` when tracked files differ; else empty."""
    top = _output("git", "rev-parse", "--show-toplevel")
    if not top or pathlib.Path(top).resolve() != ROOT:  # an installed package may lie in someone else's checkout
        return ""
    head = _output("git", "rev-parse", "--short", "HEAD")
    return head + "-dirty" if head and _output("git", "status", "--porcelain", "-uno") else head


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
