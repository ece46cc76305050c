"""The command line: ``tmla run``, ``chat``, ``info``, ``check``, ``template``, ``doctor`` and the measurements."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import tmla
from tmla import cli_bench, cli_compare, cli_perplexity, info, runtime
from tmla import cli_terminal as terminal
from tmla.doctor import TIMEOUT_S, default_archs
from tmla.errors import TmlaError
from tmla.gguf_file import parse_override
from tmla.limits import fit_n_ctx, foreseen_caps
from tmla.loading import demo_path
from tmla.requantize import open_checked

_EXIT_CODES = """exit codes:
  0    done (also when the context is full, and when Ctrl-D or /quit ends a chat)
  1    tmla check found an error above its tolerance, tmla compare a KL above --max-kl; tmla doctor a wrong result, a
       crash or a probe without end
  2    the command line, the file or the backend cannot be used; one line on stderr says why
  130  ended by Ctrl-C (while kernels compile by the signal itself, which a shell shows as 130)
  141  the reader of the output went away
"""
_DEFAULT_CTX = 4096
_DEMO = "no FILE given: this is the demo model that comes with tmla (11 M parameters, trained on public-domain text)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; default ``sys.argv[1:]``.

    Returns
    -------
    int
        Exit code: see the end of ``tmla --help``.
    """
    terminal.prepare_streams()
    try:
        args = _parser().parse_args(argv)
    except SystemExit as e:  # argparse has said why
        return int(e.code or 0)
    try:
        with terminal.logging_to_stderr(args.verbose):
            if args.file is None:
                args.file = str(demo_path())
                terminal.say(_DEMO)
            code: int = args.command(args)
            sys.stdout.flush()
        return code
    except TmlaError as e:
        return _fail(str(e))
    except BrokenPipeError:
        terminal.drop_stdout()
        return 141
    except KeyboardInterrupt:
        if argv is None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C does not wait for the interpreter's end
        return 130


def _fail(message: str) -> int:
    terminal.say("error: " + " ".join(message.split()))
    return 2


def _run(args: argparse.Namespace) -> int:
    from tmla.cli_run import run

    return run(args)


def _info(args: argparse.Namespace) -> int:
    from tmla.cli_run import say_requantized

    say_requantized(args)
    gf, cfg = open_checked(args.file, overrides=dict(args.override), requantize=args.requantize)
    with gf:
        n_ctx = args.n_ctx
        if n_ctx == "max":
            n_ctx = fit_n_ctx(gf.name, cfg, n_ctx, args.cache, foreseen_caps())
        described = info.describe(gf, cfg, n_ctx, args.cache)
    terminal.write((json.dumps(described, indent=2) if args.json else info.text(described)) + "\n")
    return 0


def _check(args: argparse.Namespace) -> int:
    from tmla.cli_check import check
    from tmla.cli_run import say_requantized

    say_requantized(args)
    return check(args)


def _chat(args: argparse.Namespace) -> int:
    from tmla.cli_chat import chat

    return chat(args)


def _template(args: argparse.Namespace) -> int:
    from tmla.cli_template import show_template

    return show_template(args)


def _perplexity(args: argparse.Namespace) -> int:
    return cli_perplexity.measure(args)


def _compare(args: argparse.Namespace) -> int:
    return cli_compare.compare_logits(args)


def _doctor(args: argparse.Namespace) -> int:
    from tmla.cli_doctor import run

    return run(args)


def _completion(args: argparse.Namespace) -> int:
    from tmla.cli_completion import completion

    return completion(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tmla",
        description="Run DeepSeek-style models (Multi-head Latent Attention) from Q8_0 GGUF files with Taichi kernels.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tmla {tmla.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    p = _command(commands, "run", _run, "generate text from a prompt")
    _add_backend(p)
    _add_context(p)
    _add_requantize(p)
    prompt = p.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue; - reads it from stdin")
    prompt.add_argument("--tokens", type=_ids, metavar="1,2,3", help="ids to continue, fed as they are")
    p.add_argument("-n", type=_at_least(-1), default=256, metavar="N", help="tokens to choose, -1 until the end (256)")
    _add_sampling(p, temperature=0.0, top_p=1.0)
    p.add_argument("--special", action="store_true", help="read control tokens in the prompt's text as such")
    p.add_argument("--ignore-eos", action="store_true", help="never choose a token that ends the turn")
    p.add_argument("--ids", action="store_true", help="print ids instead of text")
    p.add_argument(
        "--prompt-cache",
        metavar="FILE",
        help="begin with what FILE holds of this prompt, if it is there, and save tokens and cache in it at the end",
    )

    p = _command(commands, "chat", _chat, "talk with a model through its own chat template; /help lists what it knows")
    _add_backend(p)
    _add_context(p)
    _add_requantize(p)
    p.add_argument("-n", type=_at_least(-1), default=-1, metavar="N", help="tokens of an answer, -1 until its end (-1)")
    _add_sampling(p, temperature=0.7, top_p=0.95)
    p.add_argument("--system", metavar="TEXT", help="system message")
    _add_template(p).add_argument(
        "--raw", action="store_true", help="no template: continue what was said as plain text"
    )

    p = _command(commands, "info", _info, "say what is in a file and what it will take; reads no weights")
    _add_context(p)
    _add_requantize(p)
    p.add_argument("--json", action="store_true", help="as JSON")

    p = _command(commands, "check", _check, "compare every stage and the whole model with NumPy references")
    _add_backend(p)
    _add_requantize(p)
    p.add_argument(
        "--tokens", type=_at_least(2), metavar="N", help="prompt length (8, or fewer where the reference takes long)"
    )

    p = _command(
        commands, "template", _template, "print the prompt that a chat template makes of messages, and its ids"
    )
    p.add_argument(
        "--messages",
        required=True,
        metavar="FILE.json",
        help="list of messages, or an object with messages, tools and variables of the template; - reads stdin",
    )
    _add_template(p)
    p.add_argument("--json", action="store_true", help="prompt and ids as JSON")
    _add_measurements(commands)

    p = _bare_command(commands, "doctor", _doctor, "find out what this machine's backends can do; a report to paste")
    p.set_defaults(file="")
    p.add_argument(
        "--arch", nargs="+", choices=runtime.ARCHS, help=f"backends to examine ({' '.join(default_archs())} here)"
    )
    p.add_argument(
        "--timeout", type=_at_least(1), default=int(TIMEOUT_S), metavar="S", help=f"seconds of a probe ({TIMEOUT_S:g})"
    )
    p.add_argument("--json", action="store_true", help="as JSON")
    p = commands.add_parser("completion", help="print a script that completes tmla's arguments in a shell")
    p.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")
    p.set_defaults(command=_completion, name="completion", file="", verbose=0, parser=parser)
    return parser


def _add_measurements(commands: Any) -> None:
    p = _command(commands, "perplexity", _perplexity, "measure how well a model foresees a text")
    p.description = cli_perplexity.DESCRIPTION
    p.add_argument("text", metavar="TEXT", help="file with the text, UTF-8; - reads stdin")
    p.add_argument("--ctx", dest="n_ctx", type=_at_least(2), default=512, metavar="N", help="tokens of a window (512)")
    p.add_argument("--stride", type=_at_least(1), metavar="N", help="tokens between two windows' beginnings (ctx / 2)")
    p.add_argument("--halves", action="store_true", help="score as llama.cpp's llama-perplexity does")
    p.add_argument("--dump", metavar="FILE.npz", help="write tokens and logits of all windows, for tmla compare")
    _add_measurement_options(p)

    p = _command(commands, "compare", _compare, "compare a model's logits with another engine's")
    p.description = cli_compare.DESCRIPTION
    p.add_argument("--logits", required=True, metavar="FILE.npz", help="tokens and logits of the other engine")
    p.add_argument("--max-kl", type=float, metavar="X", help="exit with 1 if the mean KL is above X nats")
    _add_measurement_options(p)

    p = _command(commands, "bench", cli_bench.bench, "measure speed, with llama-bench's columns; or every stage's time")
    _add_backend(p)
    cli_bench.add_arguments(p)


def _add_measurement_options(p: argparse.ArgumentParser) -> None:
    _add_backend(p)
    _add_cache(p)
    _add_requantize(p)
    p.add_argument("--json", action="store_true", help="as JSON")


def _bare_command(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    p: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.set_defaults(command=function, name=name)
    p.add_argument("-v", "--verbose", action="count", default=0, help="log what is done to stderr; twice for details")
    return p


def _command(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    p = _bare_command(commands, name, function, text)
    p.add_argument("file", nargs="?", metavar="FILE", help="GGUF file, or any shard of one (demo model)")
    p.add_argument(
        "--override",
        type=_override,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a metadata key of the file; may be repeated",
    )
    return p


def _add_backend(p: argparse.ArgumentParser) -> None:
    default = runtime.default_arch()
    p.add_argument("--arch", choices=runtime.ARCHS, help=f"backend ({default} here); never replaced by another")
    p.add_argument("--threads", type=_at_least(1), metavar="N", help="CPU threads (all cores)")


def _add_context(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--ctx",
        dest="n_ctx",
        type=_context,
        default=_DEFAULT_CTX,
        metavar="N|max",
        help=f"tokens the cache holds; max: as many as were trained and fit the memory ({_DEFAULT_CTX})",
    )
    _add_cache(p)


def _add_cache(p: argparse.ArgumentParser) -> None:
    p.add_argument("--cache", choices=("f16", "f32"), default="f16", help="storage of the cache (f16)")


def _add_sampling(p: argparse.ArgumentParser, temperature: float, top_p: float) -> None:
    p.add_argument(
        "--temp",
        type=float,
        default=temperature,
        metavar="T",
        help=f"temperature; 0 takes the best token ({temperature:g})",
    )
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K best tokens, 0 all (0)")
    p.add_argument(
        "--top-p", type=float, default=top_p, metavar="P", help=f"keep the best tokens that hold P ({top_p:g})"
    )
    p.add_argument("--min-p", type=float, default=0.0, metavar="P", help="keep tokens at least P times the best (0)")
    p.add_argument("--seed", type=_at_least(0), metavar="N", help="of the random choice")
    p.add_argument("--stop", action="append", default=[], metavar="S", help="end before this text; may be repeated")


def _add_requantize(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--requantize", action="store_true", help="accept matrices of other types and round them to Q8_0, with a report"
    )


def _add_template(p: argparse.ArgumentParser) -> Any:
    group = p.add_mutually_exclusive_group()
    group.add_argument("--template", metavar="FILE", help="jinja2 template in place of the file's")
    return group


def _at_least(minimum: int) -> Any:
    def number(text: str) -> int:
        value = _whole(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is too small, expected {minimum} or more")
        return value

    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _context(text: str) -> int | str:
    return text if text == "max" else _at_least(1)(text)


def _ids(text: str) -> list[int]:
    return [_at_least(0)(part.strip()) for part in text.split(",") if part.strip()]


def _override(text: str) -> tuple[str, Any]:
    try:
        return parse_override(text)
    except TmlaError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
