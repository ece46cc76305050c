"""A jinja2 sandbox that bounds time and memory, for templates from strangers.

jinja2's immutable sandbox keeps a template from attributes and files, but not from endless work. So every place where
a value is made reports its size here: operators, calls, filters, list displays, text, loop turns.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

SECONDS = 1.0  # a long conversation takes some 10 ms
MAX_NODES = 6_000  # parts of its syntax tree; compiling takes some 50 us each
MAX_SIZE = 50_000_000  # characters of all values that a template makes, and of any one operation's result
MAX_ITEMS = 200_000  # values inside one value
MAX_OUTPUT = 20_000_000  # characters printed
_ITEM = 100  # a list item or a dictionary entry counts as that many characters
_SLOW = ("pprint", "striptags", "title", "urlize", "wordwrap")  # Python loops over text; no use in a prompt
_OVER_ITEMS = frozenset(
    ("batch", "groupby", "join", "list", "map", "max", "min", "reject", "select", "slice", "sort", "sum", "unique")
)
_LONG_NUMBER = re.compile(r"\d{6}")


class _Undefined(jinja2.Undefined):
    @property
    def _was_none(self) -> bool:
        return self._undefined_name in getattr(self._undefined_obj, "none_keys", ())


class _Namespace(jinja2.utils.Namespace):
    def __init__(*args: Any, **kwargs: Any):  # so that an attribute may be called self
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # it may hold itself


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold the name {name!r}")


class _Generation(ext.Extension):
    """``{% generation %}`` marks answers for training; here it only encloses them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of one rendering, with its limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, undefined=_Undefined, extensions=[_Generation, ext.loopcontrols]
        )
        self.start_clock()
        self.made = self.printed = 0
        self.finalize = jinja2.pass_context(lambda context, value: self._print(value))
        self.globals = {name: self.globals[name] for name in ("range", "cycler", "joiner")}
        self.globals |= {
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }
        self.filters["tojson"] = _to_json
        self.filters = {name: self._guarded(name, f) for name, f in self.filters.items() if name not in _SLOW}
        self.filters |= {
            "_join": jinja2.pass_context(lambda context, parts: self._join(parts)),
            "_made": jinja2.pass_context(lambda context, value: self._made(value)),
            "_turns": jinja2.pass_context(lambda context, values: self._turns(values)),
            "_text": jinja2.pass_context(lambda context, text: text),
        }
        self.tests["none"] = lambda value: value is None or getattr(value, "_was_none", False) is True

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if (n_nodes := sum(1 for _ in tree.find_all(nodes.Node))) > MAX_NODES:
            raise jinja2.exceptions.SecurityError(f"it has {n_nodes} parts, expected at most {MAX_NODES}")
        return _Guard().visit(tree)

    def start_clock(self) -> None:
        """Give the template its time from now on (compiling has its own)."""
        self.deadline = time.monotonic() + SECONDS

    # What a template must not do

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute.startswith("__"):
            self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, str) and argument.startswith("__") and not isinstance(obj, dict):
            self.unsafe_undefined(obj, argument)
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise jinja2.exceptions.SecurityError(f"{attribute!r} is not for templates")

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        receiver = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        self._check_product(receiver, *args, *kwargs.values())
        if isinstance(receiver, str):
            self._check_widths(receiver)
        return self._made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self._limit(_weight(left) + _weight(right))
        elif isinstance(left, str) and operator == "%":
            self._check_product(left, right, *(right if isinstance(right, tuple) else ()))
            self._check_widths(left)
        elif operator in ("*", "**"):
            self._check_product(left, right)
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                self._limit(bits * (MAX_SIZE // 10_000))
        return self._made(super().call_binop(context, operator, left, right))

    # Limits

    def _limit(self, size: int) -> None:
        if size > MAX_SIZE:
            raise jinja2.exceptions.SecurityError("it makes values that are too big")
        if time.monotonic() > self.deadline:
            raise jinja2.exceptions.SecurityError(f"it took more than {SECONDS:g} s")

    def _made(self, value: Any) -> Any:
        """Charge a new value, without what it holds: that has been charged before."""
        self.made += 1 + (len(value) if isinstance(value, str) else _ITEM * len(value) if _is_container(value) else 0)
        self._limit(self.made)
        if _is_container(value):
            self._limit(_weight(value))
        return value

    def _check_product(self, *values: Any) -> None:
        """No operation makes more than its first operand's size times its biggest other operand's."""
        first, *others = [_weight(value, count=True) for value in values] or [0]
        self._limit(max(first, 1) * max([1, *others]))

    def _check_widths(self, form: str) -> None:
        if _LONG_NUMBER.search(form) and ("%" in form or "{" in form):
            raise jinja2.exceptions.SecurityError("it formats to a great width")

    def _print(self, value: Any) -> Any:
        self.printed += _weight(value)
        self._limit(0 if self.printed <= MAX_OUTPUT else self.printed + MAX_SIZE)
        return value

    def _join(self, parts: list[Any]) -> str:
        self._limit(sum(map(_weight, parts)))
        return self._made("".join(map(str, parts)))

    def _turns(self, values: Any) -> Any:
        """The values of a loop, with the clock watched at each turn."""
        return values if not values else _Turns(values, lambda: self._limit(0))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            values = [a for a in (*args, *kwargs.values()) if not isinstance(a, _INNER)]
            self._check_product(*values)
            if name in _OVER_ITEMS and values and isinstance(values[0], str):
                self._limit(_ITEM * len(values[0]))
            if name == "format":
                self._check_widths(str(values[0]))
            return self._made(function(*args, **kwargs))

        return guarded


_INNER = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)


class _Turns:
    """An iterable that calls `watch` at each step and has the length of the one it wraps."""

    def __init__(self, values: Any, watch: Callable[[], None]):
        self._values, self._watch = values, watch

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._watch()
            yield value

    def __len__(self) -> int:
        return len(self._values)


class _Guard(jinja2.visitor.NodeTransformer):
    """Puts a guard at every place of a syntax tree where a value is made, printed or looped over."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_turns")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_join")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Filter:
        return _filter(nodes.Const(node.data, lineno=node.lineno), "_text")  # else it would not pass `finalize`

    def _visit_display(self, node: Any) -> Any:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if is_target or _is_constant(node) else _filter(node, "_made")

    visit_List = visit_Tuple = visit_Dict = _visit_display


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Node) -> bool:
    return all(isinstance(child, nodes.Const | nodes.Pair) and _is_constant(child) for child in node.iter_child_nodes())


def _is_container(value: Any) -> bool:
    return isinstance(value, list | tuple | dict | set | frozenset)


def _weight(value: Any, count: bool = False) -> int:
    """Characters that a value would take in print, roughly; of a number, with `count`, itself (it may be a width)."""
    if isinstance(value, str):
        return len(value)
    if count and isinstance(value, int):
        return abs(value)
    total, waiting, n_seen = 10, [value], 0
    while waiting:
        inner = waiting.pop()
        n_seen += 1
        if n_seen > MAX_ITEMS:
            return MAX_SIZE + 1
        if isinstance(inner, str):
            total += len(inner)
        elif isinstance(inner, dict):
            total += _ITEM * len(inner)
            waiting += [*inner.keys(), *inner.values()]
        elif _is_container(inner):
            total += _ITEM * len(inner)
            waiting += inner
    return total


def _raise(message: Any) -> Any:
    raise jinja2.TemplateError(f"it says: {message}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
