"""Prefill and decode speed of one file, in llama-bench's terms.

    python -m benchmarks.bench_decode MODEL.gguf --tests pp512,tg128,tg64@d4096

``ppN``: N tokens at once; ``tgN``: N tokens one by one; ``@dM``: behind M cached tokens. Every step's logits are read
back. Mean and standard deviation over repetitions, after a warm-up.
"""

import argparse
import os
import pathlib
import sys

from benchmarks import common
from benchmarks.engines import Runner, TmlaEngine, file_facts, parse_tests, read_ceiling_gb_s

DEFAULT_TESTS = "pp512,tg128,tg64@d4096"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options shared with bench_peers."""
    p.add_argument("model", type=pathlib.Path, help="GGUF file")
    p.add_argument("-t", "--tests", default=DEFAULT_TESTS, help=f"comma-separated (default: {DEFAULT_TESTS})")
    p.add_argument("-r", "--repetitions", type=int, default=5)
    p.add_argument("--arch", choices=("cpu", "cuda", "metal", "vulkan"), help="default: metal on macOS, else cpu")
    p.add_argument("--threads", type=int, help="CPU threads (default: all)")
    p.add_argument("--cache", choices=("f16", "f32"), default="f16", help="cache type (default: f16)")
    p.add_argument("--no-ceiling", action="store_true", help="do not measure the read ceiling (CPU only)")
    p.add_argument("-o", "--output", choices=("md", "csv", "json"), default="md", help="form of the output")
    p.add_argument("--to", type=pathlib.Path, help="also write the output to this file")
    p.add_argument("--seed", type=int, default=0, help="of the tokens")


def ceiling_of(args: argparse.Namespace, arch: str, n_bytes: int) -> float:
    """Read ceiling over what a token reads, at least 256 MB so that no processor cache holds it; 0 if not asked."""
    if args.no_ceiling or arch != "cpu":
        return 0.0
    return read_ceiling_gb_s(max(n_bytes, 1 << 28), args.threads or os.cpu_count() or 1)


def emit(args: argparse.Namespace, write) -> None:
    """Let `write(stream)` write to standard output and to the file of ``--to``."""
    write(sys.stdout)
    if args.to is not None:
        with open(args.to, "w", encoding="utf-8") as f:
            write(f)


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_decode", description=__doc__.split("\n")[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        tests = parse_tests(args.tests)
    except ValueError as e:
        parser.error(str(e))
    facts, load = file_facts(args.model), common.load_average()
    n_ctx = max(t.n_ctx for t in tests)
    engine = TmlaEngine(args.model, n_ctx=n_ctx, arch=args.arch, threads=args.threads, cache_dtype=args.cache)
    ceiling = ceiling_of(args, engine.backend, facts.token_weight_bytes)
    runner, results = Runner(facts, n_ctx, args.seed), []
    for test in tests:
        runner.warm_up(engine, test)
        results.append(runner.result(engine, test, [runner.time_ns(engine, test) for _ in range(args.repetitions)]))
        print(f"{results[-1].test}: {results[-1].avg_ts:.2f} tokens/s", file=sys.stderr)
    env = common.environment(engine.backend, engine.n_threads, load)
    emit(args, lambda stream: common.write_results(stream, results, env, args.output, ceiling))
    return 0


if __name__ == "__main__":
    sys.exit(main())
