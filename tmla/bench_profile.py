"""Time per stage of a decoded token: every stage launched by itself, with the bytes it must read and its operations."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import taichi as ti
from taichi.profiler.kernel_profiler import get_default_kernel_profiler

from tmla import runtime
from tmla.bench_result import markdown, share_of
from tmla.config import MLAConfig
from tmla.errors import BackendError
from tmla.layer_stages import single_stages
from tmla.stages.argmax import argmax

PROFILER, SYNCHRONISED = "Taichi's kernel profiler", "synchronised launches"
_VALUE_BYTES = {"f16": 2, "f32": 4}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of one layer, ready to launch; weights and cache it must read, in bytes; operations."""

    name: str
    launch: Callable[[], None]
    n_bytes: int
    n_ops: int


@dataclasses.dataclass(frozen=True)
class StageTime:
    """A stage, all layers of a token together."""

    name: str
    calls: int
    us: float  # median over tokens
    n_bytes: int
    n_ops: int

    @property
    def gb_s(self) -> float:
        """Bytes it must read over its time, in GB/s."""
        return self.n_bytes / self.us / 1e3

    @property
    def gop_s(self) -> float:
        """Operations over its time, in 1e9 a second."""
        return self.n_ops / self.us / 1e3


@dataclasses.dataclass(frozen=True)
class Profile:
    """What :meth:`tmla.model.Model.profile` returns.

    Attributes
    ----------
    arch : str
    timer : str
        :data:`PROFILER` (device time of the dispatches) or :data:`SYNCHRONISED` (wall clock around a launch and a wait,
        which adds what a launch costs to every stage).
    n_rows : int
        Cached rows that the token attended to.
    stages : tuple of StageTime
        In the order in which a token passes through them.
    token_us : float
        A whole token as decoding runs it, by the wall clock: kernels of several stages each, up to the logits.
    tasks : tuple of (str, int, float)
        With the profiler: the dispatches of that token by Taichi's own names, how often, and us together.
    """

    arch: str
    timer: str
    n_rows: int
    stages: tuple[StageTime, ...]
    token_us: float
    tasks: tuple[tuple[str, int, float], ...]

    @property
    def total_us(self) -> float:
        """Sum of the stages."""
        return sum(s.us for s in self.stages)

    def text(self, read_ceiling_gb_s: float = 0.0) -> str:
        """A Markdown table of the stages; with a read ceiling, in GB/s, also shares of it."""
        header = ["stage", "calls", "us", "share", "MB", "GB/s", "of ceiling", "Gop/s"]
        rows = []
        for s in self.stages:
            small = s.n_bytes < 1e4 * s.calls  # activations it reads weigh as much: no bandwidth to speak of
            speed = "-" if small else f"{s.gb_s:.1f}"
            share = "-" if small else share_of(s.gb_s, read_ceiling_gb_s)
            row = [s.name, str(s.calls), f"{s.us:.1f}", f"{s.us / self.total_us:.1%}", f"{s.n_bytes / 1e6:.3f}"]
            rows.append([*row, speed, share, f"{s.gop_s:.2f}"])
        n_bytes, n_ops = sum(s.n_bytes for s in self.stages), sum(s.n_ops for s in self.stages)
        for name, us in (("sum of the stages", self.total_us), ("a token as decoding runs it", self.token_us)):
            gb_s = n_bytes / us / 1e3
            row = [name, "", f"{us:.1f}", f"{us / self.total_us:.1%}", f"{n_bytes / 1e6:.3f}", f"{gb_s:.1f}"]
            rows.append([*row, share_of(gb_s, read_ceiling_gb_s), f"{n_ops / us / 1e3:.2f}"])
        return markdown(header, rows, header[1:])

    def tasks_text(self) -> str:
        """A Markdown table of the dispatches as decoding launches them; empty without the profiler."""
        if not self.tasks:
            return ""
        header = ["dispatch", "a token", "us", "share"]
        total = sum(us for _, _, us in self.tasks)
        rows = [[name, str(n), f"{us:.1f}", f"{us / total:.1%}"] for name, n, us in self.tasks]
        return markdown(header, rows, header[1:])


def profile(cfg: MLAConfig, steps: Any, banks: tuple[Any, Any, Any], s: Any, pos: int, n_tokens: int) -> Profile:
    """Time the stages of the token at `pos`, with the bytes they must read and their operations.

    By Taichi's own profiler if the backend was started with it, ``tmla.runtime.init(arch, profiler=True)`` before
    :func:`tmla.load`; else by the wall clock around a launch and a wait. The cache's row `pos` is overwritten.

    Parameters
    ----------
    cfg : MLAConfig
    steps : tmla.layer.Steps
    banks : tuple
        Globals, attention banks, FFN banks.
    s : State
    pos : int
        Cached rows before the token: the model's, of which one must be free.
    n_tokens : int
        Tokens to take medians of.

    Raises
    ------
    BackendError
        The profiler runs but recorded nothing.
    """
    profiled = runtime.caps().profiler
    times: dict[str, list[float]] = {}
    facts: dict[str, np.ndarray] = {}
    for turn in range(n_tokens + 1):
        one: dict[str, float] = {}
        for stage in token_stages(cfg, steps, banks, s, pos):
            one[stage.name] = one.get(stage.name, 0.0) + _time_us(stage.launch, profiled)
            if not turn:
                facts.setdefault(stage.name, np.zeros(3, np.int64))
                facts[stage.name] += np.array([1, stage.n_bytes, stage.n_ops])
        if turn:  # the first compiles
            for name, us in one.items():
                times.setdefault(name, []).append(us)
    whole, tasks = _whole_tokens(steps, pos, n_tokens, profiled)
    rows = [
        StageTime(name, int(n), statistics.median(times[name]), int(b), int(o)) for name, (n, b, o) in facts.items()
    ]
    return Profile(
        runtime.caps().arch, PROFILER if profiled else SYNCHRONISED, pos + 1, tuple(rows), whole, tuple(tasks)
    )


def token_stages(cfg: MLAConfig, steps: Any, banks: tuple[Any, Any, Any], s: Any, pos: int) -> Iterator[Stage]:
    """Every stage of the token at `pos`, in order; each must be launched before the next is taken."""
    _, attention_banks, ffn_banks = banks
    ffn_of = {b.first + i: b for b in ffn_banks for i in range(b.n)}
    yield Stage("embedding", partial(steps.begin, 0, pos), q8_bytes(1, cfg.dim), 2 * cfg.dim)
    for a in attention_banks:
        for layer in range(a.first, a.first + a.n):
            facts = attention_facts(cfg, a, pos) | ffn_facts(cfg, ffn_of[layer])
            for name, launch in single_stages(a, ffn_of[layer], s, layer):
                yield Stage(name, launch, *facts[name])
    head = partial(_head, steps)
    yield Stage("final norm, head", head, q8_bytes(cfg.n_vocab, cfg.dim) + 4 * cfg.dim, 2 * cfg.n_vocab * cfg.dim)
    yield Stage("greedy choice", partial(argmax, s.logits, s.n_choice, s.best, s.who, s.token), 0, cfg.n_vocab)


def _head(steps: Any) -> None:
    steps.head()


def attention_facts(cfg: MLAConfig, a: Any, pos: int) -> dict[str, tuple[int, int]]:
    """Bytes that each stage of the MLA block must read at `pos`, and its operations, by its name."""
    d, h, c, width = cfg.dim, cfg.n_heads, cfg.kv_lora_rank, cfg.cache_row_width
    n, r, v, q_width, t = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, h * cfg.qk_head_dim, pos + 1
    low = cfg.q_lora_rank or 0
    n_proj = (low or q_width) + width
    return {
        "norm, q and kv_a projections": (q8_bytes(n_proj, d) + 4 * d, 2 * n_proj * d + 4 * d),
        "norm before attention": (4 * d, 4 * d),
        "q and kv_a projections": (q8_bytes(n_proj, d), 2 * n_proj * d),
        "norm of the low-rank query": (4 * low, 4 * low),
        "q_b projection": (q8_bytes(q_width, low), 2 * q_width * low),
        "ropes, cache row, absorb": (q8_bytes(h * n, c) + 4 * c + 4 * r, 2 * h * n * c + 3 * h * r + 4 * c),
        "attention over the rows": (width * _VALUE_BYTES[a.cache_dtype] * t, 2 * h * (width + c) * t),
        "join, v-combine": (q8_bytes(h * v, c), 2 * h * v * c),
        "output projection": (q8_bytes(d, h * v), 2 * d * h * v),
    }


def ffn_facts(cfg: MLAConfig, f: Any) -> dict[str, tuple[int, int]]:
    """The same for the FFN."""
    d, inner, n_matrices = cfg.dim, f.n_used * f.expert_ffn_dim + f.common_ffn_dim, 3 if f.gated else 2
    network = n_matrices * q8_bytes(inner, d), 2 * n_matrices * inner * d
    return {
        "norm before FFN": (4 * d, 4 * d),
        "router": (4 * cfg.n_experts * d, 2 * cfg.n_experts * d),
        "FFN, mixture": network,
        "FFN, dense": network,
    }


def q8_bytes(n_out: int, n_in: int) -> int:
    """Bytes of a Q8_0 matrix [n_out, n_in]."""
    return n_out * n_in // 32 * 34


def _time_us(launch: Callable[[], None], profiled: bool) -> float:
    if profiled:
        ti.profiler.clear_kernel_profiler_info()
        launch()
        runtime.sync()
        records = _records()
        if not records:
            raise BackendError(
                f"Taichi's kernel profiler recorded nothing on {runtime.caps().arch!r}; start without profiler=True"
            )
        return max(sum(record.kernel_time for record in records) * 1e3, 0.1)  # the CPU's clock counts microseconds
    runtime.sync()
    start = time.perf_counter()
    launch()
    runtime.sync()
    return (time.perf_counter() - start) * 1e6


def _records() -> list[Any]:
    """What the profiler recorded since it was cleared: name, kernel_time in ms (Taichi has no public way to it)."""
    ti.profiler.get_kernel_profiler_total_time()  # brings the records over
    return list(get_default_kernel_profiler()._traced_records)


def _whole_tokens(steps: Any, pos: int, n: int, profiled: bool) -> tuple[float, list[tuple[str, int, float]]]:
    """Median time of a token as decoding launches it, in us, and its dispatches where they are recorded."""

    def token() -> None:
        steps.begin(0, pos)
        steps.run_layers(pos + 1)
        steps.head()

    token()
    runtime.sync()
    walls = []
    if profiled:
        ti.profiler.clear_kernel_profiler_info()
    for _ in range(n):
        runtime.sync()
        start = time.perf_counter()
        token()
        runtime.sync()
        walls.append((time.perf_counter() - start) * 1e6)
    tasks: dict[str, list[float]] = {}
    if profiled:
        for record in _records():
            tasks.setdefault(record.name, []).append(record.kernel_time * 1e3)
        ti.profiler.clear_kernel_profiler_info()
    by_time = sorted(((name, len(us) // n, sum(us) / n) for name, us in tasks.items()), key=lambda task: -task[2])
    return statistics.median(walls), by_time
