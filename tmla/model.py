"""A loaded model: the Python decode loop over layers."""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import taichi as ti

from tmla import bench_profile, chunk_state, config, layer, prefill, runtime, state, weights
from tmla.errors import ContextError, NumericsError
from tmla.fields import FieldPool
from tmla.gguf_file import GGUFFile
from tmla.plan import make_plan
from tmla.runtime import counter
from tmla.saved_state import KeepsTokens
from tmla.stages.argmax import NO_ID
from tmla.tokenizer import Tokenizer
from tmla.upload import Writer

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # called with bytes done and bytes in all


class Model(KeepsTokens):
    """An MLA model in Taichi fields, with its cache. Made by :func:`tmla.load`.

    Attributes
    ----------
    config : MLAConfig
        Architecture, as read from the file.
    file : GGUFFile
        The open file: metadata, tensors, notes.
    tokenizer : Tokenizer
        Built from the file alone.
    arch : str
        Backend that runs.
    n_ctx, n_past : int
        Positions the cache holds, and positions filled.
    cache_dtype : {"f16", "f32"}
        Storage of the cache.
    memory : dict of str to int
        Bytes: ``weights``, ``cache``, ``scratch``, ``total``.
    load_s : float
        Seconds that loading took, compilation included.
    """

    def __init__(
        self,
        gf: GGUFFile,
        cfg: config.MLAConfig,
        tokenizer: Tokenizer,
        caps: runtime.Caps,
        n_ctx: int,
        cache_dtype: str,
        progress: Progress | None = None,
    ):
        self.config, self.file, self.tokenizer, self.arch = cfg, gf, tokenizer, caps.arch
        self.load_s = 0.0
        self.n_ctx, self.n_past, self.cache_dtype = n_ctx, 0, cache_dtype
        plan = make_plan(cfg, n_ctx, cache_dtype, caps.layout, promised=caps.max_buffer)
        pools = [FieldPool() for _ in range(3)]
        self._free = weakref.finalize(self, _free_pools, pools)
        self._free.atexit = False
        weight_pool, cache_pool, scratch_pool = pools
        self._globals: Any = weights.Globals(plan, cfg, weight_pool)
        self._globals.zero = scratch_pool.field(ti.i32, (1,))
        self.attention_banks = [
            weights.AttentionBank(p, cfg, cache_dtype, weight_pool, cache_pool) for p in plan.attention
        ]
        self.ffn_banks: list[Any] = [weights.FFNBank(p, cfg, weight_pool) for p in plan.ffn]
        self._state = state.State(cfg, n_ctx, caps, scratch_pool, min(cfg.n_vocab, tokenizer.n_vocab))
        chunk = chunk_state.ChunkState(cfg, n_ctx, caps, scratch_pool)
        for bank in self.ffn_banks:
            bank.hidden = self._state.hidden[bank.moe]
        banks: list[Any] = [self._globals, *self.attention_banks, *self.ffn_banks]
        writer = Writer([f for bank in banks for f in bank.fields] + [self._state.rope, self._state.scale])
        self._state.write_tables(writer)
        weights.load_weights(gf, banks, writer, progress)
        for bank in banks[1:]:
            log.debug(
                "%s: layers %d to %d, %s",
                type(bank).__name__,
                bank.first,
                bank.first + bank.n - 1,
                ", ".join(bank.roles),
            )
        self._steps = layer.Steps(self._globals, self.attention_banks, self.ffn_banks, self._state)
        self._prefill = prefill.Prefill(self._globals, self.attention_banks, self.ffn_banks, self._state, chunk)
        self._last_token, self._fed = -1, np.full(n_ctx, -1, np.int32)
        self.memory = {
            "weights": weight_pool.n_bytes,
            "cache": cache_pool.n_bytes,
            "scratch": scratch_pool.n_bytes,
            "total": sum(p.n_bytes for p in pools),
        }

    def decode(self, token: int) -> np.ndarray:
        """Feed one token and return the logits of the next.

        Parameters
        ----------
        token : int
            ``0 <= token < config.n_vocab``.

        Returns
        -------
        numpy.ndarray, f32 [n_vocab]
            A copy on the host.

        Raises
        ------
        ContextError
            The cache is full, or the token is not in the vocabulary.
        NumericsError
            Logits are not finite.
        """
        self._check([token])
        self._note([token])
        self._step(int(token))
        return self._read_logits()

    def prefill(self, tokens: Iterable[int], all_logits: bool = False) -> np.ndarray:
        """Feed tokens and return the logits behind the last, or behind each.

        Parameters
        ----------
        tokens : iterable of int
            At least one; nothing is added.
        all_logits : bool

        Returns
        -------
        numpy.ndarray, f32 [n_vocab], or [T, n_vocab] with `all_logits`

        Raises
        ------
        ContextError, NumericsError
            As :meth:`decode`; the context is checked before any work.
        """
        tokens = [int(t) for t in tokens]
        self._check(tokens)
        self._note(tokens)
        rows: list[np.ndarray] = []
        done = 0
        for n in prefill.split(len(tokens), self._prefill.chunk.n_tokens):
            self._prefill.run(tokens[done : done + n], self.n_past)
            done += n
            self.n_past += n
            self._last_token = tokens[done - 1]
            if all_logits:
                rows += [self._finite(part) for part in self._prefill.logits(n)]
            elif done == len(tokens):
                self._prefill.last_logits(n, self._steps.head)
                rows.append(self._read_logits())
        for i in range(done, len(tokens)):
            last = i == len(tokens) - 1
            self._step(tokens[i], logits=all_logits or last)
            if all_logits or last:
                rows.append(self._read_logits())
        return np.vstack(rows) if all_logits else rows[-1]

    def decode_greedy(self, token: int, n: int) -> list[int]:
        """Feed `token` and go on greedily: the next `n` ids, read back at most every 64 tokens.

        Parameters
        ----------
        token : int
            Last token that was not fed yet.
        n : int
            Ids wanted. All but the last are fed too: :attr:`n_past` grows by `n`.

        Returns
        -------
        list of int
            The choices. Of equal logits the lowest id wins; ids beyond the tokenizer's are never chosen.

        Raises
        ------
        ContextError
            Fewer than `n` positions are free.
        NumericsError
            Logits are not finite; :attr:`n_past` is put back to the token at fault.
        """
        self._check([token] * n)
        self._note([token] + [-1] * (n - 1))  # what follows is not known before it is read back
        out: list[int] = []
        self._step(int(token))
        while len(out) < n:
            run = min(n - len(out), state.MAX_CHOSEN)
            self._state.step[0] = 0
            for i in range(run):
                self._steps.advance()
                if len(out) + i + 1 < n:
                    self.n_past += 1
                    self._steps.run_layers(self.n_past)
                    self._steps.head()
            out += self._state.chosen.to_numpy()[:run].tolist()
            counter.readbacks += 1
            if max(out) == NO_ID:
                self._last_token = ([int(token), *out])[out.index(NO_ID)]
                self.n_past -= len(out) - 1 - out.index(NO_ID)
                self._raise_not_finite()
        self._last_token = out[-2] if n > 1 else int(token)
        self._fed[self.n_past - n + 1 : self.n_past] = out[:-1]
        return out

    def reset(self) -> None:
        """Forget everything: :attr:`n_past` becomes 0."""
        self.n_past = 0

    def rewind(self, n_past: int) -> None:
        """Forget everything from position `n_past` on; costs nothing, rows before it stay valid.

        Raises
        ------
        ContextError
            `n_past` is not between 0 and the present :attr:`n_past`.
        """
        if not 0 <= n_past <= self.n_past:
            raise ContextError(f"cannot rewind to {n_past}: the cache holds {self.n_past} positions")
        self.n_past = n_past

    def profile(self, n_tokens: int = 5) -> bench_profile.Profile:
        """Time each stage of `n_tokens` tokens at :attr:`n_past` (:mod:`tmla.bench_profile`); nothing is kept."""
        self._check([0])
        banks = (self._globals, self.attention_banks, self.ffn_banks)
        return bench_profile.profile(self.config, self._steps, banks, self._state, self.n_past, n_tokens)

    def _check(self, tokens: list[int]) -> None:
        if not tokens:
            raise ContextError("no tokens were given, expected at least one")
        room = self.n_ctx - self.n_past
        if len(tokens) > room:
            raise ContextError(
                f"{len(tokens)} tokens were given, but the context of {self.n_ctx} has room for {room}; "
                "load with a larger n_ctx, or reset() or rewind() first"
            )
        n_vocab = self.config.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise ContextError(f"token {token} is not in the vocabulary, expected 0 <= token < {n_vocab}")

    def _step(self, token: int, logits: bool = True) -> None:
        """Decode one token; its logits stay on the device."""
        self._steps.begin(token, self.n_past)
        self._last_token = token
        self.n_past += 1
        self._steps.run_layers(self.n_past)
        if logits:
            self._steps.head()

    def _read_logits(self) -> np.ndarray:
        return self._finite(self._state.logits.to_numpy()[0])

    def _finite(self, logits: np.ndarray) -> np.ndarray:
        counter.readbacks += 1
        if not np.isfinite(logits).all():
            self._raise_not_finite()
        return logits

    def _raise_not_finite(self) -> None:
        """Find the first position and layer at fault: in the cache, else by decoding the last token layer by layer."""
        last = self.n_past - 1
        first: tuple[int, int | None] | None = None
        for bank in self.attention_banks:
            bad = ~np.isfinite(bank.cache_rows(self.n_past)).all(axis=2)
            for i, row in enumerate(bad):
                if row.any() and (first is None or int(np.argmax(row)) < first[0]):
                    first = (int(np.argmax(row)), bank.first + i)
        if first is None or first[0] == last:
            first = (last, self._first_layer_not_finite(last))
        where = f"layer {first[1]}" if first[1] is not None else "the head"
        raise NumericsError(
            f"{self.file.name}: logits are not finite: the first fault is at position {first[0]}, in {where}; if the "
            "file is sound (tmla check), values may exceed f16: load with cache_dtype='f32'"
        )

    def _first_layer_not_finite(self, pos: int) -> int | None:
        self._steps.begin(self._last_token, pos)
        for i in range(self.config.n_layers):
            self._steps.run_layer(i, pos + 1)
            if not np.isfinite(self._state.x.to_numpy()).all():
                return i
        return None


def _free_pools(pools: list[FieldPool]) -> None:
    for pool in pools:
        pool.destroy()
