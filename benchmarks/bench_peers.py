"""The same file through tmla and llama.cpp, alternating in one run, and the ratios of their speeds.

    python -m benchmarks.bench_peers mid.gguf mid-split.gguf --tests pp512,tg64@d128,tg64@d4096 --threads 2

llama.cpp runs with flash attention off and on; ratios are against the better of both. With two files, one of each
layout of ``kv_b``, ratios are against the best of both files and settings. Needs llama-cpp-python (the ``bench``
extra). The engines take turns within each repetition, and another one begins each time.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time

import numpy as np

import tmla
from benchmarks import common
from benchmarks.bench_decode import add_arguments
from tmla.bench import Engine, ModelEngine, Runner, Test, parse_tests
from tmla.bench_env import environment, load_average
from tmla.bench_facts import FileFacts, file_facts
from tmla.bench_result import Result, markdown, record, write_results

PAUSE_S = 0.05  # between engines: lets the other one's idle threads go to sleep
PEER_TESTS = "pp512,tg64@d128,tg64@d4096"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One test of one file by tmla, and by the peer with each of its settings (and files)."""

    tmla: Result
    peers: tuple[Result, ...]

    @property
    def best_peer(self) -> Result:
        """The peer's fastest setting."""
        return max(self.peers, key=lambda r: r.avg_ts)

    @property
    def ratio(self) -> float:
        """Of the means, tmla's over the best peer's."""
        return self.tmla.avg_ts / self.best_peer.avg_ts

    @property
    def paired(self) -> tuple[float, ...]:
        """Of each repetition, where both ran within seconds of each other."""
        return tuple(a / b for a, b in zip(self.tmla.samples_ts, self.best_peer.samples_ts))


def compare(runs: list[tuple[Runner, Engine]], test: Test, repetitions: int) -> list[Comparison]:
    """Run one test on all engines in turn; one comparison for each that is tmla."""
    samples: list[list[int]] = [[] for _ in runs]
    for runner, engine in runs:
        runner.warm_up(engine, test)
    for rep in range(repetitions):
        for k in range(len(runs)):
            i = (rep + k) % len(runs)
            runner, engine = runs[i]
            time.sleep(PAUSE_S)
            samples[i].append(runner.time_ns(engine, test))
    results = [runner.result(engine, test, s) for (runner, engine), s in zip(runs, samples)]
    peers = tuple(r for r in results if r.engine != "tmla")
    return [Comparison(r, peers) for r in results if r.engine == "tmla"]


def agreement(runs: list[tuple[Runner, Engine]], n: int = 32) -> list[float]:
    """Correlation of each peer's logits with tmla's of the same file after `n` tokens: all computed the same model."""
    out, own = [], None
    for runner, engine in runs:  # tmla stands before the peers of its file
        engine.rewind(0)
        logits = engine.prefill(runner.tokens[:n])
        engine.rewind(0)
        if engine.name == "tmla":
            own = logits
        else:
            out.append(float(np.corrcoef(own, logits)[0, 1]))
    return out


def ratios_markdown(comparisons: list[Comparison]) -> str:
    """One line per test and file: tmla, the best of llama.cpp and which it was, the ratio."""
    header = ["test", "model", "tmla t/s", "llama.cpp t/s", "its best setting", "ratio", "paired median (range)"]
    rows = []
    for c in comparisons:
        best = c.best_peer
        paired = f"{statistics.median(c.paired):.2f} ({min(c.paired):.2f}..{max(c.paired):.2f})"
        speeds = [f"{r.avg_ts:.1f} ± {r.stddev_ts:.1f}" for r in (c.tmla, best)]
        setting = f"{best.model_type}, fa={int(bool(best.flash_attn))}"
        rows.append([c.tmla.test, c.tmla.model_type, *speeds, setting, f"{c.ratio:.2f}", paired])
    return markdown(header, rows, ("tmla t/s", "llama.cpp t/s", "ratio", "paired median (range)"))


def flash_settings(facts: FileFacts, asked: str) -> list[bool]:
    """Settings of flash attention that llama.cpp runs with."""
    settings = [False, True] if asked == "both" else [asked == "1"]
    if facts.arch == "plm" and True in settings:
        print("plm: llama.cpp aborts with flash attention on this architecture; it runs without", file=sys.stderr)
        return [False]
    return settings


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_peers", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", type=pathlib.Path, metavar="model", help="GGUF file of each kv_b layout")
    add_arguments(parser)
    parser.set_defaults(tests=PEER_TESTS)
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers llama.cpp puts on the GPU (default: 0)")
    parser.add_argument("--fa", choices=("both", "0", "1"), default="both", help="flash attention of llama.cpp")
    args = parser.parse_args(argv)
    try:
        tests = parse_tests(args.tests)
    except ValueError as e:
        parser.error(str(e))
    try:
        from benchmarks.llama_peer import LlamaEngine, LlamaModel
    except ModuleNotFoundError:
        parser.error("llama-cpp-python is not installed; pip install 'tmla[bench]'")
    load, n_ctx, threads = load_average(), max(t.n_ctx for t in tests), args.threads or os.cpu_count() or 1
    runs: list[tuple[Runner, Engine]] = []
    for path in args.models:
        facts = file_facts(path)
        if len(args.models) > 1:
            layout = "split" if facts.kv_b_split else "unsplit"
            facts = dataclasses.replace(facts, model_type=f"{facts.model_type} {layout}")
        runner, peer = Runner(facts, n_ctx, args.seed), LlamaModel(path, args.gpu_layers)
        model = tmla.load(path, arch=args.arch, n_ctx=n_ctx, cache_dtype=args.cache, threads=args.threads)
        runs.append((runner, ModelEngine(model, args.threads)))
        runs += [
            (runner, LlamaEngine(peer, n_ctx=n_ctx, threads=threads, flash_attn=fa, cache_dtype=args.cache))
            for fa in flash_settings(facts, args.fa)
        ]
    correlations = agreement(runs, min(32, n_ctx))
    arch = runs[0][1].backend
    ceiling = common.Ceiling(arch, runs[0][0].facts.token_weight_bytes, args.threads, off=args.no_ceiling)
    groups = []
    for test in tests:
        groups.append(compare(runs, test, args.repetitions))
        for c in groups[-1]:
            print(f"{c.tmla.test} {c.tmla.model_type}: ratio {c.ratio:.2f}", file=sys.stderr)
    ceiling.measure()
    env = environment(arch, threads, load)
    results = [r for group in groups for r in (*(c.tmla for c in group), *group[0].peers)]
    comparisons = [c for group in groups for c in group]

    def write(stream) -> None:
        if args.output == "md":
            write_results(stream, results, env, "md", ceiling.gb_s)
            stream.write(f"\n{ratios_markdown(comparisons)}\n")
            stream.write(f"\ncorrelation of logits with tmla's: {', '.join(f'{c:.4f}' for c in correlations)}\n")
        elif args.output == "csv":
            write_results(stream, results, env, "csv")
        else:
            ratios = [
                {"test": c.tmla.test, "model_type": c.tmla.model_type, "ratio": c.ratio, "paired": c.paired}
                for c in comparisons
            ]
            records = [record(r, env) for r in results]
            json.dump({"results": records, "ratios": ratios, "correlations": correlations}, stream, indent=2)
            stream.write("\n")

    common.emit(args, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
