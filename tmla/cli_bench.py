"""``tmla bench``: speed tests with llama-bench's columns, or the time of every stage."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from tmla import bench_env, runtime
from tmla import cli_terminal as terminal
from tmla.bench import DEPTH_TOKENS, ModelEngine, Runner, Test, fill_cache
from tmla.bench_facts import file_facts, read_ceiling_gb_s
from tmla.bench_profile import Profile
from tmla.bench_result import ABOVE_CEILING, FORMS, Result, write_results
from tmla.bench_sampling import N_VOCAB, sampling_us
from tmla.cli_run import load_with_bar
from tmla.errors import ParameterError


def bench(args: argparse.Namespace) -> int:
    """Measure, print the table, return the exit code."""
    if args.profile and args.output == "csv":
        raise ParameterError("--profile has no csv form, expected --output md or json")
    load = bench_env.load_average()
    if args.profile:
        _profile(args, load)
    else:
        _speed(args, load)
    return 0


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of the command."""
    p.add_argument("--pp", type=_count, default=512, metavar="N", help="tokens of a prompt, 0 leaves it out (512)")
    p.add_argument("--tg", type=_count, default=128, metavar="N", help="tokens to generate, 0 leaves it out (128)")
    p.add_argument(
        "--depth", type=_counts, default=[], metavar="N,N", help="generate (64 tokens) also behind so many cached ones"
    )
    p.add_argument("--reps", type=_at_least_one, default=5, metavar="N", help="repetitions behind a warm-up (5)")
    p.add_argument("--cache", choices=("f16", "f32"), default="f16", help="storage of the cache (f16)")
    p.add_argument("--output", choices=FORMS, default="md", help="form of the table (md)")
    p.add_argument("--profile", action="store_true", help="time per stage at --depth (64), and of sampling")


def tests_of(pp: int, tg: int, depths: list[int]) -> list[Test]:
    """Prompt and generation at depth 0, and generation of at most :data:`DEPTH_TOKENS` tokens at each depth.

    Raises
    ------
    ParameterError
        Nothing would be measured.
    """
    tests = [Test(pp, 0)] * (pp > 0) + [Test(0, tg)] * (tg > 0)
    tests += [Test(0, min(tg, DEPTH_TOKENS), d) for d in sorted(depths)] * (tg > 0)
    if not tests:
        raise ParameterError("--pp 0 and --tg 0 leave nothing to measure, expected one of them above 0")
    return tests


def _speed(args: argparse.Namespace, load: float | None) -> None:
    tests = tests_of(args.pp, args.tg, args.depth)
    facts = file_facts(args.file, overrides=dict(args.override))
    args.n_ctx, args.requantize = max(t.n_ctx for t in tests), False
    model, _, _ = load_with_bar(args)
    engine = ModelEngine(model, args.threads)
    ceiling = _ceiling(model.arch, facts.token_weight_bytes, args.threads)
    results = Runner(facts, args.n_ctx).run(engine, tests, args.reps, _say_result)
    ceiling = max(ceiling, _ceiling(model.arch, facts.token_weight_bytes, args.threads))
    env = bench_env.environment(model.arch, engine.n_threads, load)
    write_results(sys.stdout, results, env, args.output, ceiling)


def _profile(args: argparse.Namespace, load: float | None) -> None:
    arch = args.arch or runtime.default_arch()
    runtime.init(arch, threads=args.threads, profiler=arch in runtime.PROFILED)
    depths = args.depth or [64]
    args.n_ctx, args.requantize = max(depths) + 1, False
    facts = file_facts(args.file, overrides=dict(args.override))
    model, _, _ = load_with_bar(args)
    ceiling = _ceiling(model.arch, facts.token_weight_bytes, args.threads)
    profiles = []
    for depth in sorted(depths):
        fill_cache(model, depth)
        profiles.append(model.profile(args.reps))
    ceiling = max(ceiling, _ceiling(model.arch, facts.token_weight_bytes, args.threads))
    env = bench_env.environment(model.arch, ModelEngine.threads_of(arch, args.threads), load)
    sampling = sampling_us()
    if args.output == "json":
        document = {
            "environment": dataclasses.asdict(env),
            "model_type": facts.model_type,
            "read_ceiling_gb_s": ceiling or None,
            "profiles": [dataclasses.asdict(p) for p in profiles],
            "sampling_us": sampling,
        }
        terminal.write(json.dumps(document, indent=2) + "\n")
    else:
        terminal.write(profile_text(env, facts.model_type, profiles, sampling, ceiling))


def profile_text(
    env: bench_env.Environment,
    model_type: str,
    profiles: list[Profile],
    sampling: dict[str, float],
    ceiling: float,
    n_vocab: int = N_VOCAB,
) -> str:
    """Tables of profiles, deepest last, and of sampling among `n_vocab` as a share of the first profile's token."""
    parts = [env.line()]
    if ceiling:
        parts.append(f"read ceiling in the same run: {ceiling:.1f} GB/s")
    for p in profiles:
        parts += [f"{model_type}, {p.n_rows:,} cached rows, stages one by one, timed by {p.timer}:", p.text(ceiling)]
    if ABOVE_CEILING[:3] in "".join(parts):
        parts.append(ABOVE_CEILING)
    if profiles[0].tasks:
        parts += ["Dispatches as decoding launches them:", profiles[0].tasks_text()]
    parts += [f"Choosing a token on the host, {n_vocab:,} logits:", sampling_text(sampling, profiles[0].token_us)]
    return "\n\n".join(parts) + "\n"


def sampling_text(sampling: dict[str, float], token_us: float) -> str:
    """A Markdown table: us of a choice, and its share of a token."""
    rows = [f"| {name} | {us:.0f} | {us / token_us:.1%} |" for name, us in sampling.items()]
    return "\n".join(["| setting | us | of a token |", "| --- | ---: | ---: |", *rows])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _at_least_one(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError(f"{text} is too small, expected 1 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _ceiling(arch: str, n_bytes: int, threads: int | None) -> float:
    return read_ceiling_gb_s(n_bytes, threads, repetitions=3) if arch == "cpu" else 0.0


def _say_result(r: Result) -> None:
    terminal.say(f"{r.test}: {r.avg_ts:.2f} tokens/s")
