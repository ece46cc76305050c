"""``tmla compare``: this model's logits against another engine's."""

from __future__ import annotations

import argparse
import json

from tmla import cli_terminal as terminal
from tmla.cli_run import load_with_bar, say_what_runs
from tmla.compare import Comparison, compare
from tmla.logits_file import LogitsFile

DESCRIPTION = """Compare a model's logits with those that another engine left in a file.

The file is a NumPy .npz with tokens, integers [T], and logits, f32 [T,
n_vocab]: row i is of the token that follows tokens[i]. starts, integers [W],
may name the positions at which the cache was emptied; the first is 0. KL is
KL(file || tmla) in nats; errors are the largest difference of a logit at a
position, in units of the standard deviation of the file's logits there."""


def compare_logits(args: argparse.Namespace) -> int:
    """Compare, print the table, return the exit code: 1 if the mean KL is above ``--max-kl``."""
    with LogitsFile(args.logits) as f:
        args.n_ctx = f.longest
        model, _, _ = load_with_bar(args)
        say_what_runs(model)
        with terminal.progress_bar("comparing") as bar:
            result = compare(model, f, progress=bar)
    above = args.max_kl is not None and not result.kl.mean() <= args.max_kl
    summary = result.summary() | {"arch": model.arch, "cache": model.cache_dtype}
    terminal.write(json.dumps(summary) + "\n" if args.json else table(result))
    if above:
        terminal.say(f"the mean KL is {result.kl.mean():.3g} nats, above {args.max_kl:g} (--max-kl)")
    return 1 if above else 0


def table(result: Comparison) -> str:
    """The comparison as text."""
    s = result.summary()
    n = s["windows"]
    lines = [f"{s['positions']:,} positions in {n} window{'s' * (n != 1)}, vocabulary {s['vocabulary']:,}", ""]
    lines.append(f"{'':22}{'mean':>10}{'median':>10}{'99 %':>10}{'max':>10}")
    for name, key in (("KL, nats", "kl_nats"), ("max error, sigma", "max_error_sigma")):
        lines.append(f"{name:22}" + "".join(f"{s[key][k]:10.2e}" for k in ("mean", "median", "p99", "max")))
    lines.append(f"{'same best token':22}{100 * s['top1_agreement']:8.2f} %")
    there, here = s["perplexity_there"], s["perplexity_here"]
    if there is not None and here is not None:
        difference = 100 * (here / there - 1)
        lines.append(f"{'perplexity':22}{here:10.4f} here, {there:.4f} there: {difference:+.4f} %")
    lines += ["", f"worst positions {'token':>8}{'KL':>10}{'error':>10}{'best here':>11}{'there':>8}"]
    for w in s["worst"]:
        lines.append(
            f"{w['position']:15,} {w['token']:8}{w['kl_nats']:10.2e}{w['max_error_sigma']:10.2e}"
            f"{w['best_here']:11}{w['best_there']:8}"
        )
    return "\n".join(lines) + "\n"
