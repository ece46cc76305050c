"""Small vocabularies as a GGUF file would hold them, without the file."""

import types

import numpy as np

from tmla.text import byte_chars
from tmla.tokenizer import Tokenizer


def gguf(**keys):
    """A stand-in for an open file: ``tokenizer.ggml.*`` keys, None leaves one out."""
    return types.SimpleNamespace(
        name="x.gguf", metadata={f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}
    )


def bpe_keys(**changes):
    tokens = [*byte_chars(), "th", "the", "Ġthe", "<bos>", "<eos>", "<think>", "<pad>", "[PAD8]"]
    keys = {
        "model": "gpt2",
        "pre": "deepseek-v3",
        "tokens": tokens,
        "token_type": [1] * 259 + [3, 3, 4, 3, 5],
        "merges": ["t h", "th e", "Ġ the"],
        "bos_token_id": 259,
        "eos_token_id": 260,
        "padding_token_id": 262,
        "add_bos_token": True,
    }
    return keys | changes


def bpe(**changes):
    return Tokenizer.from_gguf(gguf(**bpe_keys(**changes)))


def spm(**changes):
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "aa", "aaa", "é", "</s>x"]
    scores = [-9.0, -8.0, -8.0, -8.0, -1.0, -2.0, -3.0, -2.5, -5.0, -1.5, -1.5, -7.0, 0.0]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0.0] * 259 + scores, np.float32),
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Tokenizer.from_gguf(gguf(**(keys | changes)))
