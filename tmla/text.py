"""Bytes, marks and characters: the parts of the tokenizer that know no vocabulary."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Sequence
from typing import Any

START, END = "\ufdd0", "\ufdd1"  # noncharacters, which no text for interchange may hold
_MARK = re.compile(f"[{START}{END}]")
MARKED = re.compile(f"{START}([^{START}{END}]*){END}")
MARKED_WITH_MARKS = re.compile(f"({START}[^{START}{END}]*{END})")


class StreamDecoder:
    """Turns ids into text without ever giving half a character; the pieces joined are :meth:`Tokenizer.decode`."""

    def __init__(self, tokenizer: Any, skip_special: bool, drop_space: bool):
        self._tokenizer, self._skip_special, self._drop_space = tokenizer, skip_special, drop_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take one id, return the text that is complete with it (often none)."""
        data = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_whole(token):
            self._drop_space = self._tokenizer.vocab.add_space_prefix
            hidden = self._skip_special and self._tokenizer.is_control(token)
            return "" if hidden else self._utf8.decode(data)
        if self._drop_space:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


@functools.cache
def byte_chars() -> Sequence[str]:
    """GPT-2's printable stand-ins for the 256 bytes: itself where it prints, else one from U+0100 on."""
    chars = [chr(b) if b in {*range(33, 127), *range(161, 173), *range(174, 256)} else "" for b in range(256)]
    spare = iter(range(256, 512))
    return [c or chr(next(spare)) for c in chars]


@functools.cache
def byte_values() -> dict[str, int]:
    return {char: b for b, char in enumerate(byte_chars())}


def unmark(text: str) -> str:
    """Return a text without the marks of :meth:`Tokenizer.mark`."""
    return _MARK.sub("", text)


def without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
