"""Weights in Taichi fields: the plan, made on shapes alone, then the load.

Layers are cut into *banks*: consecutive layers whose stacked fields all stay under 2**31 bytes and elements. There are
attention banks, with their part of the cache, and FFN banks, whose layers are also of one kind (dense or mixture). A
bank owns one field per role, ``[layers, rows, width]``; a kernel is compiled once per bank.
"""

import dataclasses
import itertools
import math

import numpy as np
import taichi as ti

from tmla.config import MIN_WEIGHT_SUM, MLAConfig
from tmla.errors import BackendError
from tmla.gguf_file import q8_0_split
from tmla.runtime import FieldPool, dtype_bytes
from tmla.stages.cache_row import cache_field, cache_numpy
from tmla.stages.ffn_warps import segment_size
from tmla.stages.linear import Q8_BLOCK
from tmla.stages.router import Routing
from tmla.stages.words import WORD

MAX_FIELD = 2**31 - 1  # bytes and elements of one field: above, Taichi 1.7.4 wraps or ends the process
UPLOAD_BLOCKS = 1 << 19  # Q8_0 blocks per upload: 17 MB; a software Vulkan device takes 65,535 work groups a dispatch


@dataclasses.dataclass(frozen=True)
class Role:
    """One stacked matrix or vector of every layer of a bank: its tensors' names and its shape in one layer.

    `sources` are stacked row by row: ``(("attn_q", 3072), ("attn_kv_a_mqa", 576))``. `half` 0 or 1 takes the gate or the
    up rows of a fused ``ffn_gate_up_exps``.
    """

    sources: tuple[tuple[str, int], ...]
    width: int
    q8: bool = True
    half: int | None = None
    n_experts: int = 1

    @property
    def rows(self) -> int:
        """Rows in one layer; 0 for a vector."""
        return sum(rows for _, rows in self.sources)

    def fields(self, n_layers: int, layout: str) -> dict[str, tuple]:
        """Suffix -> (dtype, shape) of the fields that hold `n_layers` of this role."""
        if not self.q8:
            return {"": (ti.f32, (n_layers, self.rows, self.width) if self.rows else (n_layers, self.width))}
        dtype, per_word = (ti.u8, 1) if layout == "bytes" else (ti.u64, WORD)
        return {
            "_q": (dtype, (n_layers, self.rows, self.width // per_word)),
            "_d": (ti.f16, (n_layers, self.rows, self.width // Q8_BLOCK)),
        }


def matrix(source: str, rows: int, width: int, **options) -> Role:
    """Role of one Q8_0 matrix."""
    return Role(((source, rows),), width, **options)


def vector(source: str, width: int) -> Role:
    """Role of one f32 vector."""
    return Role(((source, 0),), width, q8=False)


def attention_roles(cfg: MLAConfig) -> dict[str, Role]:
    """Roles of one layer's MLA block, by field name.

    ``proj`` is every projection of the residual in one matrix: the queries (or their low-rank part), then kv_a.
    """
    d, h, c = cfg.dim, cfg.n_heads, cfg.kv_lora_rank
    n, v, q_rows = cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.n_heads * cfg.qk_head_dim
    first = ("attn_q_a", cfg.q_lora_rank) if cfg.q_lora_rank else ("attn_q", q_rows)
    roles = {
        "attn_norm": vector("attn_norm", d),
        "proj": Role((first, ("attn_kv_a_mqa", cfg.cache_row_width)), d),
        "kv_a_norm": vector("attn_kv_a_norm", c),
        "attn_out": matrix("attn_output", d, h * v),
    }
    if cfg.q_lora_rank:
        roles["q_a_norm"] = vector("attn_q_a_norm", cfg.q_lora_rank)
        roles["q_b"] = matrix("attn_q_b", q_rows, cfg.q_lora_rank)
    if cfg.kv_b_split:
        roles["k_b"] = matrix("attn_k_b", h * c, n)
        roles["v_b"] = matrix("attn_v_b", h * v, c)
    else:
        roles["kv_b"] = matrix("attn_kv_b", h * (n + v), c)
    return roles


def ffn_roles(cfg: MLAConfig, *, moe: bool) -> dict[str, Role]:
    """Roles of one layer's feed-forward network, by field name."""
    d = cfg.dim
    roles = {"ffn_norm": vector("ffn_norm", d)}
    names, f = ("ffn_gate", "ffn_up", "ffn_down"), cfg.ffn_dim
    if moe:
        e, fe = cfg.n_experts, cfg.expert_ffn_dim
        names, f = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), cfg.shared_ffn_dim
        roles["router"] = matrix("ffn_gate_inp", e, d, q8=False)
        if cfg.has_expert_bias:
            roles["router_bias"] = vector("exp_probs_b.bias", e)
        for i, name in enumerate(("gate_exps", "up_exps")):
            if cfg.fused_gate_up:
                roles[name] = matrix("ffn_gate_up_exps", e * fe, d, half=i, n_experts=e)
            else:
                roles[name] = matrix(f"ffn_{name}", e * fe, d)
        roles["down_exps"] = matrix("ffn_down_exps", e * d, fe)
    if f:
        if cfg.ffn_act == "swiglu":
            roles["gate"] = matrix(names[0], f, d)
        roles["up"] = matrix(names[1], f, d)
        roles["down"] = matrix(names[2], d, f)
    return roles


def global_roles(cfg: MLAConfig) -> dict[str, Role]:
    """Roles outside the layers."""
    roles = {"embd": matrix("token_embd", cfg.n_vocab, cfg.dim), "out_norm": vector("output_norm", cfg.dim)}
    if not cfg.tied_head:
        roles["head"] = matrix("output", cfg.n_vocab, cfg.dim)
    return roles


@dataclasses.dataclass(frozen=True)
class BankPlan:
    """Layers ``first .. first + n - 1`` and every field they need: name -> (dtype, shape)."""

    first: int
    n: int
    moe: bool
    roles: dict[str, Role]
    fields: dict[str, tuple]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that will be allocated for weights and cache; made without data."""

    attention: tuple[BankPlan, ...]
    ffn: tuple[BankPlan, ...]
    globals: dict[str, tuple]
    layout: str

    @property
    def cache_bytes(self) -> int:
        """Bytes of the latent cache, all layers."""
        return sum(field_bytes(*b.fields["cache"]) for b in self.attention)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they lie in fields."""
        every = [f for b in (*self.attention, *self.ffn) for name, f in b.fields.items() if name != "cache"]
        return sum(field_bytes(*f) for f in [*every, *self.globals.values()])


def field_bytes(dtype, shape) -> int:
    """Bytes of one field."""
    return math.prod(shape) * dtype_bytes(dtype)


def make_plan(cfg: MLAConfig, n_ctx: int, cache_dtype: str, layout: str, max_field: int = MAX_FIELD) -> Plan:
    """Cut the model into banks and list every field.

    Parameters
    ----------
    cfg : MLAConfig
    n_ctx : int
        Positions the cache holds.
    cache_dtype : {"f16", "f32"}
    layout : {"bytes", "words"}
        Storage of quants and cache.
    max_field : int
        Most bytes and elements of one field.

    Raises
    ------
    BackendError
        One layer's tensor, or its cache, is larger than a field can be: names it.
    """

    def banks(first, end, moe, roles, with_cache):
        def fields(n):
            out = {}
            if with_cache:
                out["cache"] = cache_field(n, n_ctx, cfg.cache_row_width, cache_dtype, layout)
            for name, role in roles.items():
                out |= {name + suffix: f for suffix, f in role.fields(n, layout).items()}
            return out

        most = min(_layers_that_fit(name, f, max_field, n_ctx) for name, f in fields(1).items())
        n_banks = -(-(end - first) // most)
        edges = [first + (end - first) * i // n_banks for i in range(n_banks + 1)]  # balanced: 26 layers in 9, 9, 8
        return [BankPlan(a, b - a, moe, roles, fields(b - a)) for a, b in itertools.pairwise(edges)]

    ffn, first = [], 0
    for moe, run in itertools.groupby(cfg.is_moe_layer):
        end = first + len(list(run))
        ffn += banks(first, end, moe, ffn_roles(cfg, moe=moe), False)
        first = end
    globals_ = {name + s: f for name, role in global_roles(cfg).items() for s, f in role.fields(1, layout).items()}
    for name, f in globals_.items():
        _layers_that_fit(name, f, max_field, n_ctx)
    attention = banks(0, cfg.n_layers, False, attention_roles(cfg), True)
    return Plan(tuple(attention), tuple(ffn), globals_, layout)


def _layers_that_fit(name: str, field: tuple, max_field: int, n_ctx: int) -> int:
    one = max(field_bytes(*field), math.prod(field[1]))
    if one > max_field:
        what = f"the cache of one layer at n_ctx={n_ctx}" if name == "cache" else f"one layer of {name!r}"
        remedy = "ask for a smaller context" if name == "cache" else "tmla cannot run this model"
        raise BackendError(f"{what} needs {one:,} bytes in one field, at most {max_field:,} fit; {remedy}")
    return max_field // one


def largest_cache(cfg: MLAConfig, cache_dtype: str, max_field: int = MAX_FIELD) -> int:
    """Most positions that one layer's cache field can hold."""
    return max_field // (-(-cfg.cache_row_width // 4) * 4 * {"f16": 2, "f32": 4}[cache_dtype])


class Bank:
    """Fields of a bank as attributes, and the number of its first layer."""

    _data_oriented = True  # Taichi then keeps a weak reference to it

    def __init__(self, plan: BankPlan, pool: FieldPool, cache_pool: FieldPool):
        self.first, self.n, self.roles = plan.first, plan.n, plan.roles
        for name, (dtype, shape) in plan.fields.items():
            setattr(self, name, (cache_pool if name == "cache" else pool).field(dtype, shape))


class AttentionBank(Bank):
    """Fields and constants of the MLA blocks of consecutive layers, as the kernels see them."""

    def __init__(self, plan: BankPlan, cfg: MLAConfig, cache_dtype: str, pool: FieldPool, cache_pool: FieldPool):
        super().__init__(plan, pool, cache_pool)
        self.cache_dtype, self.cache_f32 = cache_dtype, cache_dtype == "f32"
        self.row_width = cfg.cache_row_width
        self.split, self.has_q_lora = cfg.kv_b_split, cfg.q_lora_rank > 0
        self.n_nope, self.n_rope, self.n_v = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.n_latent = cfg.kv_lora_rank
        self.half_pairs = cfg.rope_pairs == "half"
        self.eps, self.residual_scale = cfg.rms_eps, cfg.residual_scale
        self.row0 = cfg.q_lora_rank or cfg.n_heads * cfg.qk_head_dim  # where kv_a stands in the projection
        # the value rows of head h stand at h * v_stride + v_offset of v_q, v_d
        self.v_stride = self.n_v if self.split else self.n_nope + self.n_v
        self.v_offset = 0 if self.split else self.n_nope
        k, v = ("k_b", "v_b") if self.split else ("kv_b", "kv_b")
        self.k_q, self.k_d = getattr(self, k + "_q"), getattr(self, k + "_d")
        self.v_q, self.v_d = getattr(self, v + "_q"), getattr(self, v + "_d")

    def cache_rows(self, n: int) -> np.ndarray:
        """The first `n` cached rows of every layer of the bank, f32 [layers, n, C + R]."""
        return cache_numpy(self.cache, self.row_width, self.cache_dtype)[:, :n]


class FFNBank(Bank):
    """Fields and constants of the feed-forward networks of consecutive layers of one kind."""

    def __init__(self, plan: BankPlan, cfg: MLAConfig, pool: FieldPool):
        super().__init__(plan, pool, pool)
        self.moe = plan.moe
        self.eps, self.residual_scale = cfg.rms_eps, cfg.residual_scale
        self.gated = cfg.ffn_act == "swiglu"
        self.common_ffn_dim = cfg.shared_ffn_dim if plan.moe else cfg.ffn_dim
        self.n_used = cfg.n_experts_used if plan.moe else 0
        self.expert_ffn_dim = cfg.expert_ffn_dim if plan.moe else 0
        if not self.gated and self.common_ffn_dim:
            self.gate_q, self.gate_d = self.up_q, self.up_d  # a kernel argument needs some field; never read
        self.segment = segment_size(self.n_used, self.expert_ffn_dim, self.common_ffn_dim)
        self.n_segments = self.n_used + -(-self.common_ffn_dim // self.segment)
        self.routing = Routing(
            n_used=self.n_used,
            sigmoid=cfg.gating == "sigmoid",
            n_groups=cfg.n_expert_groups,
            n_groups_used=cfg.n_expert_groups_used,
            normalise=cfg.expert_weights_norm,
            scale=cfg.expert_weights_scale,
            has_bias=cfg.has_expert_bias,
            min_sum=MIN_WEIGHT_SUM,
        )


class Globals:
    """Embedding, final norm and head, as the kernels before and behind the layers see them."""

    _data_oriented = True

    def __init__(self, plan: Plan, cfg: MLAConfig, pool: FieldPool):
        self.roles = global_roles(cfg)
        self.first, self.n = 0, 1
        for name, (dtype, shape) in plan.globals.items():
            setattr(self, name, pool.field(dtype, shape))
        if cfg.tied_head:
            self.head_q, self.head_d = self.embd_q, self.embd_d
        self.eps, self.embd_scale, self.logit_scale = cfg.rms_eps, cfg.embd_scale, cfg.logit_scale


@ti.kernel
def _put_bytes(
    raw: ti.types.ndarray(ti.u8, 2), n: ti.i32, w_q: ti.template(), w_d: ti.template(), layer: ti.i32, row0: ti.i32
):
    n_block = ti.static(w_d.shape[2])
    for o in range(n):
        for b in range(n_block):
            src = o * n_block + b
            for j in ti.static(range(Q8_BLOCK)):  # unrolled: a copy that LLVM cannot vectorise, 2.5 times a plain loop
                w_q[layer, row0 + o, b * Q8_BLOCK + j] = raw[src, 2 + j]
            bits = ti.cast(raw[src, 0], ti.u16) | (ti.cast(raw[src, 1], ti.u16) << ti.u16(8))
            w_d[layer, row0 + o, b] = ti.bit_cast(bits, ti.f16)


@ti.kernel
def _put_words(
    quants: ti.types.ndarray(ti.u64, 2),
    scales: ti.types.ndarray(ti.f16, 2),
    n: ti.i32,
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.i32,
    row0: ti.i32,
):
    for i in range(n * w_d.shape[2]):
        o = i // w_d.shape[2]
        b = i - o * w_d.shape[2]
        for j in ti.static(range(Q8_BLOCK // WORD)):
            w_q[layer, row0 + o, b * (Q8_BLOCK // WORD) + j] = quants[o, b * (Q8_BLOCK // WORD) + j]
        w_d[layer, row0 + o, b] = scales[o, b]


def put_q8(blocks: np.ndarray, w_q, w_d, layer: int, row0: int) -> None:
    """Copy Q8_0 rows, u8 [rows, I/32, 34] contiguous, into ``w_q[layer, row0:]`` and ``w_d[layer, row0:]``."""
    n_rows, n_block = blocks.shape[:2]
    step = max(1, UPLOAD_BLOCKS // n_block)
    for r in range(0, n_rows, step):
        part = blocks[r : r + step]
        if w_q.dtype == ti.u8:
            _put_bytes(part.reshape(-1, 34), len(part), w_q, w_d, layer, row0 + r)
        else:
            quants, scales = q8_0_split(part)
            words = np.ascontiguousarray(quants).reshape(len(part), -1).view(np.uint64)
            _put_words(words, np.ascontiguousarray(scales), len(part), w_q, w_d, layer, row0 + r)


@ti.kernel
def _put_f32(values: ti.types.ndarray(ti.f32, 1), f: ti.template(), layer: ti.i32):
    if ti.static(len(f.shape) == 2):
        for i in range(f.shape[1]):
            f[layer, i] = values[i]
    else:
        for i in range(f.shape[1] * f.shape[2]):
            f[layer, i // f.shape[2], i % f.shape[2]] = values[i]


def load_weights(gf, banks, progress=None) -> None:
    """Copy every tensor of the file into its field.

    Parameters
    ----------
    gf : GGUFFile
        Checked by :func:`tmla.config.check_tensors`.
    banks : sequence of Bank and Globals
        Each with ``roles``, ``first`` and ``n``.
    progress : callable, optional
        Called with (done_bytes, total_bytes) after each tensor; bytes in the file.
    """

    def tensors():
        for bank in banks:
            for i in range(bank.n):
                prefix = "" if isinstance(bank, Globals) else f"blk.{bank.first + i}."
                for name, role in bank.roles.items():
                    row0 = 0
                    for source, rows in role.sources:
                        yield bank, i, name, role, row0, prefix + source + ("" if "." in source else ".weight")
                        row0 += rows

    total, done = sum(gf.tensors[t[-1]].n_bytes for t in tensors()), 0
    for bank, layer, name, role, row0, source in tensors():
        if role.q8:
            w_q, w_d = getattr(bank, name + "_q"), getattr(bank, name + "_d")
            blocks = gf.q8_0_blocks(source)
            if role.half is None:
                put_q8(blocks, w_q, w_d, layer, row0)
            else:  # fused: per expert gate rows, then up rows
                f = role.rows // role.n_experts
                for e in range(role.n_experts):
                    start = (2 * e + role.half) * f
                    put_q8(blocks[start : start + f], w_q, w_d, layer, e * f)
        else:
            _put_f32(np.ascontiguousarray(gf.array(source), np.float32).reshape(-1), getattr(bank, name), layer)
        done += gf.tensors[source].n_bytes
        if progress is not None:
            progress(done, total)
