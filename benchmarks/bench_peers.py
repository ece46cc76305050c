"""The same file through tmla and llama.cpp, alternating in one run, and the ratios of their speeds.

    python -m benchmarks.bench_peers MODEL.gguf --tests pp512,tg64@d128,tg64@d4096 --threads 2

llama.cpp runs with flash attention off and on; ratios are against the better of both. Needs llama-cpp-python (the
``bench`` extra). The engines take turns within each repetition, and another one begins each time.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time

import numpy as np

from benchmarks import common
from benchmarks.bench_decode import add_arguments, ceiling_of, emit
from benchmarks.engines import Engine, Runner, Test, TmlaEngine, file_facts, parse_tests

PAUSE_S = 0.05  # between engines: lets the other one's idle threads go to sleep
PEER_TESTS = "pp512,tg64@d128,tg64@d4096"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One test: the results of all engines, and tmla's speed over that of the peer's better setting."""

    test: str
    results: tuple[common.Result, ...]

    @property
    def tmla(self) -> common.Result:
        return self.results[0]

    @property
    def best_peer(self) -> common.Result:
        return max(self.results[1:], key=lambda r: r.avg_ts)

    @property
    def ratio(self) -> float:
        """Of the means."""
        return self.tmla.avg_ts / self.best_peer.avg_ts

    @property
    def paired(self) -> tuple[float, ...]:
        """Of each repetition, where both ran within seconds of each other."""
        return tuple(a / b for a, b in zip(self.tmla.samples_ts, self.best_peer.samples_ts))


def compare(runner: Runner, engines: list[Engine], test: Test, repetitions: int) -> Comparison:
    """Run one test on all engines in turn; the first engine is tmla."""
    samples: list[list[int]] = [[] for _ in engines]
    for engine in engines:
        runner.warm_up(engine, test)
    for rep in range(repetitions):
        for k in range(len(engines)):
            i = (rep + k) % len(engines)
            time.sleep(PAUSE_S)
            samples[i].append(runner.time_ns(engines[i], test))
    results = tuple(runner.result(e, test, s) for e, s in zip(engines, samples))
    return Comparison(results[0].test, results)


def agreement(runner: Runner, engines: list[Engine], n: int = 32) -> list[float]:
    """Correlation of each peer's logits with tmla's after `n` tokens: shows that all computed the same model."""
    logits = []
    for engine in engines:
        engine.rewind(0)
        logits.append(engine.prefill(runner.tokens[:n]))
        engine.rewind(0)
    return [float(np.corrcoef(logits[0], other)[0, 1]) for other in logits[1:]]


def ratios_markdown(comparisons: list[Comparison]) -> str:
    """One line per test: tmla, each setting of llama.cpp, and the ratio to its better one."""
    header = ["test", "tmla t/s"]
    header += [f"llama.cpp fa={int(bool(r.flash_attn))} t/s" for r in comparisons[0].results[1:]]
    header += ["ratio", "paired median (range)"]
    rows = []
    for c in comparisons:
        paired = f"{statistics.median(c.paired):.2f} ({min(c.paired):.2f}..{max(c.paired):.2f})"
        speeds = [f"{r.avg_ts:.1f} ± {r.stddev_ts:.1f}" for r in c.results]
        rows.append([c.test, *speeds, f"{c.ratio:.2f}", paired])
    return common.markdown(header, rows, frozenset(header[1:]))


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_peers", description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.set_defaults(tests=PEER_TESTS)
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers llama.cpp puts on the GPU (default: 0)")
    parser.add_argument("--fa", choices=("both", "0", "1"), default="both", help="flash attention of llama.cpp")
    args = parser.parse_args(argv)
    try:
        tests = parse_tests(args.tests)
    except ValueError as e:
        parser.error(str(e))
    facts, load = file_facts(args.model), common.load_average()
    settings = [False, True] if args.fa == "both" else [args.fa == "1"]
    if facts.arch == "plm" and True in settings:
        print("plm: llama.cpp aborts with flash attention on this architecture; it runs without", file=sys.stderr)
        settings = [False]
    try:
        from benchmarks.llama_peer import LlamaEngine, LlamaModel

        peer = LlamaModel(args.model, args.gpu_layers)
    except ModuleNotFoundError:
        parser.error("llama-cpp-python is not installed; pip install 'tmla[bench]'")
    n_ctx, threads = max(t.n_ctx for t in tests), args.threads or os.cpu_count() or 1
    engines: list[Engine] = [
        TmlaEngine(args.model, n_ctx=n_ctx, arch=args.arch, threads=args.threads, cache_dtype=args.cache)
    ]
    engines += [
        LlamaEngine(peer, n_ctx=n_ctx, threads=threads, flash_attn=fa, cache_dtype=args.cache) for fa in settings
    ]
    runner = Runner(facts, n_ctx, args.seed)
    correlations = agreement(runner, engines, min(32, n_ctx))
    ceiling = ceiling_of(args, engines[0].backend, facts.token_weight_bytes)
    comparisons = []
    for test in tests:
        comparisons.append(compare(runner, engines, test, args.repetitions))
        print(f"{comparisons[-1].test}: ratio {comparisons[-1].ratio:.2f}", file=sys.stderr)
    env = common.environment(engines[0].backend, threads, load)
    results = [r for c in comparisons for r in c.results]

    def write(stream) -> None:
        if args.output == "md":
            common.write_results(stream, results, env, "md", ceiling)
            stream.write(f"\n{ratios_markdown(comparisons)}\n")
            stream.write(f"\ncorrelation of logits with tmla's: {', '.join(f'{c:.4f}' for c in correlations)}\n")
        elif args.output == "csv":
            common.write_results(stream, results, env, "csv")
        else:
            ratios = {c.test: {"ratio": c.ratio, "paired": c.paired} for c in comparisons}
            records = [common.record(r, env) for r in results]
            json.dump({"results": records, "ratios": ratios, "correlations": correlations}, stream, indent=2)
            stream.write("\n")

    emit(args, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
