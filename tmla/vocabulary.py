"""Reads and checks the ``tokenizer.ggml.*`` keys of a GGUF file. Turns no text into ids."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import numpy as np

from .errors import GGUFError
from .gguf_kind import show
from .pretokenizers import PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

RECONVERT = "re-convert the model from its original files"

# Texts of tokens that end a turn in one model or another; a file's eos, eot and eom keys come on top.
END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    )
)
EOT_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "[EOT]", "<EOT>")  # where the eot key is absent


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says about its tokenizer, checked.

    Attributes
    ----------
    model, pre : str
        ``gpt2`` (byte-level BPE, with the name of its pre-tokenizer) or ``llama`` (SentencePiece, `pre` is empty).
    tokens : list of str
        Texts by id; byte-level ones as written in the file.
    types : np.ndarray, u8 [n_vocab]
        :data:`NORMAL` ... :data:`BYTE`; 0 is undefined.
    scores : np.ndarray, f32 [n_vocab]
        SentencePiece scores; empty for ``gpt2``.
    merges : list of (str, str)
        In order of rank; empty for ``llama``.
    bos_id, eos_id, eot_id, pad_id : int or None
    end_ids : frozenset of int
    add_bos, add_space_prefix : bool
    """

    model: str
    pre: str
    tokens: list[str]
    types: np.ndarray
    scores: np.ndarray
    merges: list[tuple[str, str]]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    pad_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_space_prefix: bool


def read_vocabulary(gf: Any) -> Vocabulary:
    """Read the tokenizer's keys of an open file (`gf.metadata`, `gf.name`).

    Raises
    ------
    GGUFError
        A key is missing or contradicts another, or the tokenizer is of a kind that tmla does not know.
    """
    keys = _Keys(gf)
    model = keys.text("model", None)
    if model not in ("gpt2", "llama"):
        raise keys.error("model", f"is {show(model)!r}", "gpt2 (byte-level BPE) or llama (SentencePiece)", RECONVERT)
    pre = keys.text("pre", "default") if model == "gpt2" else ""
    if model == "gpt2" and pre not in PRE_TOKENIZERS:
        raise keys.error(
            "pre",
            f"is {show(pre)!r}",
            f"one of {', '.join(sorted(PRE_TOKENIZERS))}",
            "give the one that cuts text the same way: --override tokenizer.ggml.pre=NAME",
        )
    tokens = _read_tokens(keys)
    types = _read_types(keys, len(tokens))
    index = {text: i for i, text in enumerate(tokens)}
    merges, named = _read_merges(keys, index) if model == "gpt2" else ([], set())
    scores = keys.numbers("scores", len(tokens), np.float32) if model == "llama" else np.zeros(0, np.float32)
    _mark_ends(types, index, named)
    if reached := [tokens[i] for i in np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN))) if tokens[i] in named]:
        raise keys.error("merges", f"make a control token, {show(reached[0])!r}", "only text", RECONVERT)

    bos_id, eos_id, eot_id, pad_id, eom_id = (
        keys.token_id(name, len(tokens)) for name in ("bos", "eos", "eot", "padding", "eom")
    )
    add_bos = keys.flag("add_bos_token", model == "llama" or PRE_TOKENIZERS[pre].add_bos)
    if add_bos and bos_id is None:
        raise keys.error(
            "bos_token_id",
            "is missing",
            "an id, for BOS is to be added",
            "give --override tokenizer.ggml.bos_token_id=ID or tokenizer.ggml.add_bos_token=false",
        )
    if eot_id is None:
        eot_id = next((index[t] for t in EOT_TEXTS if t in index and types[index[t]] == CONTROL), None)
    ends = {index[t] for t in END_TEXTS if t in index and types[index[t]] == CONTROL}
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        bos_id=bos_id,
        eos_id=eos_id,
        eot_id=eot_id,
        pad_id=pad_id,
        end_ids=frozenset(ends | {i for i in (eos_id, eot_id, eom_id) if i is not None}),
        add_bos=add_bos,
        add_space_prefix=keys.flag("add_space_prefix", model == "llama"),
    )


class _Keys:
    """Typed access to ``tokenizer.ggml.*``, with errors that name the file and the key."""

    def __init__(self, gf: Any):
        self.name, self.metadata = gf.name, gf.metadata

    def error(self, key: str, found: str, expected: str, remedy: str) -> GGUFError:
        return GGUFError(f"{show(self.name)}: tokenizer.ggml.{key} {found}, expected {expected}; {remedy}")

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def text(self, key: str, default: str | None) -> str:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "is missing" if value is None else "is no text", "a name", RECONVERT)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool | np.bool_):
            raise self.error(key, f"is {show(value)!r}", "true or false", f"give --override tokenizer.ggml.{key}=true")
        return bool(value)

    def token_id(self, name: str, n_vocab: int) -> int | None:
        key = f"{name}_token_id"
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < n_vocab:
            raise self.error(
                key, f"is {show(value)!r}", f"an id below {n_vocab}", f"give --override tokenizer.ggml.{key}=ID"
            )
        return int(value)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if value is None:
            raise self.error(key, "is missing", "a list of texts", RECONVERT)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.error(key, "is no list of texts", "a list of texts", RECONVERT)
        return value

    def numbers(self, key: str, n_vocab: int, dtype: Any) -> np.ndarray:
        value = self.get(key)
        if value is None:
            raise self.error(key, "is missing", f"{n_vocab} numbers", RECONVERT)
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iuf" or array.size != n_vocab:
            raise self.error(key, f"holds {array.size} values", f"{n_vocab} numbers, one a token", RECONVERT)
        return array.astype(dtype)


def _read_tokens(keys: _Keys) -> list[str]:
    tokens = list(keys.strings("tokens"))
    if not tokens:
        raise keys.error("tokens", "is empty", "at least one token", RECONVERT)
    for i, text in enumerate(tokens):
        if not text:
            tokens[i] = f"[EMPTY_{i}]"  # as llama.cpp names them
    if len(set(tokens)) < len(tokens):
        seen: dict[str, int] = {}
        i = next(i for i, text in enumerate(tokens) if seen.setdefault(text, i) != i)
        raise keys.error(
            "tokens", f"holds {show(tokens[i])!r} twice ({seen[tokens[i]]} and {i})", "each once", "re-convert"
        )
    return tokens


def _read_types(keys: _Keys, n_vocab: int) -> np.ndarray:
    if keys.get("token_type") is None:
        return np.full(n_vocab, NORMAL, np.uint8)
    types = keys.numbers("token_type", n_vocab, np.int64)
    if types.min() < 0 or types.max() > BYTE:
        i = int(np.flatnonzero((types < 0) | (types > BYTE))[0])
        raise keys.error("token_type", f"is {types[i]} for token {i}", "0 to 6", RECONVERT)
    return types.astype(np.uint8)


def _read_merges(keys: _Keys, index: dict[str, int]) -> tuple[list[tuple[str, str]], set[str]]:
    """Return the pairs by rank, and every token they name or make."""
    texts = keys.strings("merges")
    cuts = [text.find(" ", 1) for text in texts]
    merges = [(text[:cut], text[cut + 1 :]) for text, cut in zip(texts, cuts)]
    named = {left + right for left, right in merges}.union(*zip(*merges))
    if min(cuts, default=1) < 0 or not named <= index.keys():
        for rank, (cut, pair) in enumerate(zip(cuts, merges)):
            what = "has no space" if cut < 0 else "names a token that tokenizer.ggml.tokens lacks"
            if cut < 0 or not {*pair, "".join(pair)} <= index.keys():
                found = f"number {rank}, {show(texts[rank])!r}, {what}"
                raise keys.error("merges", found, "two tokens that make one", RECONVERT)
    return list(dict.fromkeys(merges)), named  # of a pair that comes twice, the first rank counts


def _mark_ends(types: np.ndarray, index: dict[str, int], named: set[str]) -> None:
    """Some converters forget to mark an end token as control. Text cannot make it, so it is nothing else."""
    for text in END_TEXTS:
        if text in index and text not in named and types[index[text]] in (0, NORMAL, USER_DEFINED):
            types[index[text]] = CONTROL
