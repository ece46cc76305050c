"""Renders the chat template of a model file: a small program from strangers, on plain data alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2

from .errors import TemplateError
from .sandbox import BoundedEnvironment

MAX_SOURCE = 1 << 16  # characters of a template; real ones have under 30,000

_FAILURES = (  # what a template can raise: its own mistakes, and limits of Python that it ran into
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render a chat template as `transformers` does.

    Parameters
    ----------
    source : str
        The template.
    variables : dict
        What it sees beside ``raise_exception``, ``strftime_now``, ``namespace`` and the like. Only plain data gets
        through. Entries of ``messages`` that are None are left out, but still pass the test ``is none``.

    Raises
    ------
    TemplateError
        The template is no valid one, fails, calls ``raise_exception``, reaches for what it must not have, or takes
        more time or memory than :mod:`tmla.sandbox` grants. The message has one line and says where.
    """
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"the chat template has {len(source)} characters, expected at most {MAX_SOURCE}")
    environment = BoundedEnvironment()
    try:
        template = environment.from_string(source)
        environment.start_clock()
        data = {name: _plain(value) for name, value in variables.items()}
        data["messages"] = [_Message(message) for message in data.get("messages", ())]
        return "".join(template.generate(data))
    except _FAILURES as e:
        raise TemplateError(f"the chat template failed{_line(e)}: {_reason(e)}") from e


def _line(error: BaseException) -> str:
    line, step = getattr(error, "lineno", None), error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == "<template>":
            line = step.tb_lineno
        step = step.tb_next
    return f" in line {line}" if line else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself too deeply"
    if isinstance(error, MemoryError):
        return "it ran out of memory"
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"


class _Message(dict[str, Any]):
    """A message without its None entries, whose names it remembers."""

    def __init__(self, entries: Mapping[str, Any]):
        super().__init__({key: value for key, value in entries.items() if value is not None})
        self.none_keys = frozenset(entries) - frozenset(self)


def _plain(value: Any) -> Any:
    """Copy of plain types alone; anything else becomes its type's name, so that no method of it can be called."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return f"<{type(value).__name__}>"
