"""One layer, stage by stage, against the NumPy references: every stage gets what the device computed before it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tmla import runtime
from tmla.check_weights import Weights, product, slab_rows, split
from tmla.config import MLAConfig
from tmla.gguf_file import GGUFFile
from tmla.stages import absorb, attention, attention_tiles, embed, ffn_warps, linear, norm, rope, router, v_combine
from tmla.stages.argmax import argmax, argmax_ref
from tmla.stages.cache_row import cache_from_numpy, cache_numpy, cache_row_ref
from tmla.stages.ffn import ffn_ref

TOLERANCE = 2e-5  # f32 sums in another order, relative to the largest value: measured 5e-8 .. 3e-6
TOLERANCE_F16_ROW = 1e-3  # a value stored in f16 is off by up to 2**-11 of itself


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the table: the largest error, and what is allowed."""

    what: str
    where: str
    error: float  # largest, relative to the reference's largest value (model rows: to its standard deviation)
    tolerance: float

    @property
    def ok(self) -> bool:
        """True within the tolerance; NaN is not."""
        return self.error <= self.tolerance


def relative_error(got: np.ndarray, ref: np.ndarray) -> float:
    """Largest deviation relative to the largest value of the reference; infinite if `got` holds a NaN or infinity."""
    if not np.isfinite(got).all():
        return float("inf")
    scale = float(np.abs(ref).max())
    return float(np.abs(got - ref).max()) / (scale or 1.0)


class LayerCheck:
    """Runs the stages of one layer and compares each with its reference.

    Parameters
    ----------
    cfg : MLAConfig
    a, f : AttentionBank, FFNBank
        Fields that hold the layer.
    s : State
    number : int
        The layer.
    source : Weights
        Its weights in NumPy.
    where : str
        What the table calls it.
    """

    def __init__(self, cfg: MLAConfig, a: Any, f: Any, s: Any, number: int, source: Weights, where: str):
        self.cfg, self.a, self.f, self.s, self.number, self.source, self.where = cfg, a, f, s, number, source, where
        self.results: list[Result] = []

    def run(self, x: np.ndarray, rows: np.ndarray) -> list[Result]:
        """Check every stage; the residual behind the layer is left in ``s.x``.

        Parameters
        ----------
        x : f32 [D]
            Residual before the layer.
        rows : f32 [pos, C + R]
            Cached rows of the positions before this one.
        """
        self.place(x, rows)
        n_ctx = self.a.cache.shape[1]
        self.table = self.cfg.rope_table(n_ctx)[self.pos]
        self.scale = self.cfg.softmax_scale * self.cfg.temperature_table(n_ctx)[self.pos]
        self._projections(x)
        self._query_and_row()
        self._attend()
        self._network()
        return self.results

    def place(self, x: np.ndarray, rows: np.ndarray) -> None:
        """Put the residual and the cached rows on the device; rows from this position on are NaN: never to be read."""
        self.pos = len(rows)
        cache = cache_numpy(self.a.cache, self.a.row_width, self.a.cache_dtype)
        cache[self.number - self.a.first] = np.nan
        cache[self.number - self.a.first, : self.pos] = rows
        if self.a.cache_dtype == "f16":
            cache = cache.astype(np.float16)
        cache_from_numpy(self.a.cache, cache, self.a.cache_dtype)
        self.s.x.from_numpy(x[None].astype(np.float32))
        self.s.pos[0], self.s.layer_attn[0], self.s.layer_ffn[0] = self.pos, self.number, self.number

    def compare(self, what: str, got: np.ndarray, ref: np.ndarray, tolerance: float = TOLERANCE) -> None:
        """Add a line to the results."""
        self.results.append(Result(what, self.where, relative_error(got, ref), tolerance))

    def _in_bank(self, bank: Any) -> Any:
        """The layer's number within a bank's fields, for stages that take fields alone."""
        self.s.layer_attn[0] = self.number - bank.first
        return self.s.layer_attn

    def _norm(self, bank: Any, name: str, x: np.ndarray) -> np.ndarray:
        norm.rms_norm(self.s.x, getattr(bank, name), self._in_bank(bank), bank.eps, self.s.xn)
        xn = self.s.xn.to_numpy()[0]
        self.compare(f"RMSNorm ({name})", xn, norm.rms_norm_ref(x, self.source.vector(name), self.cfg.rms_eps))
        return xn

    def _projections(self, x: np.ndarray) -> None:
        a, s, source = self.a, self.s, self.source
        xn = self._norm(a, "attn_norm", x)
        linear.matvec_q8(a.proj_q, a.proj_d, self._in_bank(a), s.xn, s.proj)
        self.compare("projection to q and kv_a", s.proj.to_numpy()[0], product(source.blocks("proj"), xn))
        if runtime.caps().gpu:
            linear.norm_matvec_q8(a.proj_q, a.proj_d, self._in_bank(a), s.x, a.attn_norm, a.eps, s.proj)
            ref = product(source.blocks("proj"), norm.rms_norm_ref(x, source.vector("attn_norm"), self.cfg.rms_eps))
            self.compare("RMSNorm and projection in one", s.proj.to_numpy()[0], ref)
        if a.has_q_lora:
            low = s.proj.to_numpy()[0, : self.cfg.q_lora_rank]
            norm.rms_norm(s.proj, a.q_a_norm, self._in_bank(a), a.eps, s.q_low)
            low_n = s.q_low.to_numpy()[0]
            self.compare("RMSNorm (q_a_norm)", low_n, norm.rms_norm_ref(low, source.vector("q_a_norm"), a.eps))
            linear.matvec_q8(a.q_b_q, a.q_b_d, self._in_bank(a), s.q_low, s.q)
            self.compare("projection q_b", s.q.to_numpy()[0], product(source.blocks("q_b"), low_n))
        s.layer_attn[0] = self.number

    def _query_and_row(self) -> None:
        a, s, cfg = self.a, self.s, self.cfg
        h, n, c, width = cfg.n_heads, cfg.qk_nope_head_dim, cfg.kv_lora_rank, cfg.cache_row_width
        absorb.query(a, s.layer_attn, s.q, s.proj, s.rope, s.scale, s.pos, s.qa, s.layer_ffn)
        q = s.q.to_numpy()[0, : h * cfg.qk_head_dim].reshape(h, -1)
        qa = s.qa.to_numpy()[0, :, :width]
        k_b = split(self.source.blocks("k_b" if a.split else "kv_b"))
        ref = absorb.absorb_ref(*k_b, q, n, cfg.v_head_dim, self.scale, split=a.split)
        self.compare(f"absorb ({'split' if a.split else 'unsplit'})", qa[:, :c], ref[:, :c])
        ref = self.scale * rope.rope_ref(q[:, n:], self.table, a.half_pairs)
        self.compare("rope of the queries", qa[:, c:], ref)
        row = s.proj.to_numpy()[0, a.row0 : a.row0 + width]
        ref = cache_row_ref(row, self.source.vector("kv_a_norm"), cfg.rms_eps, self.table, a.half_pairs)
        cached = self._rows()[self.pos]
        tolerance = TOLERANCE_F16_ROW if a.cache_dtype == "f16" else TOLERANCE
        self.compare("latent norm into the cache", cached[:c], ref[:c], tolerance)
        self.compare("rope into the cache", cached[c:], ref[c:], tolerance)

    def _rows(self) -> np.ndarray:
        return self.a.cache_rows(self.pos + 1)[self.number - self.a.first]

    def _attend(self) -> None:
        a, s, cfg = self.a, self.s, self.cfg
        attention_tiles.attend(a, s.layer_attn, s.pos, s.qa, s.attn)
        v_combine.v_combine(a, s.layer_attn, s.pos, s.attn, s.mix, s.o)
        o = s.o.to_numpy()[0]
        qa = s.qa.to_numpy()[0, :, : cfg.cache_row_width]
        mix = attention.attention_ref(self._rows(), qa, cfg.kv_lora_rank)
        v_b = split(self.source.blocks("v_b" if a.split else "kv_b"))
        ref = v_combine.v_combine_ref(*v_b, a.v_stride, a.v_offset, cfg.v_head_dim, mix)
        self.compare(f"attention over {self.pos + 1} rows, v-combine", o, ref)
        before = s.x.to_numpy()[0].astype(np.float64)
        linear.matvec_q8(a.attn_out_q, a.attn_out_d, self._in_bank(a), s.o, s.x, scale=a.residual_scale, add=True)
        ref = cfg.residual_scale * product(self.source.blocks("attn_out"), o)
        self.compare("output projection", s.x.to_numpy()[0] - before, ref)

    def _network(self) -> None:
        f, s, cfg, source = self.f, self.s, self.cfg, self.source
        before = s.x.to_numpy()[0]
        xn = self._norm(f, "ffn_norm", before)
        s.layer_ffn[0] = self.number
        chosen, weight = np.empty(0, int), np.empty(0)
        if f.moe:
            router.router(f, s.layer_ffn, s.xn, s.route)
            chosen, weight = s.route.expert.to_numpy()[0], s.route.weight.to_numpy()[0]
            bias = source.vector("router_bias") if cfg.has_expert_bias else None
            want, ref = router.router_ref(source.vector("router"), bias, f.routing, xn)
            error = relative_error(weight, ref) if np.array_equal(chosen, want) else float("inf")
            self.results.append(Result("router", self.where, error, TOLERANCE))
        ffn_warps.ffn(f, s.layer_ffn, s.xn, s.route, f.hidden, s.x, s.layer_attn)
        out = np.zeros(cfg.dim)
        for e, w in zip(chosen, weight, strict=True):
            out += w * self._network_ref(("gate_exps", "up_exps", "down_exps"), xn, int(e))
        if f.common_ffn_dim:
            out += self._network_ref(("gate", "up", "down"), xn)
        self.compare("FFN", s.x.to_numpy()[0] - before.astype(np.float64), cfg.residual_scale * out)

    def _network_ref(self, names: tuple[str, str, str], xn: np.ndarray, expert: int | None = None) -> np.ndarray:
        """:func:`tmla.stages.ffn.ffn_ref` a slab of activations at a time: float64 [D]."""
        gated = self.f.gated
        up, down = (self.source.blocks(name, expert) for name in names[1:])
        gate = self.source.blocks(names[0], expert) if gated else up
        step = -(-slab_rows(xn.size) // 32) * 32  # whole Q8_0 blocks of the down projection's rows
        out = np.zeros(self.cfg.dim)
        for r in range(0, len(up), step):
            down_part = split(down[:, r // 32 : (r + step) // 32])
            out += ffn_ref(split(gate[r : r + step]), split(up[r : r + step]), down_part, xn, gated=gated)
        return out


def check_ends(gf: GGUFFile, cfg: MLAConfig, g: Any, s: Any, head: Any, token: int, x: np.ndarray) -> list[Result]:
    """Check what lies before and behind the layers: embedding, head, greedy choice.

    Parameters
    ----------
    g, s : Globals, State
    head : callable
        Launches final norm and head.
    token : int
    x : f32 [D]
        Residual behind the last layer.
    """
    embed.embed(g.embd_q, g.embd_d, token, g.embd_scale, s.x)
    row = gf.q8_0_blocks("token_embd.weight")[token : token + 1]
    ref = embed.embed_ref(*split(row), 0, cfg.embd_scale)
    results = [Result("embedding", f"token {token}", relative_error(s.x.to_numpy()[0], ref), TOLERANCE)]
    s.x.from_numpy(x[None].astype(np.float32))
    head()
    logits = s.logits.to_numpy()[0]
    normed = norm.rms_norm_ref(x, gf.array("output_norm.weight"), cfg.rms_eps)
    matrix = "token_embd.weight" if cfg.tied_head else "output.weight"
    ref = cfg.logit_scale * product(gf.q8_0_blocks(matrix), normed)
    results.append(Result("final norm and head", matrix, relative_error(logits, ref), TOLERANCE))
    argmax(s.logits, s.n_choice, s.best, s.who, s.token)
    missed = float(s.token[0] != argmax_ref(logits[: s.n_choice]))
    results.append(Result("greedy choice", f"{s.n_choice} ids", missed, 0.0))
    return results
