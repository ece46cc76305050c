"""A loaded model: the Python decode loop over layers."""

import os
import pathlib
import time
import weakref

import numpy as np
import taichi as ti

from tmla import bench_profile, config, layer, memory, runtime, state, weights
from tmla.errors import BackendError, ContextError, NumericsError
from tmla.plan import largest_cache, make_plan
from tmla.requantize import open_checked
from tmla.runtime import counter
from tmla.stages.argmax import NO_ID
from tmla.stages.attention_shape import MAX_LATENT
from tmla.stages.ffn_warps import MAX_THREADS
from tmla.tokenizer import Tokenizer
from tmla.upload import Writer


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

    def __init__(self, gf, cfg, tokenizer, caps, n_ctx, cache_dtype, progress=None):
        self.config, self.file, self.tokenizer, self.arch = cfg, gf, tokenizer, caps.arch
        self.load_s = 0.0
        self.n_ctx, self.n_past, self.cache_dtype = n_ctx, 0, cache_dtype
        plan = make_plan(cfg, n_ctx, cache_dtype, caps.layout)
        pools = [runtime.FieldPool() for _ in range(3)]
        self._free = weakref.finalize(self, _free_pools, pools)
        self._free.atexit = False
        weight_pool, cache_pool, scratch_pool = pools
        self._globals = weights.Globals(plan, cfg, weight_pool)
        self._globals.zero = scratch_pool.field(ti.i32, (1,))
        self.attention_banks = [
            weights.AttentionBank(p, cfg, cache_dtype, weight_pool, cache_pool) for p in plan.attention
        ]
        self.ffn_banks = [weights.FFNBank(p, cfg, weight_pool) for p in plan.ffn]
        self._state = state.State(cfg, n_ctx, caps, scratch_pool, min(cfg.n_vocab, tokenizer.n_vocab))
        for bank in self.ffn_banks:
            bank.hidden = self._state.hidden[bank.moe]
        banks = [self._globals, *self.attention_banks, *self.ffn_banks]
        writer = Writer([f for bank in banks for f in bank.fields] + [self._state.rope, self._state.scale])
        self._state.write_tables(writer)
        weights.load_weights(gf, banks, writer, progress)
        self._steps = layer.Steps(self._globals, self.attention_banks, self.ffn_banks, self._state)
        self._last_token = -1
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

    def decode_greedy(self, token: int, n: int) -> list[int]:
        """Feed `token` and go on greedily: the next `n` ids, read back at most every 64 tokens.

        Parameters
        ----------
        token : int
            Last token that was not fed yet.
        n : int
            Ids wanted. All but the last are fed too: :attr:`n_past` grows by `n`.

        Raises
        ------
        ContextError
            Fewer than `n` positions are free.
        """
        self._check([token] * n)
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
        return out

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

    def profile(self, n_tokens: int = 5) -> bench_profile.Profile:
        """Time each stage of a token at :attr:`n_past`, as :func:`tmla.bench_profile.profile` says; nothing is kept."""
        self._check([0])
        banks = (self._globals, self.attention_banks, self.ffn_banks)
        return bench_profile.profile(self.config, self._steps, banks, self._state, self.n_past, n_tokens)

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
        self._steps.begin(token, self.n_past)
        self._last_token = token
        self.n_past += 1
        self._steps.run_layers(self.n_past)
        if logits:
            self._steps.head()

    def _read_logits(self) -> np.ndarray:
        out = self._state.logits.to_numpy()[0]
        counter.readbacks += 1
        if not np.isfinite(out).all():
            self._raise_not_finite()
        return out

    def _raise_not_finite(self) -> None:
        """Find the first position and layer at fault: in the cache, else by decoding the last token layer by layer."""
        last = self.n_past - 1
        first = None
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


def check_limits(name: str, cfg, caps) -> None:
    """Refuse what the GPU kernels cannot cut to size; CPU kernels have no such limits.

    Raises
    ------
    BackendError
        The latent is wider than a block of threads covers, or a token's experts are more than a block has warps.
    """
    if not caps.gpu:
        return
    if cfg.kv_lora_rank > MAX_LATENT:
        raise BackendError(
            f"{name}: kv_lora_rank is {cfg.kv_lora_rank}, the GPU kernels take at most {MAX_LATENT}; use arch='cpu'"
        )
    if cfg.n_experts_used:
        segments = cfg.n_experts_used + -(-cfg.shared_ffn_dim // cfg.expert_ffn_dim)
        if segments * caps.lanes > MAX_THREADS:
            raise BackendError(
                f"{name}: {cfg.n_experts_used} experts and the shared ones make {segments} warps of {caps.lanes} "
                f"threads, the GPU kernels take at most {MAX_THREADS} threads; use arch='cpu'"
            )


def _free_pools(pools) -> None:
    for pool in pools:
        pool.destroy()


def demo_path() -> pathlib.Path:
    """The small trained model that the package carries: DeepSeek-V2's structure, 11 M parameters, old novels."""
    return pathlib.Path(__file__).parent / "data" / "demo.gguf"


def load(
    path: str | os.PathLike | None = None,
    *,
    arch: str | None = None,
    n_ctx: int | str = 4096,
    cache_dtype: str = "f16",
    overrides: dict | None = None,
    progress=None,
    threads: int | None = None,
    requantize: bool = False,
) -> Model:
    """Load a DeepSeek-style GGUF model.

    Parameters
    ----------
    path : str or os.PathLike, optional
        GGUF file, or any shard of one; matrices in Q8_0, vectors in F32, F16 or BF16. Default: the small trained model
        that the package carries (:func:`demo_path`).
    arch : {"metal", "cuda", "vulkan", "cpu"}, optional
        Backend. Default "metal" on macOS, else "cpu"; never replaced by another.
    n_ctx : int or "max"
        Positions the latent cache holds, ``L * (C + R)`` values each. "max": the trained context, or as much of it as
        fits the memory.
    cache_dtype : {"f16", "f32"}
        Storage of the cache; all arithmetic is f32.
    overrides : dict, optional
        Metadata keys to replace or add: ``{"deepseek2.expert_gating_func": 2}``.
    progress : callable, optional
        Called with (done_bytes, total_bytes) while weights are copied.
    threads : int, optional
        CPU threads; counts for the first model of a process.
    requantize : bool
        Accept matrices of other types and round them to Q8_0 while loading (:mod:`tmla.requantize`).

    Returns
    -------
    Model

    Raises
    ------
    GGUFError
        The file is damaged, a key or tensor is missing, a shape disagrees with the metadata, a type is not supported,
        or scales or norms are not finite.
    BackendError
        `arch` is not available (Taichi itself would fall back to CPU), another one runs already in this process, or
        memory does not suffice.
    """
    if cache_dtype not in ("f16", "f32"):
        raise BackendError(f"cache_dtype {cache_dtype!r} is unknown; expected 'f16' or 'f32'")
    start = time.perf_counter()
    path = demo_path() if path is None else path
    gf, cfg = open_checked(os.fspath(path), overrides=overrides, requantize=requantize)
    try:
        tokenizer = Tokenizer.from_gguf(gf)
        config.check_finite(gf, cfg)
        caps = runtime.init(arch, threads=threads)
        check_limits(gf.name, cfg, caps)
        model = Model(
            gf, cfg, tokenizer, caps, fit_n_ctx(gf.name, cfg, n_ctx, cache_dtype, caps), cache_dtype, progress
        )
    except BaseException:
        gf.close()
        raise
    model.load_s = time.perf_counter() - start
    return model


def fit_n_ctx(name: str, cfg, n_ctx: int | str, cache_dtype: str, caps) -> int:
    """Check that weights, cache and scratch fit the memory; resolve "max"."""
    plan = make_plan(cfg, 1, cache_dtype, caps.layout)
    per_position = cfg.n_layers * cfg.cache_row_bytes(cache_dtype) + state.table_bytes_per_position(cfg)
    available = memory.available_bytes() if caps.arch != "cuda" else None  # CUDA's own allocator answers for its memory
    limit = largest_cache(cfg, cache_dtype)
    if n_ctx == "max":
        fits = min(cfg.context_length, limit)
        if available is not None:
            fits = memory.largest_n_ctx(plan.weight_bytes, per_position, fits, available)
        n_ctx = max(1, fits)
    if not isinstance(n_ctx, int) or n_ctx < 1:
        raise ContextError(f"n_ctx is {n_ctx!r}, expected a positive number or 'max'")
    memory.check_fits(name, n_ctx, plan.weight_bytes, per_position, available)
    return n_ctx
