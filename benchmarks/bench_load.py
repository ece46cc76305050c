"""Time and memory from the start of a process to its first token.

    python -m benchmarks.bench_load MODEL.gguf

Every run is a process of its own. The first finds no compiled kernels (an empty kernel cache), the others find those
of the first. Pages of the file are in memory, unless ``--cold-pages`` drops them before each run.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks import common
from benchmarks.bench_decode import emit


class PeakMemory:
    """Largest anonymous memory of this process while the context is open, in bytes.

    Mapped file pages are not counted where the system tells them apart (Linux, sampled every 5 ms); elsewhere it is the
    largest resident size.
    """

    def __enter__(self):
        self.peak, self._stop = _resident_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, _resident_bytes())

    def __exit__(self, *exc) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, _resident_bytes())


def _resident_bytes() -> int:
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    values = dict(line.split(":", 1) for line in status.splitlines())
    return int(values["RssAnon"].split()[0]) * 1024


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


def measure(path, arch, n_ctx, cache_dtype, threads) -> dict:
    """Load and decode in this process; times in s, sizes in bytes."""
    start = time.perf_counter()
    with PeakMemory() as memory:
        import tmla

        imported = time.perf_counter()
        model = tmla.load(path, arch=arch, n_ctx=n_ctx, cache_dtype=cache_dtype, threads=threads)
        loaded = time.perf_counter()
        model.decode(1)
        first = time.perf_counter()
        model.decode(2)
        second = time.perf_counter()
    return {
        "import_s": imported - start,
        "load_s": loaded - imported,
        "first_token_s": first - loaded,
        "second_token_s": second - first,
        "to_first_token_s": first - start,
        "planned_bytes": model.memory["total"],
        "peak_bytes": memory.peak,
        "arch": model.arch,
    }


def run_child(args: argparse.Namespace, kernel_cache: str) -> dict:
    """One run in a fresh process."""
    options = {"arch": args.arch, "n_ctx": args.ctx, "cache_dtype": args.cache, "threads": args.threads}
    command = [sys.executable, "-m", "benchmarks.bench_load", str(args.model), "--child", json.dumps(options)]
    env = os.environ | {"TI_OFFLINE_CACHE": "1", "TI_OFFLINE_CACHE_FILE_PATH": kernel_cache}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(runs: list[dict], file_bytes: int) -> str:
    """Markdown: the run that compiles, and the median of the others."""
    header = ["kernels", "import s", "load s", "load GB/s", "first token s", "start to first token s"]
    header += ["second token s", "planned MB", "peak MB", "over plan MB"]
    rows = []
    for name, group in (("compiled", runs[:1]), ("cached", runs[1:])):
        if not group:
            continue
        m = {k: statistics.median(r[k] for r in group) for k in group[0] if k != "arch"}
        numbers = [m["import_s"], m["load_s"], file_bytes / m["load_s"] / 1e9, m["first_token_s"]]
        numbers += [m["to_first_token_s"], m["second_token_s"]]
        sizes = [m["planned_bytes"], m["peak_bytes"], m["peak_bytes"] - m["planned_bytes"]]
        rows.append([name, *(f"{x:.3f}" for x in numbers), *(f"{x / 1e6:.0f}" for x in sizes)])
    return common.markdown(header, rows, frozenset(header[1:]))


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.bench_load", description=__doc__.split("\n")[0])
    p.add_argument("model", type=pathlib.Path, help="GGUF file")
    p.add_argument("-r", "--repetitions", type=int, default=3, help="runs with compiled kernels (default: 3)")
    p.add_argument("--arch", choices=("cpu", "cuda", "metal", "vulkan"), help="default: metal on macOS, else cpu")
    p.add_argument("--ctx", type=int, default=4096)
    p.add_argument("--threads", type=int, help="CPU threads (default: all)")
    p.add_argument("--cache", choices=("f16", "f32"), default="f16")
    p.add_argument("--cold-pages", action="store_true", help="drop the file's pages before each run")
    p.add_argument("-o", "--output", choices=("md", "json"), default="md")
    p.add_argument("--to", type=pathlib.Path, help="also write the output to this file")
    p.add_argument("--child", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.child:
        print(json.dumps(measure(args.model, **json.loads(args.child))))
        return 0
    if args.cold_pages and not hasattr(os, "posix_fadvise"):
        p.error("--cold-pages: this system has no posix_fadvise")
    runs, load = [], common.load_average()
    with tempfile.TemporaryDirectory() as kernel_cache:
        for _ in range(1 + args.repetitions):
            (drop_pages if args.cold_pages else read_pages)(args.model)
            runs.append(run_child(args, kernel_cache))
    env = common.environment(runs[0]["arch"], args.threads, load)
    size = os.path.getsize(args.model)

    def write(stream) -> None:
        if args.output == "json":
            json.dump({"environment": env.line(), "file_bytes": size, "runs": runs}, stream, indent=2)
            stream.write("\n")
        else:
            pages = "dropped before each run" if args.cold_pages else "in memory"
            stream.write(f"{env.line()}\n\n{args.model.name}: {size / 1e6:,.1f} MB, pages {pages}\n\n")
            stream.write(table(runs, size) + "\n")

    emit(args, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
