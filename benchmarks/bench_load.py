"""Time and memory from the start of a process to its first token.

    python -m benchmarks.bench_load MODEL.gguf

Every run is a process of its own. The first finds no compiled kernels (an empty kernel cache), the others find those
of the first. ``--pages`` says what is done with the file's pages before each run.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from benchmarks.common import add_backend, add_output, emit
from tmla.bench_env import environment, load_average
from tmla.bench_result import markdown

PAGES = {"warm": "read into memory before each run", "cold": "dropped before each run", "as-is": "left as they were"}


def drop_pages(path: pathlib.Path) -> None:
    """Ask the system to forget the file's pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def read_pages(path: pathlib.Path) -> None:
    """Bring the file's pages into memory."""
    with open(path, "rb", buffering=0) as f:
        while f.read(1 << 24):
            pass


def run_child(args: argparse.Namespace, kernel_cache: str) -> dict:
    """One run in a fresh process."""
    options = {"arch": args.arch, "n_ctx": args.ctx, "cache_dtype": args.cache, "threads": args.threads}
    command = [sys.executable, "-m", "benchmarks.load_child", str(args.model), json.dumps(options)]
    env = os.environ | {"TI_OFFLINE_CACHE": "1", "TI_OFFLINE_CACHE_FILE_PATH": kernel_cache}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(runs: list[dict], file_bytes: int) -> str:
    """Markdown: the run that compiles, and the median of the others."""
    header = ["kernels", "import s", "load s", "load GB/s", "weights alone GB/s", "first token s"]
    header += ["start to first token s", "second token s", "planned MB", "peak MB", "over plan MB"]
    rows = []
    for name, group in (("compiled", runs[:1]), ("cached", runs[1:])):
        if not group:
            continue
        m = {k: statistics.median(r[k] for r in group) for k in group[0] if k != "arch"}
        numbers = [m["import_s"], m["load_s"], file_bytes / m["load_s"] / 1e9, m["copy_gb_s"], m["first_token_s"]]
        numbers += [m["to_first_token_s"], m["second_token_s"]]
        sizes = [m["planned_bytes"], m["peak_bytes"], m["peak_bytes"] - m["planned_bytes"]]
        rows.append([name, *(f"{x:.3f}" for x in numbers), *(f"{x / 1e6:.0f}" for x in sizes)])
    return markdown(header, rows, header[1:])


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.bench_load", description=__doc__.split("\n")[0])
    p.add_argument("model", type=pathlib.Path, help="GGUF file")
    p.add_argument("-r", "--repetitions", type=int, default=3, help="runs with compiled kernels (default: 3)")
    p.add_argument("--ctx", type=int, default=4096)
    p.add_argument("--pages", choices=sorted(PAGES), default="warm", help="the file's pages (default: warm)")
    add_backend(p)
    add_output(p, ("md", "json"))
    args = p.parse_args(argv)
    if args.pages == "cold" and not hasattr(os, "posix_fadvise"):
        p.error("--pages cold: this system has no posix_fadvise")
    prepare = {"warm": read_pages, "cold": drop_pages, "as-is": lambda path: None}[args.pages]
    runs, load = [], load_average()
    with tempfile.TemporaryDirectory() as kernel_cache:
        for _ in range(1 + args.repetitions):
            prepare(args.model)
            runs.append(run_child(args, kernel_cache))
    env = environment(runs[0]["arch"], args.threads, load)
    size = os.path.getsize(args.model)

    def write(stream) -> None:
        if args.output == "json":
            json.dump({"environment": env.line(), "file_bytes": size, "runs": runs}, stream, indent=2)
            stream.write("\n")
        else:
            what = f"{args.model.name}: {size / 1e6:,.1f} MB, pages {PAGES[args.pages]}"
            stream.write(f"{env.line()}\n\n{what}\n\n{table(runs, size)}\n")

    emit(args, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
