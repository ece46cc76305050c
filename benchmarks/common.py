"""What the benchmark programs share: options, the read ceiling of the machine, output to a file as well."""

import argparse
import pathlib
import sys

from tmla.bench_facts import read_ceiling_gb_s
from tmla.bench_result import FORMS

ARCHS = ("cpu", "cuda", "metal", "vulkan")


def add_backend(p: argparse.ArgumentParser) -> None:
    """Options that say what runs."""
    p.add_argument("--arch", choices=ARCHS, help="default: metal on macOS, else cpu")
    p.add_argument("--threads", type=int, help="CPU threads (default: all)")
    p.add_argument("--cache", choices=("f16", "f32"), default="f16", help="cache type (default: f16)")


def add_output(p: argparse.ArgumentParser, forms: tuple[str, ...] = FORMS) -> None:
    """Options that say where results go."""
    p.add_argument("-o", "--output", choices=forms, default="md", help="form of the output (default: md)")
    p.add_argument("--to", type=pathlib.Path, help="also write the output to this file")


def emit(args: argparse.Namespace, write) -> None:
    """Let `write(stream)` write to standard output and to the file of ``--to``."""
    write(sys.stdout)
    if args.to is not None:
        with open(args.to, "w", encoding="utf-8") as f:
            write(f)


class Ceiling:
    """How fast this machine reads, measured before and after what is judged; the better counts.

    Parameters
    ----------
    arch : str
        Backend that runs; on a GPU a Taichi kernel reads.
    n_bytes : int
        What the judged work reads.
    threads : int, optional
        CPU threads.
    """

    def __init__(self, arch: str, n_bytes: int, threads: int | None = None, *, off: bool = False):
        self.arch, self.n_bytes, self.threads, self.off = arch, n_bytes, threads, off
        self.gb_s = 0.0  # 0: not measured
        self.measure()

    def measure(self) -> float:
        """Measure once more and return the best so far, in GB/s."""
        if self.off:
            return 0.0
        if self.arch == "cpu":
            now = read_ceiling_gb_s(self.n_bytes, self.threads)
        else:
            from benchmarks.device_read import device_read_gb_s

            now = device_read_gb_s()
        self.gb_s = max(self.gb_s, now)
        return self.gb_s
