"""What will lie in fields: weights and cache, planned on shapes alone, before anything is allocated.

Layers are cut into *banks*: consecutive layers whose stacked fields all stay under 2**31 bytes and elements. There are
attention banks, with their part of the cache, and FFN banks, whose layers are also of one kind (dense or mixture). A
bank owns one field per role, ``[layers, rows, width]``; a kernel is compiled once per bank.
"""

import dataclasses
import itertools
import math

import taichi as ti

from tmla.config import MLAConfig
from tmla.errors import BackendError
from tmla.fields import MAX_FIELD, dtype_bytes
from tmla.stages.cache_row import cache_field
from tmla.stages.linear import Q8_BLOCK
from tmla.stages.words import WORD


@dataclasses.dataclass(frozen=True)
class Role:
    """One stacked matrix or vector of every layer of a bank: its tensors' names and its shape in one layer.

    `sources` are stacked row by row: ``(("attn_q", 3072), ("attn_kv_a_mqa", 576))``. `half` 0 or 1 takes the gate or
    the up rows of a fused ``ffn_gate_up_exps``.
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


def make_plan(
    cfg: MLAConfig,
    n_ctx: int,
    cache_dtype: str,
    layout: str,
    max_field: int = MAX_FIELD,
    promised: int | None = None,
) -> Plan:
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
    promised : int, optional
        Bytes of one buffer that the device promises to reach (:attr:`tmla.runtime.Caps.max_buffer`). Layers are cut to
        it. Where a single layer is larger, the field is made all the same, and :class:`tmla.fields.FieldPool` finds
        out whether the device reaches its end.

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

        most = min(_layers_that_fit(name, f, max_field, n_ctx, promised) for name, f in fields(1).items())
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
        _layers_that_fit(name, f, max_field, n_ctx, promised)
    attention = banks(0, cfg.n_layers, False, attention_roles(cfg), True)
    return Plan(tuple(attention), tuple(ffn), globals_, layout)


def _layers_that_fit(name: str, field: tuple, max_field: int, n_ctx: int, promised: int | None) -> int:
    one = max(field_bytes(*field), math.prod(field[1]))
    if one > max_field:
        what = f"the cache of one layer at n_ctx={n_ctx}" if name == "cache" else f"one layer of {name!r}"
        remedy = "ask for a smaller context" if name == "cache" else "tmla cannot run this model"
        raise BackendError(f"{what} needs {one:,} bytes in one field, at most {max_field:,} fit; {remedy}")
    limit = max_field if promised is None or one > promised else min(max_field, promised)
    return limit // one


def largest_cache(cfg: MLAConfig, cache_dtype: str, max_field: int = MAX_FIELD) -> int:
    """Most positions that one layer's cache field can hold."""
    return max_field // (-(-cfg.cache_row_width // 4) * 4 * {"f16": 2, "f32": 4}[cache_dtype])
