"""Every buffer of a decode step, allocated once: activations, scratch of the stages, tables."""

import numpy as np
import taichi as ti

from tmla.config import MLAConfig
from tmla.runtime import FieldPool
from tmla.stages.attention import TILE

MAX_CHOSEN = 64  # greedy tokens between two read-backs


class RouterScratch:
    """Scores and choice of one token: see :func:`tmla.stages.router.router`."""

    _data_oriented = True

    def __init__(self, pool: FieldPool, n_experts: int, n_used: int, n_groups: int):
        self.score = pool.field(ti.f32, (1, max(1, n_experts)))
        self.select = pool.field(ti.f32, (1, max(1, n_experts)))
        self.group = pool.field(ti.f32, (1, max(1, n_groups)))
        self.expert = pool.field(ti.i32, (1, max(1, n_used)))
        self.weight = pool.field(ti.f32, (1, max(1, n_used)))


class AttentionScratch:
    """Partial results of the context splits: see :func:`tmla.stages.attention.attention`."""

    _data_oriented = True

    def __init__(self, pool: FieldPool, n_splits: int, n_heads: int, n_latent: int):
        self.scores = pool.field(ti.f32, (n_splits, n_heads, TILE))
        self.part_m = pool.field(ti.f32, (n_splits, n_heads))
        self.part_l = pool.field(ti.f32, (n_splits, n_heads))
        self.part_r = pool.field(ti.f32, (n_splits, n_heads))
        self.part = pool.field(ti.f32, (n_splits, n_heads, n_latent))


class State:
    """Activations of one token and the tables that depend on the position.

    ``x`` [1, D] residual, ``xn`` [1, D] normalised, ``q`` [1, H, N + R] queries, ``row`` [1, 1, C + R] kv_a
    projection, ``qa`` [1, H, C + R] fused queries,
    ``mix`` [H, C] latent mix, ``o`` [1, H * V] heads' values, ``hidden`` [1, K * Fe + Fs], ``logits`` [1, n_vocab];
    ``rope`` [T, R/2, 2], ``scale`` [T] score scale; ``pos`` [1] the position of the token being decoded; ``token`` [1] the
    last greedy choice, ``chosen`` [MAX_CHOSEN] those of a run, among the first ``n_choice`` ids.
    """

    _data_oriented = True

    def __init__(self, cfg: MLAConfig, n_ctx: int, pool: FieldPool, n_splits: int, n_choice: int):
        h, c = cfg.n_heads, cfg.kv_lora_rank
        self.pos = pool.field(ti.i32, (1,))
        self.token = pool.field(ti.i32, (1,))
        self.chosen = pool.field(ti.i32, (MAX_CHOSEN,))
        self.n_choice = n_choice
        self.x = pool.field(ti.f32, (1, cfg.dim))
        self.xn = pool.field(ti.f32, (1, cfg.dim))
        self.q_low = pool.field(ti.f32, (1, max(1, cfg.q_lora_rank)))
        self.q_low_n = pool.field(ti.f32, (1, max(1, cfg.q_lora_rank)))
        self.q = pool.field(ti.f32, (1, h, cfg.qk_head_dim))
        self.row = pool.field(ti.f32, (1, 1, cfg.cache_row_width))
        self.qa = pool.field(ti.f32, (1, h, cfg.cache_row_width))
        self.mix = pool.field(ti.f32, (h, c))
        self.o = pool.field(ti.f32, (1, h * cfg.v_head_dim))
        moe_width = cfg.n_experts_used * cfg.expert_ffn_dim + cfg.shared_ffn_dim
        self.hidden = pool.field(ti.f32, (1, max(cfg.ffn_dim, moe_width)))
        self.logits = pool.field(ti.f32, (1, cfg.n_vocab))
        self.attn = AttentionScratch(pool, n_splits, h, c)
        self.route = RouterScratch(pool, cfg.n_experts, cfg.n_experts_used, cfg.n_expert_groups)
        self.rope = pool.field(ti.f32, (n_ctx, cfg.qk_rope_head_dim // 2, 2))
        self.scale = pool.field(ti.f32, (n_ctx,))
        self.rope.from_numpy(cfg.rope_table(n_ctx))
        self.scale.from_numpy((cfg.softmax_scale * cfg.temperature_table(n_ctx).astype(np.float64)).astype(np.float32))


def table_bytes_per_position(cfg: MLAConfig) -> int:
    """Bytes of the rope and scale tables for one position."""
    return 4 * (cfg.qk_rope_head_dim + 1)
