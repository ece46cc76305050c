"""Weights in Taichi fields: the banks that the plan names, and the load into them."""

from typing import Any

import numpy as np

from tmla.config import MIN_WEIGHT_SUM, MLAConfig
from tmla.fields import FieldPool
from tmla.plan import BankPlan, Plan, global_roles
from tmla.stages.cache_row import cache_numpy
from tmla.stages.ffn_warps import segment_size
from tmla.stages.router import Routing
from tmla.tensor_check import check_finite_tensor
from tmla.upload import Writer


class Bank:
    """Fields of a bank as attributes, and the number of its first layer."""

    _data_oriented = True  # Taichi then keeps a weak reference to it

    def __init__(self, plan: BankPlan, pool: FieldPool, cache_pool: FieldPool):
        self.first, self.n, self.roles = plan.first, plan.n, plan.roles
        self.fields = []  # all but the cache
        layers = f"layers {plan.first} to {plan.first + plan.n - 1}"
        for name, (dtype, shape) in plan.fields.items():
            f = (cache_pool if name == "cache" else pool).field(dtype, shape, f"{name} of {layers}")
            setattr(self, name, f)
            self.fields += [f] * (name != "cache")


class AttentionBank(Bank):
    """Fields and constants of the MLA blocks of consecutive layers, as the kernels see them."""

    def __init__(self, plan: BankPlan, cfg: MLAConfig, cache_dtype: str, pool: FieldPool, cache_pool: FieldPool):
        super().__init__(plan, pool, cache_pool)
        self.cache_dtype, self.cache_f32 = cache_dtype, cache_dtype == "f32"
        self.row_width = cfg.cache_row_width
        self.split, self.has_q_lora = cfg.kv_b_split, cfg.q_lora_rank > 0
        self.n_nope, self.n_rope, self.n_v = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.n_latent, self.n_heads = cfg.kv_lora_rank, cfg.n_heads
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
    zero: Any  # i32 [1], a layer number that is always 0; set by the model

    def __init__(self, plan: Plan, cfg: MLAConfig, pool: FieldPool):
        self.roles = global_roles(cfg)
        self.first, self.n = 0, 1
        self.fields = []
        for name, (dtype, shape) in plan.globals.items():
            setattr(self, name, pool.field(dtype, shape, name))
            self.fields.append(getattr(self, name))
        if cfg.tied_head:
            self.head_q, self.head_d = self.embd_q, self.embd_d
        self.eps, self.embd_scale, self.logit_scale = cfg.rms_eps, cfg.embd_scale, cfg.logit_scale


def load_weights(gf, banks, writer: Writer, progress=None) -> None:
    """Copy every tensor of the file into its field.

    Parameters
    ----------
    gf : GGUFFile
        Checked by :func:`tmla.config.check_tensors`.
    banks : sequence of Bank and Globals
        Each with ``roles``, ``first`` and ``n``.
    writer : Writer
    progress : callable, optional
        Called with (done_bytes, total_bytes) after each tensor; bytes in the file.

    Raises
    ------
    GGUFError
        A scale, norm, router or bias is NaN or infinite: named, before its tensor is copied.
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
        if not role.q8 or gf.tensors[source].type == "Q8_0":  # tmla.requantize looks at what it converts
            check_finite_tensor(gf, source)
        if role.q8:
            w_q, w_d = getattr(bank, name + "_q"), getattr(bank, name + "_d")
            blocks = gf.q8_0_blocks(source)
            if role.half is None:
                writer.put_q8(blocks, w_q, w_d, layer, row0)
            else:  # fused: per expert gate rows, then up rows
                f = role.rows // role.n_experts
                for e in range(role.n_experts):
                    start = (2 * e + role.half) * f
                    writer.put_q8(blocks[start : start + f], w_q, w_d, layer, e * f)
        else:
            writer.put_f32(gf.array(source), getattr(bank, name), layer)
        done += gf.tensors[source].n_bytes
        if progress is not None:
            progress(done, total)
