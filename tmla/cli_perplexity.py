"""``tmla perplexity``: how well a model foresees a text."""

from __future__ import annotations

import argparse
import json

from tmla import cli_terminal as terminal
from tmla.cli_run import load_with_bar, say_what_runs
from tmla.cli_template import read_text
from tmla.errors import ParameterError
from tmla.perplexity import Perplexity, make_windows, perplexity, text_ids
from tmla.requantize import open_checked
from tmla.tokenizer import Tokenizer

DESCRIPTION = """Measure the perplexity of a text: exp of the mean cross entropy, in nats, of its tokens.

The text is cut into windows of --ctx tokens. Each is computed from an empty
cache and begins with BOS, if the file wants one, in the place of its first
token. Windows begin --stride tokens after each other; every token but the
first is scored once, in the first window that foresees it: with at least ctx -
stride tokens before it, but in the first window. --halves scores as
llama-perplexity of llama.cpp does: windows do not overlap, and of each the
tokens behind position ctx / 2 are scored; what is left over at the end is not.
The standard error is llama.cpp's, too: perplexity times std(nats) /
sqrt(tokens - 1)."""


def measure(args: argparse.Namespace) -> int:
    """Measure, print, return the exit code."""
    text, ctx = read_text(args.text), args.n_ctx
    if args.halves and args.stride is not None:
        raise ParameterError("--halves has windows that do not overlap, --stride lets them; give one of the two")
    stride = ctx if args.halves else args.stride or max(1, ctx // 2)
    gf, _ = open_checked(args.file, overrides=dict(args.override), requantize=args.requantize)
    with gf:
        ids, bos = text_ids(Tokenizer.from_gguf(gf), text)
    make_windows(ids, ctx, stride, bos, halves=args.halves)  # what it refuses is refused before loading
    model, _, _ = load_with_bar(args)
    say_what_runs(model)
    with terminal.progress_bar("measuring") as bar:
        result = perplexity(model, ids, ctx=ctx, stride=stride, halves=args.halves, dump=args.dump, progress=bar)
    if args.dump is not None:
        terminal.say(f"{args.dump}: tokens and logits of {result.n_fed:,} positions")
    terminal.write(json.dumps(as_dict(result, model.arch)) + "\n" if args.json else line(result, model.arch))
    return 0


def as_dict(r: Perplexity, arch: str) -> dict[str, float | int | str]:
    """The result for JSON."""
    return {
        "perplexity": r.perplexity,
        "standard_error": r.standard_error,
        "tokens": r.n_tokens,
        "windows": r.n_windows,
        "ctx": r.ctx,
        "stride": r.stride,
        "tokens_computed": r.n_fed,
        "tok_s": r.tok_s,
        "arch": arch,
    }


def line(r: Perplexity, arch: str) -> str:
    """The result as one line."""
    windows = f"{r.n_windows} window{'s' * (r.n_windows != 1)} of {r.ctx}, stride {r.stride}"
    return (
        f"perplexity {r.perplexity:.4f} +- {r.standard_error:.4f}; {r.n_tokens:,} tokens scored; {windows}; "
        f"{arch}: {r.tok_s:.1f} tok/s\n"
    )
