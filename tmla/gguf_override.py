"""Overrides of GGUF metadata: ``KEY=VALUE`` from a command line, and the types that a file's own value asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tmla.errors import GGUFError
from tmla.gguf_kind import quote, show

_INT = re.compile(r"[+-]?\d{1,40}", re.A)
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.A)
_TYPED = re.compile(r"(int|float|bool|str):(.*)", re.S)  # llama.cpp's --override-kv
_LAYOUT = re.compile(r"general\.alignment|split\..*")


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE`` and read the value.

    ``2`` is an int, ``0.5`` and ``1e-6`` floats, ``true`` and ``false`` booleans, ``[1, 2]`` a list, ``"2"`` and all
    else a string; llama.cpp's ``int:2``, ``float:2``, ``bool:true`` and ``str:2`` are understood.

    Raises
    ------
    GGUFError
        There is no ``=``, no key, or the value does not fit the type that its prefix names.
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise GGUFError(f"override {quote(text)} has no {'key' if equals else 'equals sign'}, expected KEY=VALUE")
    typed = _TYPED.fullmatch(value)
    if typed is None:
        return key, _parse(key, value)
    kind, value = typed.groups()
    if kind == "str":
        return key, value
    found = _parse(key, value.strip())
    if kind == "float" and type(found) is int:
        found = float(found)
    if type(found).__name__ != kind:
        raise GGUFError(f"override {quote(key)}: value {quote(value)} is no {kind}; write KEY={kind}:VALUE")
    return key, found


def _parse(key: str, value: str) -> Any:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if _INT.fullmatch(value):
        return int(value)
    if _FLOAT.fullmatch(value):
        return float(value)
    if value[:1] == "[" or (len(value) > 1 and value[0] == value[-1] == '"'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise GGUFError(f'override {quote(key)}: {quote(value)} is not valid JSON; put strings in "') from None
    return value


def apply_overrides(
    metadata: Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata with the overrides in it, and the overrides as they were applied.

    A value takes the type of the one it replaces where nothing is lost: 2 for a float key becomes 2.0, 2.0 for an
    integer key 2, "2" is read as a number, a number for a text key becomes text. New keys are taken as they are.

    Raises
    ------
    GGUFError
        The key describes the file's layout, or the value does not fit.
    """
    applied: dict[str, Any] = {}
    for key, value in (overrides or {}).items():
        if not isinstance(key, str) or not key:
            raise GGUFError(f"override key {quote(key)} is no text, expected a metadata key such as 'general.name'")
        if _LAYOUT.fullmatch(key):
            raise GGUFError(f"override {quote(key)}: the key describes the layout of the file and cannot be overridden")
        applied[key] = _coerce(key, _plain(key, value), metadata.get(key))
    return {**metadata, **applied}, applied


def _plain(key: str, value: Any) -> Any:
    """Python or NumPy value -> bool, int, float, str, list of str, or NumPy array."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str) or (isinstance(value, (int, float)) and -(2**63) <= value < 2**64):
        return value  # NaN, infinity and what fits no GGUF integer fail the comparison
    if isinstance(value, (list, tuple, np.ndarray)):
        items = [_plain(key, v) for v in value]
        if items and all(isinstance(v, str) for v in items):
            return items
        if items and all(isinstance(v, (bool, int, float)) and v < 2**63 for v in items):
            return np.array(items)
    raise GGUFError(
        f"override {quote(key)}: {show(repr(value))} of type {type(value).__name__}, "
        "expected a boolean, a finite number of at most 64 bits, text, or a list of numbers or of texts"
    )


def _coerce(key: str, value: Any, old: Any) -> Any:
    if old is None or type(value) is type(old):
        return value
    if isinstance(value, str) and not isinstance(old, list):
        value = _parse(key, value)
    if isinstance(old, str) and isinstance(value, (bool, int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(old, bool) and value in (0, 1) and isinstance(value, (int, float)):
        return bool(value)
    if isinstance(old, int) and not isinstance(old, bool) and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(old, float) and type(value) is int:
        return float(value)
    if type(value) is type(old) or (isinstance(old, (int, float)) and isinstance(value, np.ndarray)):
        return value  # numbers may become one per layer
    if isinstance(old, np.ndarray) and isinstance(value, (int, float)):
        return value  # and back: one for all layers
    raise GGUFError(
        f"override {quote(key)}: {show(repr(value))} does not fit, the file has {_kind(old)} there; give {_kind(old)}"
    )


def _kind(value: Any) -> str:
    if isinstance(value, (list, np.ndarray)):
        return "a list of texts" if isinstance(value, list) else "a list of numbers"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[type(value)]
