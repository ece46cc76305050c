"""Results of speed tests: statistics over repetitions, and tables in llama-bench's words (md, csv, json)."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any, TextIO

from tmla.bench_env import Environment

FORMS = ("md", "csv", "json")
ABOVE_CEILING = (
    "(!) above the read ceiling: a processor cache served it, or something disturbed the measurement of the ceiling; "
    "not a bandwidth of memory"
)

# Field names and their order follow llama-bench, so that tables of both can be pasted side by side.
CSV_FIELDS = (
    "build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "n_batch", "n_threads", "type_k", "type_v", "flash_attn", "n_prompt", "n_gen", "n_depth",
    "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
)  # fmt: skip


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
    bytes_per_token: int = 0  # weights and cache that a decoded token reads, in the middle of the test; 0 unknown

    @property
    def n_tokens(self) -> int:
        """Tokens of one repetition."""
        return self.n_prompt + self.n_gen

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple(1e9 * self.n_tokens / ns for ns in self.samples_ns)

    @property
    def avg_ts(self) -> float:
        """Mean of :attr:`samples_ts`."""
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        """Sample standard deviation of :attr:`samples_ts`."""
        return stddev(self.samples_ts)

    @property
    def read_gb_s(self) -> float:
        """Bytes that the tokens must read, over time; 0 for a prompt, which reads weights once per chunk."""
        return 0.0 if self.n_prompt else self.bytes_per_token * statistics.median(self.samples_ts) / 1e9

    @property
    def test(self) -> str:
        """``pp512``, ``tg128``, ``tg64 @ d4096``."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name


def stddev(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def share_of(gb_s: float, ceiling_gb_s: float) -> str:
    """A bandwidth as a share of the read ceiling: ``61%``; marked ``(!)`` above it; ``-`` where one is not known."""
    if not gb_s or not ceiling_gb_s:
        return "-"
    share = gb_s / ceiling_gb_s
    return f"{share:.0%}" + " (!)" * (share > 1)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] | frozenset[str] = ()) -> str:
    """A Markdown table with padded columns; the columns named in `right` are right-aligned."""
    width = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.rjust(w) if h in right else c.ljust(w) for c, w, h in zip(cells, width, header)]
        return "| " + " | ".join(parts) + " |"

    rule = "| " + " | ".join("-" * (w - 1) + ":" if h in right else "-" * w for w, h in zip(width, header)) + " |"
    return "\n".join([line(header), rule, *map(line, rows)])


def results_markdown(results: Sequence[Result], read_ceiling_gb_s: float = 0.0) -> str:
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
            row += [f"{r.read_gb_s:.1f}" if r.read_gb_s else "-", share_of(r.read_gb_s, read_ceiling_gb_s)]
        rows.append(row)
    table = markdown(header, rows, frozenset(header) - {"engine", "model", "backend"})
    return f"{table}\n\n{ABOVE_CEILING}" if "(!)" in table else table


def record(r: Result, env: Environment) -> dict[str, Any]:
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


def write_results(
    stream: TextIO, results: Sequence[Result], env: Environment, form: str, read_ceiling_gb_s: float = 0.0
) -> None:
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


def _si_size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.2f} MiB"


def _si_count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"
