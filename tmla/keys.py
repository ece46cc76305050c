"""Typed access to the metadata of one architecture: one message style for what is missing, odd or ambiguous."""

import math

import numpy as np

from tmla.errors import GGUFError
from tmla.gguf_kind import show

MAX_INT = 2**31 - 1  # no count or width of a model comes near; above it index arithmetic would overflow
MAX_NUMBER = 1e12  # nor any factor or base: their products and squares stay within f32


class Keys:
    """Reads ``{arch}.*`` keys of a file, whatever numeric type the converter chose.

    Parameters
    ----------
    gf : GGUFFile
        The open file; only ``name``, ``metadata`` and ``tensors`` are used.
    arch : str
        Prefix of the keys.

    Notes
    -----
    Integers may be stored as any integer type or as a float without fraction, flags as bool or 0/1, and either as an
    array per layer when all its elements agree. Everything assumed is appended to :attr:`notes`, one sentence each.
    """

    def __init__(self, gf, arch):
        self.gf = gf
        self.arch = arch
        self.notes = []

    def name(self, key):
        return f"{self.arch}.{key}"

    def has(self, key):
        return self.name(key) in self.gf.metadata

    def note(self, sentence):
        self.notes.append(sentence)

    def fail(self, message):
        raise GGUFError(f"{show(self.gf.name)}: {message}")

    def fail_key(self, key, found, expected, remedy="re-convert the model or pass an override for this key"):
        self.fail(f"key {self.name(key)!r} is {found}, expected {expected}; {remedy}")

    def integer(self, key, default=None, *, minimum=0, layers=None):
        """Return an integer key; `layers` picks those entries of an array that has one value per layer.

        Raises
        ------
        GGUFError
            The key is missing (and there is no default), not a whole number, below `minimum` or beyond 2**31 - 1.
        """
        value = self._scalar(key, default, layers)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, int):
            self.fail_key(key, _short(value), "a whole number")
        if not minimum <= value <= MAX_INT:
            self.fail_key(key, value, f"a whole number from {minimum} to {MAX_INT}")
        return value

    def number(self, key, default=None, *, minimum=-math.inf, above=-math.inf):
        """Return a real key as float: at least `minimum`, greater than `above`, and within 1e12 of zero."""
        value = self._scalar(key, default, None)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail_key(key, _short(value), "a number")
        if not (abs(value) <= MAX_NUMBER and value >= minimum and value > above):
            bound = f" from {minimum:g}" * (minimum > -math.inf) + f" above {above:g}" * (above > -math.inf)
            self.fail_key(key, _short(value), f"a number{bound} up to {MAX_NUMBER:g}")
        return float(value)

    def flag(self, key, default):
        """Return a boolean key; 0 and 1 count."""
        value = self._scalar(key, default, None)
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value)
        return self.fail_key(key, _short(value), "true or false")

    def text(self, key, default):
        value = self.gf.metadata.get(self.name(key), default)
        if not isinstance(value, str):
            self.fail_key(key, _short(value), "a string")
        return value

    def tensor(self, name):
        """Return the TensorInfo of a tensor that the configuration itself depends on."""
        info = self.gf.tensors.get(name)
        if info is None:
            self.fail(f"tensor {name!r} is missing, expected in every {self.arch} file; re-convert or download again")
        return info

    def _scalar(self, key, default, layers):
        value = self.gf.metadata.get(self.name(key), default)
        if value is None:
            self.fail(f"key {self.name(key)!r} is missing, expected in all such models; re-convert or pass an override")
        if isinstance(value, (np.ndarray, list, tuple)):
            entries = value
            if layers and max(layers) < len(entries):
                entries = [value[i] for i in layers]
            if not _all_equal(entries):
                self.fail_key(key, _short(value), "one value for all layers", "models that vary it are not supported")
            value = entries[0]
        return value.item() if isinstance(value, np.generic) else value


def _all_equal(entries):
    """Is it one value, or the same several times? An array may have millions of entries; a nested one is no value."""
    if isinstance(entries, np.ndarray):
        return entries.ndim == 1 and entries.size > 0 and bool((entries == entries[0]).all())
    if not entries or any(isinstance(entry, (np.ndarray, list, tuple)) for entry in entries):
        return False
    return all(entry == entries[0] for entry in entries)


def _short(value):
    """Return ``repr`` of a value, cut so that an error stays one readable line."""
    if isinstance(value, np.ndarray):
        value = value[:9].tolist()
    return show(repr(value))
