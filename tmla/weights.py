"""Weights in Taichi fields: the plan, made on shapes alone, then the load.

Layers are cut into *segments*: consecutive layers of one kind (dense or mixture) whose stacked fields all stay under
2**31 bytes and elements. A segment owns one field per role, ``[layers, rows, width]``, and its part of the cache; a
kernel is compiled once per segment and takes the layer's number inside it.
"""

import dataclasses
import math

import numpy as np
import taichi as ti

from tmla.config import MIN_WEIGHT_SUM, MLAConfig
from tmla.errors import BackendError
from tmla.gguf_file import q8_0_split
from tmla.runtime import FieldPool, dtype_bytes
from tmla.stages.linear import Q8_BLOCK
from tmla.stages.router import Routing

MAX_FIELD = 2**31 - 1  # bytes and elements of one field: above, Taichi 1.7.4 wraps or ends the process
UPLOAD_BLOCKS = 1 << 19  # Q8_0 blocks per upload: 17 MB; a software Vulkan device takes 65,535 work groups a dispatch


@dataclasses.dataclass(frozen=True)
class Role:
    """One stacked matrix or vector of every layer of a kind: its tensors' names and its shape in one layer.

    `source` names the tensor; `half` 0 or 1 takes the gate or the up rows of a fused ``ffn_gate_up_exps``.
    """

    source: str
    rows: int  # 0 for a vector
    width: int
    q8: bool = True
    half: int | None = None
    n_experts: int = 1

    def fields(self, n_layers: int, layout: str) -> dict[str, tuple]:
        """Suffix -> (dtype, shape) of the fields that hold `n_layers` of this role."""
        if not self.q8:
            shape = (n_layers, self.rows, self.width) if self.rows else (n_layers, self.width)
            return {"": (ti.f32, shape)}
        quants = (ti.u8, self.width) if layout == "bytes" else (ti.u32, self.width // 4)
        return {
            "_q": (quants[0], (n_layers, self.rows, quants[1])),
            "_d": (ti.f16, (n_layers, self.rows, self.width // Q8_BLOCK)),
        }


def layer_roles(cfg: MLAConfig, *, moe: bool) -> dict[str, Role]:
    """Roles of one layer, by field name, in the order the layer reads them."""
    d, h, c = cfg.dim, cfg.n_heads, cfg.kv_lora_rank
    n, v = cfg.qk_nope_head_dim, cfg.v_head_dim
    roles = {"attn_norm": Role("attn_norm", 0, d, q8=False)}
    if cfg.q_lora_rank:
        roles["q_a"] = Role("attn_q_a", cfg.q_lora_rank, d)
        roles["q_a_norm"] = Role("attn_q_a_norm", 0, cfg.q_lora_rank, q8=False)
        roles["q"] = Role("attn_q_b", h * cfg.qk_head_dim, cfg.q_lora_rank)
    else:
        roles["q"] = Role("attn_q", h * cfg.qk_head_dim, d)
    roles["kv_a"] = Role("attn_kv_a_mqa", cfg.cache_row_width, d)
    roles["kv_a_norm"] = Role("attn_kv_a_norm", 0, c, q8=False)
    if cfg.kv_b_split:
        roles["k_b"] = Role("attn_k_b", h * c, n)
        roles["v_b"] = Role("attn_v_b", h * v, c)
    else:
        roles["kv_b"] = Role("attn_kv_b", h * (n + v), c)
    roles["attn_out"] = Role("attn_output", d, h * v)
    roles["ffn_norm"] = Role("ffn_norm", 0, d, q8=False)
    if moe:
        e, fe = cfg.n_experts, cfg.expert_ffn_dim
        roles["router"] = Role("ffn_gate_inp", e, d, q8=False)
        if cfg.has_expert_bias:
            roles["router_bias"] = Role("exp_probs_b.bias", 0, e, q8=False)
        for i, name in enumerate(("gate_exps", "up_exps")):
            fused = cfg.fused_gate_up
            source = "ffn_gate_up_exps" if fused else f"ffn_{name}"
            roles[name] = Role(source, e * fe, d, half=i if fused else None, n_experts=e)
        roles["down_exps"] = Role("ffn_down_exps", e * d, fe)
        names, f = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), cfg.shared_ffn_dim
    else:
        names, f = ("ffn_gate", "ffn_up", "ffn_down"), cfg.ffn_dim
    if f:
        if cfg.ffn_act == "swiglu":
            roles["gate"] = Role(names[0], f, d)
        roles["up"] = Role(names[1], f, d)
        roles["down"] = Role(names[2], d, f)
    return roles


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """Layers ``first .. first + n - 1``, all of one kind, and every field they need: name -> (dtype, shape)."""

    first: int
    n: int
    moe: bool
    fields: dict[str, tuple]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that will be allocated for weights and cache; made without data."""

    segments: tuple[SegmentPlan, ...]
    globals: dict[str, tuple]
    layout: str

    @property
    def cache_bytes(self) -> int:
        """Bytes of the latent cache, all layers."""
        return sum(field_bytes(*s.fields["cache"]) for s in self.segments)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they lie in fields."""
        every = [f for s in self.segments for name, f in s.fields.items() if name != "cache"]
        return sum(field_bytes(*f) for f in [*every, *self.globals.values()])


def field_bytes(dtype, shape) -> int:
    """Bytes of one field."""
    return math.prod(shape) * dtype_bytes(dtype)


def make_plan(cfg: MLAConfig, n_ctx: int, cache_dtype: str, layout: str, max_field: int = MAX_FIELD) -> Plan:
    """Cut the model into segments and list every field.

    Parameters
    ----------
    cfg : MLAConfig
    n_ctx : int
        Positions the cache holds.
    cache_dtype : {"f16", "f32"}
    layout : {"bytes", "words"}
        Storage of quants.
    max_field : int
        Most bytes and elements of one field.

    Raises
    ------
    BackendError
        One layer's tensor, or its cache, is larger than a field can be: names it.
    """
    cache_type = {"f16": ti.f16, "f32": ti.f32}[cache_dtype]
    segments = []
    first = 0
    while first < cfg.n_layers:
        moe = cfg.is_moe_layer[first]
        run = first
        while run < cfg.n_layers and cfg.is_moe_layer[run] == moe:
            run += 1
        roles = layer_roles(cfg, moe=moe)

        def fields(n, roles=roles):
            out = {"cache": (cache_type, (n, n_ctx, cfg.cache_row_width))}
            for name, role in roles.items():
                out |= {name + suffix: f for suffix, f in role.fields(n, layout).items()}
            return out

        most = min(_layers_that_fit(name, f, max_field, n_ctx) for name, f in fields(1).items())
        n_segments = -(-(run - first) // most)
        for i in range(n_segments):  # balanced: 26 layers in 9, 9, 8
            begin = first + (run - first) * i // n_segments
            end = first + (run - first) * (i + 1) // n_segments
            segments.append(SegmentPlan(begin, end - begin, moe, fields(end - begin)))
        first = run
    embd = Role("token_embd", cfg.n_vocab, cfg.dim)
    globals_ = {"embd" + s: f for s, f in embd.fields(1, layout).items()}
    globals_["out_norm"] = (ti.f32, (1, cfg.dim))
    if not cfg.tied_head:
        globals_ |= {"head" + s: f for s, f in embd.fields(1, layout).items()}
    for name, f in globals_.items():
        _layers_that_fit(name, f, max_field, n_ctx)
    return Plan(tuple(segments), globals_, layout)


def _layers_that_fit(name: str, field: tuple, max_field: int, n_ctx: int) -> int:
    one = max(field_bytes(*field), math.prod(field[1]))
    if one > max_field:
        what = f"the cache of one layer at n_ctx={n_ctx}" if name == "cache" else f"one layer of {name!r}"
        remedy = "ask for a smaller context" if name == "cache" else "tmla cannot run this model"
        raise BackendError(f"{what} needs {one:,} bytes in one field, at most {max_field:,} fit; {remedy}")
    return max_field // one


def largest_cache(cfg: MLAConfig, cache_dtype: str, max_field: int = MAX_FIELD) -> int:
    """Most positions that one layer's cache field can hold."""
    return max_field // cfg.cache_row_bytes(cache_dtype)


class Segment:
    """Fields and constants of consecutive layers, as the layer kernels see them."""

    _data_oriented = True  # Taichi then keeps a weak reference to it

    def __init__(self, plan: SegmentPlan, cfg: MLAConfig, pool: FieldPool, cache_pool: FieldPool):
        self.first, self.n, self.moe = plan.first, plan.n, plan.moe
        for name, (dtype, shape) in plan.fields.items():
            setattr(self, name, (cache_pool if name == "cache" else pool).field(dtype, shape))
        self.split = cfg.kv_b_split
        self.has_q_lora = cfg.q_lora_rank > 0
        self.n_nope, self.n_v, self.n_latent = cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.kv_lora_rank
        self.half_pairs = cfg.rope_pairs == "half"
        self.eps, self.residual_scale = cfg.rms_eps, cfg.residual_scale
        self.gated = cfg.ffn_act == "swiglu"
        self.common_ffn_dim = cfg.shared_ffn_dim if plan.moe else cfg.ffn_dim
        if not self.gated and self.common_ffn_dim:
            self.gate_q, self.gate_d = self.up_q, self.up_d  # a kernel argument needs some field; never read
        self.n_used = cfg.n_experts_used if plan.moe else 0
        self.expert_ffn_dim = cfg.expert_ffn_dim if plan.moe else 0
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
        # the value rows of head h stand at h * v_stride + v_offset of v_q, v_d
        self.v_stride = self.n_v if self.split else self.n_nope + self.n_v
        self.v_offset = 0 if self.split else self.n_nope
        kv = ("k_b", "v_b") if self.split else ("kv_b", "kv_b")
        self.k_q, self.k_d = getattr(self, kv[0] + "_q"), getattr(self, kv[0] + "_d")
        self.v_q, self.v_d = getattr(self, kv[1] + "_q"), getattr(self, kv[1] + "_d")


class Globals:
    """Embedding, final norm and head, as the kernels before and behind the layers see them."""

    _data_oriented = True

    def __init__(self, plan: Plan, cfg: MLAConfig, pool: FieldPool):
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
    quants: ti.types.ndarray(ti.u32, 2),
    scales: ti.types.ndarray(ti.f16, 2),
    n: ti.i32,
    w_q: ti.template(),
    w_d: ti.template(),
    layer: ti.i32,
    row0: ti.i32,
):
    n_block = ti.static(w_d.shape[2])
    for o in range(n):
        for b in range(n_block):
            for j in ti.static(range(Q8_BLOCK // 4)):
                w_q[layer, row0 + o, b * (Q8_BLOCK // 4) + j] = quants[o, b * (Q8_BLOCK // 4) + j]
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
            words = np.ascontiguousarray(quants).reshape(len(part), -1).view(np.uint32)
            _put_words(words, np.ascontiguousarray(scales), len(part), w_q, w_d, layer, row0 + r)


@ti.kernel
def _put_f32(values: ti.types.ndarray(ti.f32, 1), f: ti.template(), layer: ti.i32):
    if ti.static(len(f.shape) == 2):
        for i in range(f.shape[1]):
            f[layer, i] = values[i]
    else:
        for i in range(f.shape[1] * f.shape[2]):
            f[layer, i // f.shape[2], i % f.shape[2]] = values[i]


def load_weights(gf, cfg: MLAConfig, plan: Plan, segments, globals_, progress=None) -> None:
    """Copy every tensor of the file into its field.

    Parameters
    ----------
    gf : GGUFFile
        Checked by :func:`tmla.config.check_tensors`.
    segments, globals_ : sequence of Segment, Globals
    progress : callable, optional
        Called with (done_bytes, total_bytes) after each tensor.
    """
    total, done = plan.weight_bytes, 0

    def put(role: Role, prefix: str, owner, name: str, layer: int):
        nonlocal done
        source = prefix + role.source + ("" if "." in role.source else ".weight")
        if role.q8:
            w_q, w_d = getattr(owner, name + "_q"), getattr(owner, name + "_d")
            blocks = gf.q8_0_blocks(source)
            if role.half is None:
                put_q8(blocks, w_q, w_d, layer, 0)
            else:  # fused: per expert gate rows, then up rows
                f = role.rows // role.n_experts
                for e in range(role.n_experts):
                    start = (2 * e + role.half) * f
                    put_q8(blocks[start : start + f], w_q, w_d, layer, e * f)
        else:
            _put_f32(np.ascontiguousarray(gf.array(source), np.float32).reshape(-1), getattr(owner, name), layer)
        done += sum(field_bytes(*f) for f in role.fields(1, plan.layout).values())
        if progress is not None:
            progress(done, total)

    matrix = {"embd": Role("token_embd", cfg.n_vocab, cfg.dim)}
    if not cfg.tied_head:
        matrix["head"] = Role("output", cfg.n_vocab, cfg.dim)
    for name, role in [*matrix.items(), ("out_norm", Role("output_norm", 0, cfg.dim, q8=False))]:
        put(role, "", globals_, name, 0)
    for seg in segments:
        roles = layer_roles(cfg, moe=seg.moe)
        for i in range(seg.n):
            for name, role in roles.items():
                put(role, f"blk.{seg.first + i}.", seg, name, i)
