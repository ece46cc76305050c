"""Batched prefill: a chunk of tokens through all layers, each weight read once for the whole chunk.

The stages in order, a kernel each; the counterpart of :mod:`tmla.layer` for many tokens. Attention is absorbed here as
there, so the compressed rows are all that is read of the past.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tmla.chunk_state import LOGIT_ROWS, MIN_TOKENS, ChunkState
from tmla.runtime import counter
from tmla.stages import chunk_attention, ffn_rows, matmul, route_rows, rows


def split(n: int, largest: int) -> list[int]:
    """Sizes of the chunks of a prompt of `n` tokens; a rest under MIN_TOKENS is left for single steps.

    >>> split(1100, 512)
    [512, 512, 76]
    """
    sizes = [largest] * (n // largest)
    rest = n % largest
    return [*sizes, rest] if rest >= MIN_TOKENS else sizes


def attention_rows(w: Any, i: int, c: ChunkState, s: Any, pos0: int, n: int, expand: bool | None = None) -> None:
    """MLA block of layer `i` for a chunk: ``x += W_o attention(norm(x))``; `expand` as for ``attend_rows``."""
    lay = i - w.first
    rows.norm_rows(c.x, w.attn_norm, lay, n, w.eps, c.xn)
    matmul.matmul_q8(w.proj_q, w.proj_d, lay, c.xn, n, c.strip, c.proj)
    if w.has_q_lora:
        rows.norm_rows(c.proj, w.q_a_norm, lay, n, w.eps, c.q_low)
        matmul.matmul_q8(w.q_b_q, w.q_b_d, lay, c.q_low, n, c.strip, c.q)
    rows.cache_rows(w, lay, c.proj, s.rope, pos0, n)
    rows.turn_queries(w, c.q, s.rope, s.scale, pos0, n)
    chunk_attention.attend_rows(w, lay, c.q, pos0, n, c.strip, c.attn, c.qa, c.mix, c.o, expand=expand)
    matmul.matmul_q8(w.attn_out_q, w.attn_out_d, lay, c.o, n, c.strip, c.x, scale=w.residual_scale, add=True)


def network_rows(w: Any, i: int, c: ChunkState, s: Any, n: int) -> None:
    """FFN of layer `i` for a chunk: ``x += FFN(norm(x))``."""
    lay = i - w.first
    rows.norm_rows(c.x, w.ffn_norm, lay, n, w.eps, c.xn)
    if w.moe:
        route_rows.route_rows(w, lay, c.xn, n, c.strip, s.route, c.groups)
    ffn_rows.ffn_rows(w, lay, c.xn, n, c.groups, c, c.x)


class Prefill:
    """The kernels of a chunk, bound to a model's fields.

    Parameters
    ----------
    globals_, attention_banks, ffn_banks, state
        As :class:`tmla.layer.Steps` takes them.
    chunk : ChunkState
    """

    def __init__(self, globals_: Any, attention_banks: list[Any], ffn_banks: list[Any], state: Any, chunk: ChunkState):
        self._g, self._s, self.chunk = globals_, state, chunk
        self._attention = [b for b in attention_banks for _ in range(b.n)]
        self._ffn = [b for b in ffn_banks for _ in range(b.n)]

    def run(self, tokens: list[int], pos0: int, *, expand: bool | None = None) -> None:
        """Take up to ``chunk.n_tokens`` tokens through all layers; their residuals are left in ``chunk.x``.

        `expand` chooses the form of attention (:func:`tmla.stages.chunk_attention.attend_rows`); by itself the chunk
        takes the one that needs fewer operations.
        """
        c, n = self.chunk, len(tokens)
        padded = np.zeros(c.n_tokens, np.int32)
        padded[:n] = tokens
        c.tokens.from_numpy(padded)
        rows.embed_rows(self._g.embd_q, self._g.embd_d, c.tokens, n, self._g.embd_scale, c.x)
        for i, (a, f) in enumerate(zip(self._attention, self._ffn)):
            attention_rows(a, i, c, self._s, pos0, n, expand)
            network_rows(f, i, c, self._s, n)
        counter.launches += 1

    def last_logits(self, n: int, head: Callable[[], None]) -> None:
        """Logits behind the last of the chunk's `n` tokens, into the state's; `head` launches the head."""
        rows.copy_rows(self.chunk.x, n - 1, 1, self._s.x)
        head()

    def logits(self, n: int) -> Iterator[np.ndarray]:
        """Logits behind each of the chunk's `n` tokens, f32 [up to LOGIT_ROWS, n_vocab] at a time."""
        c, g = self.chunk, self._g
        rows.norm_rows(c.x, g.out_norm, 0, n, g.eps, c.xn)
        for t in range(0, n, LOGIT_ROWS):
            part = min(LOGIT_ROWS, n - t)
            rows.copy_rows(c.xn, t, part, c.x_head)
            matmul.matmul_q8(g.head_q, g.head_d, 0, c.x_head, part, c.strip, c.logits, scale=g.logit_scale)
            yield c.logits.to_numpy()[:part]
