"""A loaded model: the Python decode loop over layers."""

import os
import time
import weakref

import numpy as np

from tmla import config, layer, runtime, state, weights
from tmla.errors import ContextError, NumericsError
from tmla.runtime import counter

MAX_SPLITS = {"cpu": 8}


class Model:
    """An MLA model in Taichi fields, with its cache. Made by :func:`load`.

    Attributes
    ----------
    config : MLAConfig
    tokenizer : Tokenizer
    arch : str
        Backend that runs.
    n_ctx, n_past : int
        Positions the cache holds, and positions filled.
    memory : dict
        Bytes: ``weights``, ``cache``, ``scratch``, ``total``.
    """

    def __init__(self, gf, cfg, caps, n_ctx, cache_dtype, progress=None):
        self.config, self.file, self.arch = cfg, gf, caps.arch
        self.n_ctx, self.n_past, self.cache_dtype = n_ctx, 0, cache_dtype
        plan = weights.make_plan(cfg, n_ctx, cache_dtype, caps.layout)
        pools = [runtime.FieldPool() for _ in range(3)]
        self._free = weakref.finalize(self, _free_pools, pools)
        self._free.atexit = False
        weight_pool, cache_pool, scratch_pool = pools
        self._globals = weights.Globals(plan, cfg, weight_pool)
        self._segments = [weights.Segment(p, cfg, weight_pool, cache_pool) for p in plan.segments]
        self._state = state.State(cfg, n_ctx, scratch_pool, MAX_SPLITS[caps.arch])
        weights.load_weights(gf, cfg, plan, self._segments, self._globals, progress)
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

        Returns
        -------
        numpy.ndarray, f32 [n_vocab]

        Raises
        ------
        ContextError
            The cache is full, or the token is not in the vocabulary.
        NumericsError
            Logits are not finite.
        """
        self._check([token])
        self._step(int(token))
        return self._read_logits()

    def prefill(self, tokens, all_logits: bool = False) -> np.ndarray:
        """Feed tokens and return the logits behind the last, or behind each.

        Parameters
        ----------
        tokens : sequence of int
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
        rows = []
        for token in tokens[:-1]:
            self._step(token, logits=all_logits)
            if all_logits:
                rows.append(self._read_logits())
        self._step(tokens[-1])
        last = self._read_logits()
        return np.stack([*rows, last]) if all_logits else last

    def reset(self) -> None:
        """Forget everything."""
        self.n_past = 0

    def rewind(self, n_past: int) -> None:
        """Forget everything from position `n_past` on.

        Raises
        ------
        ContextError
            `n_past` is not between 0 and the present :attr:`n_past`.
        """
        if not 0 <= n_past <= self.n_past:
            raise ContextError(f"cannot rewind to {n_past}: the cache holds {self.n_past} positions")
        self.n_past = n_past

    def _check(self, tokens) -> None:
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
        s = self._state
        layer.begin(self._globals, s, token, self.n_past)
        for seg in self._segments:
            for i in range(seg.n):
                layer.layer_fused(seg, s, i)
        counter.launches += 1 + self.config.n_layers
        if logits:
            layer.head(self._globals, s)
            counter.launches += 1
        self.n_past += 1

    def _read_logits(self) -> np.ndarray:
        out = self._state.logits.to_numpy()[0]
        counter.readbacks += 1
        if not np.isfinite(out).all():
            self._raise_not_finite()
        return out

    def _raise_not_finite(self) -> None:
        pos = self.n_past - 1
        raise NumericsError(f"logits are not finite at position {pos}")


def _free_pools(pools) -> None:
    for pool in pools:
        pool.destroy()


def load(path, *, arch=None, n_ctx=4096, cache_dtype="f16", overrides=None, progress=None, threads=None) -> Model:
    """Load a DeepSeek-style GGUF model."""
    gf, cfg = config.open_checked(os.fspath(path), overrides=overrides)
    config.check_finite(gf, cfg)
    caps = runtime.init(arch, threads=threads)
    start = time.perf_counter()
    model = Model(gf, cfg, caps, n_ctx, cache_dtype, progress)
    model.load_s = time.perf_counter() - start
    return model
