"""What a model asks of a machine: kernels that can be cut to its shapes, and memory for weights, cache and scratch."""

import os
from typing import Any

import taichi as ti

from tmla import chunk_state, memory, runtime, state
from tmla.config import MLAConfig
from tmla.errors import BackendError, ContextError
from tmla.fields import MAX_FIELD, FieldCounter
from tmla.plan import largest_cache, make_plan
from tmla.stages.attention_shape import MAX_LATENT
from tmla.stages.ffn_warps import MAX_THREADS


def check_limits(name: str, cfg: MLAConfig, caps: runtime.Caps) -> None:
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


def foreseen_caps(arch: str | None = None) -> runtime.Caps:
    """Return what sizes depend on, for a backend that need not run yet: then all cores, or 32 lanes."""
    arch = arch or runtime.default_arch()
    running = runtime.running()
    if running is not None and running.arch == arch:
        return running
    if arch == "cpu":
        return runtime.Caps(arch, "none", 1, "bytes", False, os.cpu_count() or 1)
    return runtime.Caps(arch, "warp" if arch == "cuda" else "subgroup", 32, "words", False)


def scratch_bytes(cfg: MLAConfig, n_ctx: int, caps: runtime.Caps) -> int:
    """Bytes of all that is neither weights nor cache: activations of a token and of a chunk, and tables."""
    pool: Any = FieldCounter()
    pool.field(ti.i32, (1,))  # Globals.zero
    state.State(cfg, n_ctx, caps, pool, cfg.n_vocab)
    chunk_state.ChunkState(cfg, n_ctx, caps, pool)
    return pool.n_bytes


def fit_n_ctx(name: str, cfg: MLAConfig, n_ctx: int | str, cache_dtype: str, caps: runtime.Caps) -> int:
    """Check that weights, cache and scratch fit the memory; resolve "max".

    Returns
    -------
    int
        Positions that the cache is to hold.

    Raises
    ------
    BackendError
        Memory does not suffice; the message says what would fit.
    ContextError
        `n_ctx` is no positive number.
    """
    plan = make_plan(cfg, 1, cache_dtype, caps.layout)

    def planned(n: int) -> int:
        return plan.weight_bytes + n * plan.cache_bytes + scratch_bytes(cfg, n, caps)

    available = memory.available_bytes() if caps.arch != "cuda" else None  # CUDA's own allocator answers for its memory
    limit = largest_cache(cfg, cache_dtype, min(MAX_FIELD, caps.max_buffer or MAX_FIELD))
    if n_ctx == "max":
        fits = min(cfg.context_length, limit)
        if available is not None:
            fits = memory.largest_n_ctx(planned, fits, available)
        n_ctx = max(1, fits)
    if not isinstance(n_ctx, int) or n_ctx < 1:
        raise ContextError(f"n_ctx is {n_ctx!r}, expected a positive number or 'max'")
    memory.check_fits(name, n_ctx, planned, available)
    return n_ctx
