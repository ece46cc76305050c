"""``tmla run``: text (or ids) in, text (or ids) out, timings at the end."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from typing import Any

from tmla import cli_terminal as terminal
from tmla import info
from tmla.cli_prompt_cache import PromptCache
from tmla.errors import ContextError
from tmla.generate import Chunk, Stats, stream_generate
from tmla.loading import load
from tmla.model import Model
from tmla.requantize import open_checked
from tmla.requantize_report import requantize_report
from tmla.sampling import Sampler
from tmla.stops import StopScanner
from tmla.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MAX_TOKENS_A_CHARACTER = 4  # bytes of UTF-8

REASONS = {
    "eos": "the model ended its turn",
    "stop": "a stop string came",
    "length": "as many tokens as asked for (-n)",
    "context": "the context is full (--ctx)",
}


def run(args: argparse.Namespace) -> int:
    """Generate and return the exit code."""
    prompt = args.tokens if args.tokens is not None else sys.stdin.read() if args.prompt == "-" else args.prompt
    refuse_early(args, prompt)
    cache = None if args.prompt_cache is None else PromptCache(args.prompt_cache)
    model, load_s, compile_s = load_with_bar(args)
    if cache is not None:
        cache.check_fits(model)
    parameters = generation_options(args) | {"ignore_eos": args.ignore_eos}
    chunks = stream_generate(model, prompt, special=args.special, **parameters)
    say_what_runs(model)
    compile_s += warm_up(model)
    if cache is not None:
        ids = prompt if isinstance(prompt, list) else model.tokenizer.encode_prompt(prompt, special=args.special)
        chunks = cache.resume(model, ids, **parameters)
    n_tokens = 0
    out = terminal.ModelText()
    try:
        last = Chunk("", None)
        for last in chunks:
            n_tokens += last.token is not None
            out.write(_piece(last, n_tokens) if args.ids else last.text)
    except KeyboardInterrupt:
        chunks.close()
        out.end()
        if cache is not None and n_tokens:
            cache.save(model, interrupted=True)
        terminal.say(f"interrupted after {n_tokens} tokens")
        raise
    out.end()
    if cache is not None:
        cache.save(model)
    terminal.say(timing_line(model.arch, load_s, compile_s, last.stats))
    terminal.say(f"ended: {REASONS[str(last.reason)]}")
    return 0


def refuse_early(args: argparse.Namespace, prompt: str | list[int]) -> None:
    """Refuse before the weights are loaded what :func:`stream_generate` would refuse after.

    Raises
    ------
    ParameterError
        A sampling parameter is out of its range.
    ContextError
        The prompt does not fit the context.
    """
    Sampler(args.temp, args.top_k, args.top_p, args.min_p, args.seed)
    StopScanner(args.stop)
    if args.n_ctx == "max" or len(prompt) <= args.n_ctx // _MAX_TOKENS_A_CHARACTER - 1:
        return
    ids = prompt
    if isinstance(prompt, str):
        gf, _ = open_checked(args.file, overrides=dict(args.override), requantize=args.requantize)
        with gf:
            ids = Tokenizer.from_gguf(gf).encode_prompt(prompt, special=args.special)
    if len(ids) > args.n_ctx:
        raise ContextError(
            f"the prompt has {len(ids)} tokens, but the context holds {args.n_ctx}; shorten it, or use --ctx {len(ids)}"
        )


def say_requantized(args: argparse.Namespace) -> None:
    """With ``--requantize``: say what becomes of the matrices, and what it costs."""
    if not args.requantize:
        return
    gf, cfg = open_checked(args.file, overrides=dict(args.override), requantize=True)
    with gf:
        text = requantize_report(gf, cfg).text()
    for line in (text or "nothing to requantise: all matrices are Q8_0").splitlines():
        terminal.say(line)


def say_what_runs(model: Model) -> None:
    """Say what was loaded and what was decided about it; with ``-v`` also every default that was taken."""
    described = info.describe(model.file, model.config, model.n_ctx, model.cache_dtype, model.memory)
    for line in info.headline(described):
        terminal.say(line)
    for note in described["notes"]:
        log.info("%s", note)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Parameters of :func:`tmla.generate.stream_generate` that ``run`` and ``chat`` share."""
    return {
        "max_tokens": None if args.n < 0 else args.n,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
        "stop": args.stop,
    }


def load_with_bar(args: argparse.Namespace) -> tuple[Model, float, float]:
    """Load the model of the command line, with a bar on a terminal: model, seconds to load and seconds to compile."""
    say_requantized(args)
    start = weights_in = time.perf_counter()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(terminal.progress_bar("loading"))

        def progress(done: int, total: int) -> None:
            nonlocal weights_in
            if bar is not None:
                bar(done, total)
            if done >= total:  # what follows is compilation
                weights_in = time.perf_counter()
                stack.enter_context(terminal.ctrl_c_ends_process())

        model = load(
            args.file,
            arch=args.arch,
            n_ctx=args.n_ctx,
            cache_dtype=args.cache,
            overrides=dict(args.override),
            progress=progress,
            threads=args.threads,
            requantize=args.requantize,
        )
    return model, weights_in - start, time.perf_counter() - weights_in


def warm_up(model: Model) -> float:
    """Run one step, which compiles what loading did not; return the seconds it took."""
    start = time.perf_counter()
    model.reset()
    with terminal.ctrl_c_ends_process():
        model.prefill([0])
    model.reset()
    return time.perf_counter() - start


def _piece(chunk: Chunk, n_tokens: int) -> str:
    if chunk.token is None:
        return ""
    return f"{',' * (n_tokens > 1)}{chunk.token}"


def timing_line(arch: str, load_s: float, compile_s: float, stats: Stats | None) -> str:
    """One line: backend, load and compile seconds, speeds, memory."""
    parts = [f"{arch}: load {load_s:.2f} s", f"compile {compile_s:.2f} s"]
    if stats is not None:
        parts.append(f"prompt {stats.prompt_tokens} tokens, {stats.prompt_tok_s:.1f} tok/s")
        parts.append(f"decode {stats.n_tokens} tokens, {stats.decode_tok_s:.1f} tok/s")
    peak = terminal.peak_memory()
    if peak is not None:
        parts.append(f"peak memory {info.size(peak)}")
    return "; ".join(parts)
