"""Text to token ids and back, from what a GGUF file holds alone."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from .errors import ParameterError
from .pretokenizers import PRE_TOKENIZERS
from .spm import SPACE, SentencePiece
from .vocabulary import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, read_vocabulary

_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


class Tokenizer:
    """Byte-level BPE or SentencePiece, with ids as llama.cpp gives them for the same file.

    Parameters
    ----------
    vocab : Vocabulary
        As :func:`tmla.vocabulary.read_vocabulary` returns it; usually through :meth:`from_gguf`.

    Attributes
    ----------
    n_vocab : int
        Tokens of the file's list. The logits may be wider (padded rows): :mod:`tmla.generate` cuts them to `n_vocab`,
        so a padding id is never sampled; :meth:`decode` refuses it.
    bos_id, eos_id, eot_id, pad_id : int or None
    add_bos : bool
        What the file asks of :meth:`encode`.
    end_ids : frozenset of int
        Every token that ends a turn: eos, eot, eom, and control tokens known to.
    unused_ids : np.ndarray, i64 [n]
        Ids inside the list that stand for nothing (type unused, and the padding token unless it ends turns too).
    """

    def __init__(self, vocab: Vocabulary):
        self.vocab = vocab
        self.n_vocab = len(vocab.tokens)
        self.bos_id, self.eos_id, self.eot_id, self.pad_id = vocab.bos_id, vocab.eos_id, vocab.eot_id, vocab.pad_id
        self.add_bos, self.end_ids = vocab.add_bos, vocab.end_ids
        unused = vocab.types == UNUSED
        if vocab.pad_id is not None:
            unused[vocab.pad_id] = True
        unused[list(vocab.end_ids)] = False
        self.unused_ids = np.flatnonzero(unused)

        self._special = np.isin(vocab.types, (UNKNOWN, CONTROL))
        self._is_whole = self._special | (vocab.types == USER_DEFINED)
        whole = np.flatnonzero(self._is_whole).tolist()
        whole.sort(key=lambda i: -len(vocab.tokens[i].encode()))  # the longest first, over the whole text
        self._whole = [(vocab.tokens[i], i, bool(self._special[i])) for i in whole]
        self._missing: set[int] = set()
        if vocab.model == "gpt2":
            self._encode_plain = self._build_bpe(self._special.tolist())
        else:
            self._encode_plain = SentencePiece(vocab).encode

    @classmethod
    def from_gguf(cls, gf: Any) -> Tokenizer:
        """Build the tokenizer of an open :class:`tmla.gguf_file.GGUFFile`; GGUFError if it has none that is sound."""
        return cls(read_vocabulary(gf))

    def _build_bpe(self, special: list[bool]) -> Any:
        pre = PRE_TOKENIZERS[self.vocab.pre]
        # Control tokens are out of reach of merging, so that user text cannot become one.
        ids = {text: i for i, text in enumerate(self.vocab.tokens) if not special[i]}
        self._missing = {b for b, char in enumerate(_byte_chars()) if char not in ids} - _NEVER_IN_UTF8
        bpe = tokenizers.Tokenizer(models.BPE(ids, self.vocab.merges, ignore_merges=pre.ignore_merges))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return lambda text: bpe.encode(text, add_special_tokens=False).ids

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        """Return the ids of `text`.

        Parameters
        ----------
        text : str
            Lone surrogates count as U+FFFD.
        add_bos : bool, optional
            Put BOS in front, even of a text that begins with it. Default: as the file says.
        special : bool
            Read ``<｜User｜>`` and the like as control tokens. Off, they are plain text, as user input must be.

        Raises
        ------
        ParameterError
            `text` is no str, BOS is wanted of a vocabulary without, or a byte of the text has no token.
        """
        if not isinstance(text, str):
            raise ParameterError(f"text is of type {type(text).__name__}, expected str; decode bytes first")
        add_bos = self.add_bos if add_bos is None else add_bos
        if add_bos and self.bos_id is None:
            raise ParameterError("add_bos was asked for, but the file names no BOS token; leave add_bos out")
        text = _without_surrogates(text)
        if self._missing and (absent := self._missing.intersection(text.encode())):
            raise ParameterError(f"the text holds byte 0x{min(absent):02X}, for which the vocabulary has no token")
        ids = [self.bos_id] if add_bos and self.bos_id is not None else []
        prefix = self.vocab.add_space_prefix  # SentencePiece: before the text, and after every control token
        for part in self._parts(text, special):
            if isinstance(part, int):
                ids.append(part)
                prefix = self.vocab.add_space_prefix
            else:
                ids += self._encode_plain(" " + part if prefix else part)
                prefix = False
        return ids

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a whole prompt: BOS exactly once if the file wants it, even if `text` brings its own."""
        ids = self.encode(text, add_bos=False, special=special)
        return ids if not self.add_bos or ids[:1] == [self.bos_id] else [self.bos_id, *ids]  # type: ignore[list-item]

    def _parts(self, text: str, special: bool) -> list[str | int]:
        """Cut out the tokens that are matched as a whole: user-defined ones always, control tokens if `special`."""
        parts: list[str | int] = [text] if text else []
        for token, i, is_special in self._whole:
            if (is_special and not special) or token not in text:
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                first, *rest = part.split(token)
                cut += [first] if first else []
                for piece in rest:
                    cut += [i, piece] if piece else [i]
            parts = cut
        return parts

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` stands for; of a control token, those of its name.

        Raises
        ------
        ParameterError
            `token` is outside the list, as a padding id of wider logits is.
        """
        if not 0 <= token < self.n_vocab:
            raise ParameterError(f"token id {token} is outside the vocabulary, expected 0 to {self.n_vocab - 1}")
        text, kind = self.vocab.tokens[token], self.vocab.types[token]
        if kind in (CONTROL, UNKNOWN, USER_DEFINED, UNUSED):
            return text.encode()
        if self.vocab.model == "llama":
            return bytes([int(text[3:5], 16)]) if kind == BYTE else text.replace(SPACE, " ").encode()
        values = _byte_values()
        return b"".join(bytes([values[c]]) if c in values else c.encode() for c in text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`; what is no UTF-8 becomes U+FFFD.

        Parameters
        ----------
        ids : iterable of int
        skip_special : bool
            Leave control tokens out.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def is_control(self, token: int) -> bool:
        """Say whether `token` is a control or unknown token, which plain text never becomes."""
        return 0 <= token < self.n_vocab and bool(self._special[token])

    def is_whole(self, token: int) -> bool:
        """Say whether `token` is matched as a whole, before any merging: control and user-defined tokens."""
        return 0 <= token < self.n_vocab and bool(self._is_whole[token])

    def stream(self, *, skip_special: bool = False, continues: bool = False) -> StreamDecoder:
        """Return a decoder for ids that come one by one.

        Parameters
        ----------
        skip_special : bool
            Leave control tokens out.
        continues : bool
            Other text stands before. Else the space is dropped that SentencePiece puts before a text.
        """
        return StreamDecoder(self, skip_special, self.vocab.add_space_prefix and not continues)


class StreamDecoder:
    """Turns ids into text without ever giving half a character; the pieces joined are :meth:`Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, drop_space: bool):
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
def _byte_chars() -> Sequence[str]:
    """GPT-2's printable stand-ins for the 256 bytes: itself where it prints, else one from U+0100 on."""
    chars = [chr(b) if b in {*range(33, 127), *range(161, 173), *range(174, 256)} else "" for b in range(256)]
    spare = iter(range(256, 512))
    return [c or chr(next(spare)) for c in chars]


@functools.cache
def _byte_values() -> dict[str, int]:
    return {char: b for b, char in enumerate(_byte_chars())}


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
