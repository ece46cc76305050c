"""Prefill and decode speed of one file, in llama-bench's terms.

    python -m benchmarks.bench_decode MODEL.gguf --tests pp512,tg128,tg64@d4096,tg64@d16384,tg64@d65536

``ppN``: N tokens at once; ``tgN``: N tokens one by one; ``@dM``: behind M cached tokens. Every step's logits are read
back. Mean and standard deviation over repetitions, after a warm-up. Depths beyond 1,024 are filled with random rows
instead of being computed: what a step costs does not depend on the cached values. ``tmla bench`` is the same engine.
"""

import argparse
import pathlib
import sys

import tmla
from benchmarks import common
from tmla.bench import ModelEngine, Runner, parse_tests
from tmla.bench_env import environment, load_average
from tmla.bench_facts import file_facts
from tmla.bench_result import write_results

DEFAULT_TESTS = "pp512,tg128,tg64@d4096"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options shared with bench_peers."""
    p.add_argument("-t", "--tests", default=DEFAULT_TESTS, help=f"comma-separated (default: {DEFAULT_TESTS})")
    p.add_argument("-r", "--repetitions", type=int, default=5)
    common.add_backend(p)
    p.add_argument("--no-ceiling", action="store_true", help="do not measure the read ceiling")
    common.add_output(p)
    p.add_argument("--seed", type=int, default=0, help="of the tokens")


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_decode", description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path, help="GGUF file")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        tests = parse_tests(args.tests)
    except ValueError as e:
        parser.error(str(e))
    facts, load = file_facts(args.model), load_average()
    n_ctx = max(t.n_ctx for t in tests)
    model = tmla.load(args.model, arch=args.arch, n_ctx=n_ctx, cache_dtype=args.cache, threads=args.threads)
    engine = ModelEngine(model, args.threads)
    ceiling = common.Ceiling(model.arch, facts.token_weight_bytes, args.threads, off=args.no_ceiling)

    def say(r) -> None:
        print(f"{r.test}: {r.avg_ts:.2f} tokens/s", file=sys.stderr)

    results = Runner(facts, n_ctx, args.seed).run(engine, tests, args.repetitions, say)
    ceiling.measure()
    env = environment(model.arch, engine.n_threads, load)
    common.emit(args, lambda stream: write_results(stream, results, env, args.output, ceiling.gb_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
