"""What a model asks of a machine: kernels that can be cut to its shapes, and memory for weights, cache and scratch."""

from tmla import memory, runtime, state
from tmla.config import MLAConfig
from tmla.errors import BackendError, ContextError
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
    per_position = cfg.n_layers * cfg.cache_row_bytes(cache_dtype) + state.table_bytes_per_position(cfg)
    available = memory.available_bytes() if caps.arch != "cuda" else None  # CUDA's own allocator answers for its memory
    limit = largest_cache(cfg, cache_dtype, min(runtime.MAX_FIELD, caps.max_buffer or runtime.MAX_FIELD))
    if n_ctx == "max":
        fits = min(cfg.context_length, limit)
        if available is not None:
            fits = memory.largest_n_ctx(plan.weight_bytes, per_position, fits, available)
        n_ctx = max(1, fits)
    if not isinstance(n_ctx, int) or n_ctx < 1:
        raise ContextError(f"n_ctx is {n_ctx!r}, expected a positive number or 'max'")
    memory.check_fits(name, n_ctx, plan.weight_bytes, per_position, available)
    return n_ctx
