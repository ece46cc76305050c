"""Every buffer of a batched prefill, allocated once: activations of a chunk of tokens, and scratch of its stages."""

import taichi as ti

from tmla.config import MLAConfig
from tmla.fields import FieldPool
from tmla.runtime import Caps
from tmla.stages import chunk_attention, chunk_attention_tiles, head_rows, matmul
from tmla.stages.lanes import cdiv
from tmla.stages.route_tiles import TILE_TOKENS

MIN_TOKENS = 16  # fewer tokens go through the kernels of single tokens
MAX_TOKENS = {"cpu": 512, "gpu": 2048}
LOGIT_ROWS = 16  # tokens whose logits are made together
MAX_BYTES = 1 << 29  # of one chunk's activations: what bounds the chunk of a wide model


def chunk_tokens(cfg: MLAConfig, n_ctx: int, *, gpu: bool) -> int:
    """Tokens of a chunk: as many as the backend gains from, the context holds, and MAX_BYTES hold."""
    per_token = 4 * sum(widths(cfg).values())
    n = min(MAX_TOKENS["gpu" if gpu else "cpu"], n_ctx, max(MIN_TOKENS, MAX_BYTES // per_token))
    return n if n < 64 else n // 64 * 64


def widths(cfg: MLAConfig) -> dict[str, int]:
    """Values a token has in each buffer."""
    h, d = cfg.n_heads, cfg.dim
    q_width = h * cfg.qk_head_dim
    common = max((cfg.shared_ffn_dim if moe else cfg.ffn_dim) for moe in cfg.is_moe_layer)
    pairs = cfg.n_experts_used if any(cfg.is_moe_layer) else 0
    return {
        "x": d,
        "xn": d,
        "proj": (cfg.q_lora_rank or q_width) + cfg.cache_row_width,
        "q_low": cfg.q_lora_rank,
        "q": q_width if cfg.q_lora_rank else 0,
        "qa": h * cdiv(cfg.cache_row_width, 4) * 4,
        "mix": h * cfg.kv_lora_rank,
        "o": h * cfg.v_head_dim,
        "common": common,
        "hidden": pairs * cfg.expert_ffn_dim,
        "out": pairs * d,
        "logit": cfg.n_experts,
    }


class ExpertGroups:
    """Choice and grouping of a chunk's tokens: see :func:`tmla.stages.route_rows.route_rows`."""

    _data_oriented = True

    def __init__(self, pool: FieldPool, n: int, n_experts: int, n_used: int, *, gpu: bool):
        pairs = max(1, n * n_used)
        self.logit = pool.field(ti.f32, (n, max(1, n_experts)))
        self.expert, self.order, self.place = (pool.field(ti.i32, (pairs,)) for _ in range(3))
        self.weight = pool.field(ti.f32, (pairs,))
        self.start = pool.field(ti.i32, (n_experts + 1,))
        self.next = pool.field(ti.i32, (max(1, n_experts),))
        if gpu:  # tiles of pairs of one expert: its number, first pair and end
            n_tiles = cdiv(pairs, TILE_TOKENS) + n_experts
            self.tile_expert, self.tile_first, self.tile_end = (pool.field(ti.i32, (n_tiles,)) for _ in range(3))


class ChunkAttentionScratch:
    """Buffers of the chunk's attention: see :mod:`tmla.stages.chunk_attention`."""

    _data_oriented = True

    def __init__(self, pool: FieldPool, cfg: MLAConfig, n: int, caps: Caps):
        h, v = cfg.n_heads, cfg.v_head_dim
        segment, rows = chunk_attention.SEGMENT, caps.threads * chunk_attention.QUERIES
        if caps.gpu:
            segment, rows = chunk_attention_tiles.segment_rows(n * h, h * (cfg.qk_head_dim + v)), n * h
        else:
            self.turned = pool.field(ti.f32, (1, segment * max(cfg.kv_lora_rank, h * v)))
        self.top, self.total = pool.field(ti.f32, (n, h)), pool.field(ti.f32, (n, h))
        self.rows = pool.field(ti.f32, (segment, cfg.cache_row_width))
        self.keys = pool.field(ti.f32, (segment, h * cfg.qk_head_dim))
        self.values = pool.field(ti.f32, (segment, h * v))
        self.p = pool.field(ti.f32, (rows, segment))
        self.rescale, self.factor = pool.field(ti.f32, (rows,)), pool.field(ti.f32, (rows,))


class ChunkState:
    """Buffers of `n_tokens` tokens, f32 [T, ...]: the names are those of :class:`tmla.state.State`."""

    _data_oriented = True

    def __init__(self, cfg: MLAConfig, n_ctx: int, caps: Caps, pool: FieldPool):
        self.n_tokens = n = chunk_tokens(cfg, n_ctx, gpu=caps.gpu)
        w = widths(cfg)
        self.tokens = pool.field(ti.i32, (n,))
        self.x, self.xn, self.proj, self.qa, self.mix, self.o = (
            pool.field(ti.f32, (n, w[name])) for name in ("x", "xn", "proj", "qa", "mix", "o")
        )
        self.q_low = pool.field(ti.f32, (n, w["q_low"])) if cfg.q_lora_rank else self.xn
        self.q = pool.field(ti.f32, (n, w["q"])) if cfg.q_lora_rank else self.proj
        self.common = pool.field(ti.f32, (n, max(1, w["common"])))
        pairs = n * cfg.n_experts_used if w["hidden"] else 1
        self.hidden = pool.field(ti.f32, (pairs, max(1, cfg.expert_ffn_dim if w["hidden"] else 1)))
        self.out = pool.field(ti.f32, (pairs, cfg.dim if w["hidden"] else 1))
        self.x_head = pool.field(ti.f32, (LOGIT_ROWS, cfg.dim))
        self.logits = pool.field(ti.f32, (LOGIT_ROWS, cfg.n_vocab))
        self.attn = ChunkAttentionScratch(pool, cfg, n, caps)
        self.groups = ExpertGroups(pool, n, cfg.n_experts, cfg.n_experts_used if w["hidden"] else 0, gpu=caps.gpu)
        inner = [cfg.dim, cfg.q_lora_rank, cfg.n_heads * cfg.v_head_dim, w["common"], cfg.expert_ffn_dim]
        strip = max(
            matmul.strip_len(*(width for width in inner if width)),
            head_rows.strip_len(cfg.qk_nope_head_dim, cfg.kv_lora_rank),
        )
        self.strip = pool.field(ti.f32, (1, 1) if caps.gpu else (caps.threads, strip))
