"""``tmla completion``: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse

from tmla import cli_terminal as terminal
from tmla.errors import ParameterError


def completion(args: argparse.Namespace) -> int:
    """Print the script for a shell, made by shtab from the parser itself; return the exit code.

    Raises
    ------
    ParameterError
        shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise ParameterError("completion needs the package shtab; pip install 'tmla[completion]'") from None
    _complete_files(args.parser, shtab.FILE)
    terminal.write(shtab.complete(args.parser, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, how: object) -> None:
    """Mark every argument that is a file, those of the commands too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, how)
        elif isinstance(action.metavar, str) and action.metavar.startswith("FILE"):
            action.complete = how  # type: ignore[attr-defined]
