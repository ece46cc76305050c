"""Rotation frequencies, the cos/sin table and the attention temperature: all in float64, rounded once."""

import math

import numpy as np

TABLE_ROWS = 4096  # positions computed at a time: bounds the float64 temporaries


def rope_frequencies(cfg, n_ctx: int) -> np.ndarray:
    """Return the angle per position of each rotated pair, float64 [R/2].

    Parameters
    ----------
    cfg : MLAConfig
    n_ctx : int
        Allocated context: with long and short factors in the file, it is this, not the position, that chooses.

    Notes
    -----
    Plain rope turns pair ``i`` by ``base**(-2 i / R)`` per position. YaRN divides the slow pairs by the factor and
    leaves the fast ones, with a linear ramp between the pairs that make `yarn_beta_fast` and `yarn_beta_slow` turns
    over the original context. Long and short factors divide each pair's frequency.
    """
    half = cfg.qk_rope_head_dim // 2
    pair = np.arange(half, dtype=np.float64)
    freq = cfg.rope_base ** (-2.0 * pair / cfg.qk_rope_head_dim)
    if cfg.rope_scaling == "longrope":
        factors = cfg.rope_factors_long if n_ctx > cfg.rope_orig_ctx else cfg.rope_factors_short
        return freq / np.asarray(factors, np.float64)
    if cfg.rope_scaling == "yarn":
        low, high = yarn_ramp_ends(cfg)
        slow = np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)  # 0: untouched, 1: divided by the factor
        return freq * (1.0 - slow) + freq / cfg.yarn_factor * slow
    return freq


def yarn_ramp_ends(cfg) -> tuple[int, int]:
    """Return the pairs between which YaRN's ramp runs, (low, high), clamped to [0, R - 1]."""
    width = cfg.qk_rope_head_dim

    def pair_that_turns(turns):
        return width * math.log(cfg.yarn_orig_ctx / (turns * 2.0 * math.pi)) / (2.0 * math.log(cfg.rope_base))

    low = max(0, math.floor(pair_that_turns(cfg.yarn_beta_fast)))
    high = min(width - 1, math.ceil(pair_that_turns(cfg.yarn_beta_slow)))
    return low, high


def rope_table(cfg, n_ctx: int) -> np.ndarray:
    """Return float32 [n_ctx, R/2, 2]: cos and sin of every pair at every position, times ``cfg.rope_magnitude``."""
    freq = rope_frequencies(cfg, n_ctx)
    table = np.empty((n_ctx, freq.size, 2), np.float32)
    for start in range(0, n_ctx, TABLE_ROWS):
        position = np.arange(start, min(start + TABLE_ROWS, n_ctx), dtype=np.float64)
        angle = position[:, None] * freq
        table[start : start + TABLE_ROWS, :, 0] = np.cos(angle) * cfg.rope_magnitude
        table[start : start + TABLE_ROWS, :, 1] = np.sin(angle) * cfg.rope_magnitude
    return table


def temperature(cfg, n_ctx: int) -> np.ndarray:
    """Return float64 [n_ctx]: what multiplies the scores of the query at each position; ones without temperature."""
    if cfg.attn_temp_scale == 0.0:
        return np.ones(n_ctx)
    windows = np.arange(n_ctx) // cfg.attn_temp_length  # whole windows before the position
    return 1.0 + cfg.attn_temp_scale * np.log1p(windows.astype(np.float64))
