"""Every buffer of a decode step, allocated once: activations, scratch of the stages, tables."""

import numpy as np
import taichi as ti

from tmla.config import MLAConfig
from tmla.fields import FieldPool
from tmla.runtime import Caps
from tmla.stages.attention import TILE
from tmla.stages.ffn_warps import segment_len, segment_size
from tmla.stages.lanes import cdiv
from tmla.stages.threads import DESK
from tmla.upload import Writer

MAX_CHOSEN = 64  # greedy tokens between two read-backs
CPU_SPLITS = 8  # parts of the context that CPU threads share out, at least
GPU_SPLITS = {"warp": 132, "subgroup": 264}  # parts of a long context, by kind of lanes (measured: docs/log.md)


class RouterScratch:
    """Scores and choice of one token: see :func:`tmla.stages.router.router`."""

    _data_oriented = True

    def __init__(self, pool: FieldPool, n_experts: int, n_used: int, n_groups: int):
        self.logit = pool.field(ti.f32, (1, max(1, n_experts)))
        self.score = pool.field(ti.f32, (1, max(1, n_experts)))
        self.select = pool.field(ti.f32, (max(1, n_experts),))
        self.group = pool.field(ti.f32, (max(1, n_groups),))
        self.expert = pool.field(ti.i32, (1, max(1, n_used)))
        self.weight = pool.field(ti.f32, (1, max(1, n_used)))


class AttentionScratch:
    """Partial results of the context splits: see :func:`tmla.stages.attention.attention`."""

    _data_oriented = True

    def __init__(self, pool: FieldPool, n_splits: int, n_heads: int, n_latent: int, *, gpu: bool):
        if not gpu:  # a GPU block keeps these in shared memory
            self.scores = pool.field(ti.f32, (n_splits, n_heads, TILE))
            self.rescale = pool.field(ti.f32, (n_splits, n_heads))
        self.top = pool.field(ti.f32, (n_heads, n_splits))
        self.total = pool.field(ti.f32, (n_heads, n_splits))
        self.part = pool.field(ti.f32, (n_splits, n_heads, n_latent))


class State:
    """Activations of one token and the tables that depend on the position.

    ``x`` [1, D] residual; ``xn`` [1, D] normalised (CPU); ``proj`` [1, H (N + R) + C + R] (or Q + C + R)
    projections of the residual; ``q`` [1, H (N + R)] queries, the same field as proj without q_lora; ``qa`` [1,
    H, C + R to fours] fused queries; ``mix`` [H, C] latent mix (CPU); ``o`` [1, H V] heads' values; ``hidden``
    activations of the FFN, by kind of layer; ``logits`` [1, n_vocab]; ``rope`` [T, R/2, 2], ``scale`` [T] score
    scale; ``desk`` where CPU threads share out work; ``chosen`` [MAX_CHOSEN] the choices of a run, among the first
    ``n_choice`` ids. One-element fields that kernels read and advance: ``pos`` the position being decoded,
    ``layer_attn`` and ``layer_ffn`` the layer, ``token`` the last greedy choice.
    """

    _data_oriented = True

    def __init__(self, cfg: MLAConfig, n_ctx: int, caps: Caps, pool: FieldPool, n_choice: int):
        h, c = cfg.n_heads, cfg.kv_lora_rank
        q_width = h * cfg.qk_head_dim
        self.pos, self.layer_attn, self.layer_ffn, self.token, self.step = (pool.field(ti.i32, (1,)) for _ in range(5))
        self.desk = pool.field(ti.i32, DESK)
        self.chosen = pool.field(ti.i32, (MAX_CHOSEN,))
        self.n_choice = n_choice
        self.best = pool.field(ti.f32, (256,))
        self.who = pool.field(ti.i32, (256,))
        self.x = pool.field(ti.f32, (1, cfg.dim))
        self.xn = pool.field(ti.f32, (1, cfg.dim))
        self.proj = pool.field(ti.f32, (1, (cfg.q_lora_rank or q_width) + cfg.cache_row_width))
        self.q_low = pool.field(ti.f32, (1, max(1, cfg.q_lora_rank)))
        self.q = pool.field(ti.f32, (1, q_width)) if cfg.q_lora_rank else self.proj
        self.qa = pool.field(ti.f32, (1, h, cdiv(cfg.cache_row_width, 4) * 4))
        self.mix = pool.field(ti.f32, (h, c))
        self.o = pool.field(ti.f32, (1, h * cfg.v_head_dim))
        self.hidden = {kind: pool.field(ti.f32, shape) for kind, shape in hidden_shapes(cfg, caps).items()}
        self.logits = pool.field(ti.f32, (1, cfg.n_vocab))
        self.attn = AttentionScratch(
            pool, GPU_SPLITS[caps.lane_ops] if caps.gpu else max(CPU_SPLITS, 2 * caps.threads), h, c, gpu=caps.gpu
        )
        self.route = RouterScratch(pool, cfg.n_experts, cfg.n_experts_used, cfg.n_expert_groups)
        self.rope = pool.field(ti.f32, (n_ctx, cfg.qk_rope_head_dim // 2, 2))
        self.scale = pool.field(ti.f32, (n_ctx,))
        self._cfg, self._n_ctx = cfg, n_ctx

    def write_tables(self, writer: Writer) -> None:
        """Fill the rope and scale tables; float64, rounded once."""
        scale = self._cfg.softmax_scale * self._cfg.temperature_table(self._n_ctx).astype(np.float64)
        writer.put_all(self._cfg.rope_table(self._n_ctx), self.rope)
        writer.put_all(scale.astype(np.float32), self.scale)


def hidden_shapes(cfg: MLAConfig, caps: Caps) -> dict[bool, tuple[int, int]]:
    """Shape of the FFN activations of mixture (True) and dense (False) layers."""
    shapes = {}
    for moe in sorted(set(cfg.is_moe_layer)):
        common = cfg.shared_ffn_dim if moe else cfg.ffn_dim
        used, fe = (cfg.n_experts_used, cfg.expert_ffn_dim) if moe else (0, 0)
        if caps.gpu:
            size = segment_size(used, fe, common)
            shapes[moe] = (used + cdiv(common, size), segment_len(size, caps.lanes))
        else:
            shapes[moe] = (1, used * fe + common)
    return shapes
