"""What every benchmark shares: the environment line, statistics over repetitions, and table output."""

import csv
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

PACKAGES = ("taichi", "numpy", "gguf", "llama_cpp_python")
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

# Field names and their order follow llama-bench, so that tables of both can be pasted side by side.
CSV_FIELDS = (
    "build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "n_batch", "n_threads", "type_k", "type_v", "flash_attn", "n_prompt", "n_gen", "n_depth",
    "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
)  # fmt: skip


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


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """Short hash of the checkout, ``-dirty`` when tracked files differ; empty outside a checkout."""
    head = _output("git", "rev-parse", "--short", "HEAD")
    return head + "-dirty" if head and _output("git", "status", "--porcelain", "-uno") else head


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where a number was measured."""

    cpu: str
    n_cpus: int
    gpu: str
    system: str
    python: str
    versions: dict[str, str]
    commit: str
    arch: str
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


def load_average() -> float | None:
    """Processes that wanted to run in the last minute; None where the system does not tell. Ask before the run."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def environment(arch: str, threads: int | None = None, load: float | None = None) -> Environment:
    """Describe this machine, the packages and the checkout; `arch` is the backend that ran, `load` the load before."""
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


@dataclasses.dataclass(frozen=True)
class Result:
    """Repetitions of one test of one engine."""

    engine: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    backend: str
    n_threads: int | None
    type_kv: str
    flash_attn: bool | None  # None where the choice does not exist
    n_prompt: int
    n_gen: int
    n_depth: int
    samples_ns: tuple[int, ...]
    bytes_per_token: int = 0  # weights and cache that a decoded token reads, in the middle of the test

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple(1e9 * self.n_tokens / ns for ns in self.samples_ns)

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return stddev(self.samples_ts)

    @property
    def read_gb_s(self) -> float:
        """Bytes that the tokens must read, over time; 0 for a prompt, which reads weights once per chunk."""
        return 0.0 if self.n_prompt else self.bytes_per_token * statistics.median(self.samples_ts) / 1e9

    @property
    def test(self) -> str:
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name


def stddev(values) -> float:
    """Sample standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _si_size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.2f} MiB"


def _si_count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def markdown(header: list[str], rows: list[list[str]], right: frozenset[str] = frozenset()) -> str:
    """A Markdown table with padded columns; the columns named in `right` are right-aligned."""
    width = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        parts = [c.rjust(w) if h in right else c.ljust(w) for c, w, h in zip(cells, width, header)]
        return "| " + " | ".join(parts) + " |"

    rule = "| " + " | ".join("-" * (w - 1) + ":" if h in right else "-" * w for w, h in zip(width, header)) + " |"
    return "\n".join([line(header), rule, *map(line, rows)])


def results_markdown(results: list[Result], read_ceiling_gb_s: float = 0.0) -> str:
    """llama-bench's Markdown table; with a read ceiling two columns more: GB/s, and its share of the ceiling."""
    several = len({r.engine for r in results}) > 1
    header = ["model", "size", "params", "backend", "threads", "fa", "test", "t/s"]
    if several:
        header.insert(0, "engine")
    if read_ceiling_gb_s:
        header += ["GB/s", "of ceiling"]
    rows = []
    for r in results:
        row = [
            r.model_type,
            _si_size(r.model_size),
            _si_count(r.model_n_params),
            r.backend,
            str(r.n_threads or "-"),
            "-" if r.flash_attn is None else str(int(r.flash_attn)),
            r.test,
            f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}",
        ]
        if several:
            row.insert(0, r.engine)
        if read_ceiling_gb_s:
            share = f"{r.read_gb_s / read_ceiling_gb_s:.0%}" if r.read_gb_s else "-"
            row += [f"{r.read_gb_s:.1f}" if r.read_gb_s else "-", share]
        rows.append(row)
    return markdown(header, rows, frozenset(header) - {"engine", "model", "backend"})


def record(r: Result, env: Environment) -> dict:
    """A result in llama-bench's field names, with the engine in front and the samples at the end."""
    ns = [float(x) for x in r.samples_ns]
    values = {
        "build_commit": env.commit, "cpu_info": env.cpu, "gpu_info": env.gpu, "backends": r.backend,
        "model_filename": r.model_filename, "model_type": r.model_type, "model_size": r.model_size,
        "model_n_params": r.model_n_params, "n_batch": None, "n_threads": r.n_threads, "type_k": r.type_kv,
        "type_v": r.type_kv, "flash_attn": r.flash_attn, "n_prompt": r.n_prompt, "n_gen": r.n_gen,
        "n_depth": r.n_depth, "test_time": env.date, "avg_ns": round(statistics.fmean(ns)),
        "stddev_ns": round(stddev(ns)), "avg_ts": r.avg_ts, "stddev_ts": r.stddev_ts,
    }  # fmt: skip
    return {"engine": r.engine} | {k: values[k] for k in CSV_FIELDS} | {
        "samples_ns": list(r.samples_ns), "samples_ts": list(r.samples_ts)
    }  # fmt: skip


def write_results(stream, results: list[Result], env: Environment, form: str, read_ceiling_gb_s: float = 0.0) -> None:
    """Write results as ``md``, ``csv`` or ``json``; the environment goes above (md), or into each record."""
    if form == "json":
        json.dump([record(r, env) for r in results], stream, indent=2)
        stream.write("\n")
    elif form == "csv":
        writer = csv.DictWriter(stream, ["engine", *CSV_FIELDS], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(record(r, env) for r in results)
    else:
        ceiling = f"read ceiling in the same run: {read_ceiling_gb_s:.1f} GB/s\n\n" if read_ceiling_gb_s else ""
        stream.write(f"{env.line()}\n\n{ceiling}{results_markdown(results, read_ceiling_gb_s)}\n")
