"""One interface over the engines that are measured, and the tests that are run on them."""

import dataclasses
import os
import re
import time
from typing import Protocol

import numpy as np

from benchmarks.common import Result


@dataclasses.dataclass(frozen=True)
class Test:
    """What llama-bench calls a test: `n_prompt` tokens at once, or `n_gen` one by one, behind `n_depth` tokens."""

    __test__ = False  # not for pytest

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def n_ctx(self) -> int:
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

    def prefill(self, tokens) -> np.ndarray:
        """Feed tokens; logits behind the last."""

    def decode(self, token: int) -> np.ndarray:
        """Feed one token; its logits."""

    def rewind(self, n_past: int) -> None:
        """Forget everything from position `n_past` on."""


class TmlaEngine:
    """tmla behind the interface of :class:`Engine`."""

    name = "tmla"

    def __init__(self, path, *, n_ctx: int, arch: str | None, threads: int | None, cache_dtype: str = "f16"):
        import tmla

        self.model = tmla.load(path, arch=arch, n_ctx=n_ctx, cache_dtype=cache_dtype, threads=threads)
        self.backend = self.model.arch
        self.type_kv = cache_dtype
        self.flash_attn: bool | None = None
        self.n_threads = (threads or os.cpu_count()) if self.model.arch == "cpu" else None

    @property
    def n_past(self) -> int:
        return self.model.n_past

    def prefill(self, tokens) -> np.ndarray:
        return self.model.prefill(tokens)

    def decode(self, token: int) -> np.ndarray:
        return self.model.decode(token)

    def rewind(self, n_past: int) -> None:
        self.model.rewind(n_past)


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """What a table says about a model file, and what a decoded token has to read of it."""

    filename: str
    model_type: str
    n_bytes: int
    n_params: int
    n_vocab: int
    arch: str
    token_weight_bytes: int
    cache_row_bytes: int  # of all layers, f16

    def bytes_at(self, position: int, type_kv: str) -> int:
        """Bytes that the token at `position` reads: the active weights, and each cached row once."""
        return self.token_weight_bytes + (position + 1) * self.cache_row_bytes * (2 if type_kv == "f32" else 1)


def file_facts(path) -> FileFacts:
    """Read a file's header."""
    from tmla import config, gguf_file

    with gguf_file.open_gguf(path) as gf:
        cfg = config.MLAConfig.from_gguf(gf)
        n_params = active = 0
        for t in gf.tensors.values():
            n_params += int(np.prod(t.shape, dtype=np.int64))
            block = re.match(r"blk\.(\d+)\.", t.name)
            if block and int(block[1]) >= cfg.n_layers:
                continue  # multi-token prediction, ignored
            if "_exps." in t.name:
                active += t.n_bytes * cfg.n_experts_used // cfg.n_experts
            elif t.name == "token_embd.weight" and not cfg.tied_head:
                active += t.n_bytes // t.shape[0]
            else:
                active += t.n_bytes
        size = f"{n_params / 1e9:.0f}B" if n_params >= 1e9 else f"{n_params / 1e6:.0f}M"
        return FileFacts(
            filename=gf.name,
            model_type=f"{cfg.arch} {size} Q8_0",
            n_bytes=gf.n_bytes,
            n_params=n_params,
            n_vocab=cfg.n_vocab,
            arch=cfg.arch,
            token_weight_bytes=active,
            cache_row_bytes=2 * cfg.n_layers * cfg.cache_row_width,
        )


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
        self.tokens = [int(t) for t in np.random.default_rng(seed).integers(0, facts.n_vocab, n_ctx)]

    def fill(self, engine: Engine, depth: int) -> None:
        """Bring the cache to the first `depth` tokens; what is there already is kept."""
        if engine.n_past > depth:
            engine.rewind(depth)
        if engine.n_past < depth:
            engine.prefill(self.tokens[engine.n_past : depth])

    def time_ns(self, engine: Engine, test: Test) -> int:
        """Time one run of a test in ns, the logits of each step read back; the cache is left at the test's depth."""
        self.fill(engine, test.n_depth)
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
        n_gen = min(test.n_gen, 8)
        self.time_ns(engine, dataclasses.replace(test, n_gen=n_gen))

    def result(self, engine: Engine, test: Test, samples_ns) -> Result:
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


def read_ceiling_gb_s(n_bytes: int, threads: int, repetitions: int = 5) -> float:
    """Fastest plain read of `n_bytes` of main memory by NumPy in `threads` threads, in GB/s."""
    from concurrent.futures import ThreadPoolExecutor

    data = np.ones(n_bytes // 8, np.uint64)
    parts = np.array_split(data, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            start = time.perf_counter_ns()
            total = sum(int(x) for x in pool.map(np.add.reduce, parts))
            elapsed = time.perf_counter_ns() - start
            assert total == data.size
            best = max(best, data.nbytes / elapsed)
    return best
