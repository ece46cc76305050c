"""``tmla template``: the prompt that a chat template makes of messages."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from tmla import cli_terminal as terminal
from tmla.chat import ChatTemplate
from tmla.errors import ParameterError
from tmla.requantize import open_checked
from tmla.tokenizer import Tokenizer


def show_template(args: argparse.Namespace) -> int:
    """Print prompt and ids; return the exit code."""
    source = read_text(args.template) if args.template is not None else None
    messages, options = _read_messages(args.messages)
    gf, _ = open_checked(args.file, overrides=dict(args.override), requantize=True)  # no matrix is read
    with gf:
        template = ChatTemplate(Tokenizer.from_gguf(gf), gf.metadata, gf.name, source)
    prompt, ids = template.render(messages, **options), template.encode(messages, **options)
    if args.json:
        terminal.write(json.dumps({"prompt": prompt, "ids": ids}) + "\n")
        return 0
    out = terminal.ModelText()
    out.write(prompt)
    out.end()
    terminal.write(",".join(map(str, ids)) + "\n")
    return 0


def _read_messages(path: str) -> tuple[Any, dict[str, Any]]:
    """Messages, and the options of :meth:`tmla.chat.ChatTemplate.encode` that stand beside them."""
    try:
        data = json.loads(read_text(path))
    except ValueError as e:
        raise ParameterError(f"{path}: no valid JSON: {e}") from None
    if not isinstance(data, dict):
        return data, {}
    if "messages" not in data:
        raise ParameterError(f"{path}: the object has no 'messages', expected a list of messages there")
    return data.pop("messages"), data


def read_text(path: str) -> str:
    """Text of a file that the command line names, ``-`` for stdin.

    Raises
    ------
    ParameterError
        It cannot be read, or is not UTF-8.
    """
    try:
        return sys.stdin.read() if path == "-" else pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ParameterError(f"{path}: {(e.strerror or str(e)).lower()}") from None
    except UnicodeDecodeError as e:
        raise ParameterError(f"{path}: not valid UTF-8: {e.reason}; convert it first") from None
