"""Text to token ids and back, from what a GGUF file holds alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from .errors import ParameterError
from .pretokenizers import PRE_TOKENIZERS
from .spm import SPACE, SentencePiece
from .text import (
    END,
    MARKED,
    MARKED_WITH_MARKS,
    START,
    StreamDecoder,
    byte_chars,
    byte_values,
    unmark,
    without_surrogates,
)
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
        """Build the tokenizer of `gf`, an open :class:`tmla.gguf_file.GGUFFile`; GGUFError if none in it is sound."""
        return cls(read_vocabulary(gf))

    def _build_bpe(self, special: list[bool]) -> Any:
        pre = PRE_TOKENIZERS[self.vocab.pre]
        # Control tokens are out of reach of merging, so that user text cannot become one.
        ids = {text: i for i, text in enumerate(self.vocab.tokens) if not special[i]}
        self._missing = {b for b, char in enumerate(byte_chars()) if char not in ids} - _NEVER_IN_UTF8
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
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        return bos + self._encode_parts(self._parts(without_surrogates(text), special))

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of `text`, a rendered chat: BOS exactly once if the file wants it.

        Control tokens are read as such, but not in what :meth:`mark` has marked, which stays text.
        """
        parts: list[str | int] = []
        for i, piece in enumerate(MARKED.split(without_surrogates(text))):
            for part in self._parts(unmark(piece), special=i % 2 == 0):
                if isinstance(part, str) and parts and isinstance(parts[-1], str):
                    parts[-1] += part
                else:
                    parts.append(part)
        ids = self._encode_parts(parts)
        return ids if not self.add_bos or ids[:1] == [self.bos_id] else [self.bos_id, *ids]  # type: ignore[list-item]

    def mark(self, text: str) -> str:
        """Mark the control tokens in a user's `text`, so that :meth:`encode_marked` takes them as text."""
        text = unmark(text)
        for token, _, is_special in self._whole:
            if is_special and token in text:
                text = "".join(
                    piece if i % 2 else piece.replace(token, f"{START}{token}{END}")
                    for i, piece in enumerate(MARKED_WITH_MARKS.split(text))
                )
        return text

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a whole prompt: BOS exactly once if the file wants it, even if `text` brings its own.

        `special` as for :meth:`encode`.
        """
        ids = self.encode(text, add_bos=False, special=special)
        return ids if not self.add_bos or ids[:1] == [self.bos_id] else [self.bos_id, *ids]  # type: ignore[list-item]

    def _encode_parts(self, parts: list[str | int]) -> list[int]:
        """Ids of text and whole tokens in turn."""
        ids: list[int] = []
        prefix = self.vocab.add_space_prefix  # SentencePiece: before the text, and after every whole token
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                prefix = self.vocab.add_space_prefix
                continue
            if self._missing and (absent := self._missing.intersection(part.encode())):
                raise ParameterError(f"the text holds byte 0x{min(absent):02X}, for which the vocabulary has no token")
            ids += self._encode_plain(" " + part if prefix else part)
            prefix = False
        return ids

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
        values = byte_values()
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
