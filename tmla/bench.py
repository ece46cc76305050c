"""Speed tests in llama-bench's terms, run on a model or on anything with the same four methods.

``ppN``: N tokens at once; ``tgN``: N tokens one by one; ``@ dM``: behind M cached tokens. Every step's logits are read
back.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from tmla.bench_facts import FileFacts
from tmla.bench_result import Result
from tmla.model import Model
from tmla.stages.cache_row import cache_from_numpy

FILL_FROM = 1024  # a depth beyond it is not computed but filled with random rows
WARM_UP_TOKENS = 8
DEPTH_TOKENS = 64  # generated at a depth, at most
_RANDOM_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Test:
    """What llama-bench calls a test: `n_prompt` tokens at once, or `n_gen` one by one, behind `n_depth` tokens."""

    __test__ = False  # not for pytest

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def n_ctx(self) -> int:
        """Positions it needs."""
        return self.n_depth + self.n_prompt + self.n_gen


def parse_tests(text: str) -> list[Test]:
    """``"pp512,tg64@d4096"`` as a list of tests, the shallow first.

    Raises
    ------
    ValueError
        An item is not ``ppN``, ``tgN``, or one of these with ``@dM``.
    """
    out = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(pp|tg)([1-9]\d*)(?:\s*@\s*d(\d+))?\s*", item)
        if match is None:
            raise ValueError(f"test {item!r}: expected ppN or tgN, with @dM behind it for a depth of M")
        kind, n, depth = match[1], int(match[2]), int(match[3] or 0)
        out.append(Test(n, 0, depth) if kind == "pp" else Test(0, n, depth))
    return sorted(out, key=lambda t: t.n_depth)


class Engine(Protocol):
    """What a measurement needs of an engine."""

    name: str
    backend: str
    n_threads: int | None
    type_kv: str
    flash_attn: bool | None  # None where the choice does not exist

    @property
    def n_past(self) -> int:
        """Cached tokens."""

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        """Feed tokens; logits behind the last."""

    def decode(self, token: int) -> np.ndarray:
        """Feed one token; its logits."""

    def rewind(self, n_past: int) -> None:
        """Forget everything from position `n_past` on."""

    def fill(self, tokens: Sequence[int]) -> None:
        """Have these tokens' positions behind those that are cached: computed, or as good for a measurement."""


class ModelEngine:
    """A model behind the interface of :class:`Engine`.

    Parameters
    ----------
    model : Model
    threads : int, optional
        As it was loaded with.
    """

    name = "tmla"
    flash_attn: bool | None = None

    def __init__(self, model: Model, threads: int | None = None):
        self.model, self.backend, self.type_kv = model, model.arch, model.cache_dtype
        self.n_threads = self.threads_of(model.arch, threads)

    @staticmethod
    def threads_of(arch: str, threads: int | None) -> int | None:
        """CPU threads that compute; None on a GPU."""
        return (threads or os.cpu_count()) if arch == "cpu" else None

    @property
    def n_past(self) -> int:
        """Cached tokens."""
        return self.model.n_past

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        """As :meth:`Model.prefill`."""
        return self.model.prefill(tokens)

    def decode(self, token: int) -> np.ndarray:
        """As :meth:`Model.decode`."""
        return self.model.decode(token)

    def rewind(self, n_past: int) -> None:
        """As :meth:`Model.rewind`."""
        self.model.rewind(n_past)

    def fill(self, tokens: Sequence[int]) -> None:
        """Compute up to :data:`FILL_FROM` positions; take random rows for more, which cost the same to read."""
        if self.n_past + len(tokens) > FILL_FROM:
            fill_cache(self.model, self.n_past + len(tokens))
        else:
            self.model.prefill(tokens)


def fill_cache(model: Model, n_past: int, seed: int = 0) -> None:
    """Fill the first `n_past` positions with random rows of about a latent's size, without computing them.

    What a step costs does not depend on the values that are cached, so depths can be measured that would take long to
    compute. The text that follows is nonsense.
    """
    rng = np.random.default_rng(seed)
    dtype = np.float16 if model.cache_dtype == "f16" else np.float32
    for bank in model.attention_banks:
        rows = rng.standard_normal((min(n_past, _RANDOM_ROWS), bank.row_width), np.float32).astype(dtype)
        n_layers, n_ctx = bank.cache.shape[:2]
        cache_from_numpy(bank.cache, np.resize(rows, (n_layers, n_ctx, bank.row_width)), model.cache_dtype)
    model.n_past = n_past


class Runner:
    """Runs tests on engines with the same tokens.

    Parameters
    ----------
    facts : FileFacts
    n_ctx : int
        Longest depth plus test.
    seed : int
    """

    def __init__(self, facts: FileFacts, n_ctx: int, seed: int = 0):
        self.facts = facts
        self.tokens: list[int] = np.random.default_rng(seed).integers(0, facts.n_vocab, n_ctx).tolist()

    def go_to(self, engine: Engine, depth: int) -> None:
        """Bring the cache to `depth` tokens; what is there already is kept."""
        if engine.n_past > depth:
            engine.rewind(depth)
        if engine.n_past < depth:
            engine.fill(self.tokens[engine.n_past : depth])

    def time_ns(self, engine: Engine, test: Test) -> int:
        """Time one run of a test in ns, the logits of each step read back; the cache is left at the test's depth."""
        self.go_to(engine, test.n_depth)
        tokens = self.tokens[test.n_depth : test.n_ctx]
        start = time.perf_counter_ns()
        if test.n_prompt:
            engine.prefill(tokens)
        else:
            for token in tokens:
                engine.decode(token)
        elapsed = time.perf_counter_ns() - start
        engine.rewind(test.n_depth)
        return elapsed

    def warm_up(self, engine: Engine, test: Test) -> None:
        """Compile and touch what the test will use."""
        self.time_ns(engine, dataclasses.replace(test, n_gen=min(test.n_gen, WARM_UP_TOKENS)))

    def run(
        self, engine: Engine, tests: Iterable[Test], repetitions: int, report: Callable[[Result], None] | None = None
    ) -> list[Result]:
        """Warm up and time each test `repetitions` times.

        Parameters
        ----------
        report : callable, optional
            Called with each result as it comes.
        """
        results = []
        for test in tests:
            self.warm_up(engine, test)
            results.append(self.result(engine, test, [self.time_ns(engine, test) for _ in range(repetitions)]))
            if report is not None:
                report(results[-1])
        return results

    def result(self, engine: Engine, test: Test, samples_ns: Sequence[int]) -> Result:
        """Put samples together with what they belong to."""
        f = self.facts
        # a peer may keep another kind of cache, so its bytes are not known
        read = f.bytes_at(test.n_depth + test.n_gen // 2, engine.type_kv) if engine.name == "tmla" else 0
        return Result(
            engine=engine.name, model_filename=f.filename, model_type=f.model_type, model_size=f.n_bytes,
            model_n_params=f.n_params, backend=engine.backend, n_threads=engine.n_threads, type_kv=engine.type_kv,
            flash_attn=engine.flash_attn, n_prompt=test.n_prompt, n_gen=test.n_gen, n_depth=test.n_depth,
            samples_ns=tuple(samples_ns),
            bytes_per_token=read,
        )  # fmt: skip
