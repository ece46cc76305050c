"""One layer, stage by stage, against the NumPy references: every stage gets what the device computed before it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tmla import layer
from tmla.check_weights import Weights, product, slab_rows, split
from tmla.config import MLAConfig
from tmla.gguf_file import GGUFFile
from tmla.stages import absorb, attention, embed, ffn, linear, norm, rope, router, v_combine
from tmla.stages.argmax import argmax, argmax_ref

TOLERANCE = 2e-5  # f32 sums in another order, relative to the largest value: measured 2e-7 .. 3e-6
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
    w : Segment
        Fields of the layer's segment.
    s : State
    index : int
        The layer's number in the segment.
    source : Weights
        The same weights in NumPy.
    where : str
        What the table calls the layer.
    """

    def __init__(self, cfg: MLAConfig, w: Any, s: Any, index: int, source: Weights, where: str):
        self.cfg, self.w, self.s, self.i, self.source, self.where = cfg, w, s, index, source, where
        self.results: list[Result] = []

    def run(self, x: np.ndarray, rows: np.ndarray, *, fused: bool = False) -> list[Result]:
        """Check every stage.

        Parameters
        ----------
        x : f32 [D]
            Residual before the layer.
        rows : f32 or f16 [pos, C + R]
            Cached rows of the positions before this one.
        fused : bool
            Compare the kernel that holds the whole layer with its stages, too.
        """
        self.pos = len(rows)
        n_ctx = self.w.cache.shape[1]
        self.table = self.cfg.rope_table(n_ctx)[self.pos]
        self.scale = self.cfg.softmax_scale * self.cfg.temperature_table(n_ctx)[self.pos]
        self._set(x, rows)
        self._queries(x)
        self._row()
        self._attend()
        self._network()
        if fused:
            after = self.s.x.to_numpy()[0]
            self._set(x, rows)
            layer.layer_fused(self.w, self.s, self.i)
            self._compare("layer in one kernel", self.s.x.to_numpy()[0], after)
        return self.results

    def _compare(self, what: str, got: np.ndarray, ref: np.ndarray, tolerance: float = TOLERANCE) -> None:
        self.results.append(Result(what, self.where, relative_error(got, ref), tolerance))

    def _set(self, x: np.ndarray, rows: np.ndarray) -> None:
        cache = self.w.cache.to_numpy()
        cache[self.i] = np.nan  # rows behind the position must not be read
        cache[self.i, : self.pos] = rows
        self.w.cache.from_numpy(cache)
        self.s.x.from_numpy(x[None].astype(np.float32))
        self.s.pos.from_numpy(np.array([self.pos], np.int32))

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        norm.rms_norm(self.s.x, getattr(self.w, name), self.i, self.w.eps, self.s.xn)
        xn = self.s.xn.to_numpy()[0]
        self._compare(f"RMSNorm ({name})", xn, norm.rms_norm_ref(x, self.source.vector(name), self.cfg.rms_eps))
        return xn

    def _queries(self, x: np.ndarray) -> None:
        w, s, i, n = self.w, self.s, self.i, self.cfg.qk_nope_head_dim
        self.xn = q_in = self._norm("attn_norm", x)
        if w.has_q_lora:
            linear.matvec_q8(w.q_a_q, w.q_a_d, i, s.xn, s.q_low)
            low = s.q_low.to_numpy()[0]
            self._compare("q_a projection", low, product(self.source.blocks("q_a"), self.xn))
            norm.rms_norm(s.q_low, w.q_a_norm, i, w.eps, s.q_low_n)
            q_in = s.q_low_n.to_numpy()[0]
            ref = norm.rms_norm_ref(low, self.source.vector("q_a_norm"), self.cfg.rms_eps)
            self._compare("RMSNorm (q_a_norm)", q_in, ref)
        linear.matvec_q8_heads(w.q_q, w.q_d, i, s.q_low_n if w.has_q_lora else s.xn, s.q)
        q = s.q.to_numpy()[0]
        self._compare("q projection", q, product(self.source.blocks("q"), q_in).reshape(q.shape))
        rope.rope_heads(s.q, w.n_nope, s.rope, s.pos, w.half_pairs)
        ref = np.concatenate([q[:, :n], rope.rope_ref(q[:, n:], self.table, w.half_pairs)], axis=1)
        self._compare("rope of the queries", s.q.to_numpy()[0], ref)

    def _row(self) -> None:
        w, s, i, c = self.w, self.s, self.i, self.cfg.kv_lora_rank
        linear.matvec_q8_heads(w.kv_a_q, w.kv_a_d, i, s.xn, s.row)
        row = s.row.to_numpy()[0, 0]
        self._compare("kv_a projection", row, product(self.source.blocks("kv_a"), self.xn))
        norm.latent_norm(s.row, w.kv_a_norm, i, w.eps, w.cache, s.pos)
        rope.rope_cache(s.row, w.cache, i, w.n_latent, s.rope, s.pos, w.half_pairs)
        cached = w.cache.to_numpy()[i, self.pos]
        tolerance = TOLERANCE_F16_ROW if cached.dtype == np.float16 else TOLERANCE
        ref = norm.rms_norm_ref(row[:c], self.source.vector("kv_a_norm"), self.cfg.rms_eps)
        self._compare("latent norm into the cache", cached[:c], ref, tolerance)
        ref = rope.rope_ref(row[c:], self.table, w.half_pairs)
        self._compare("rope into the cache", cached[c:], ref, tolerance)

    def _attend(self) -> None:
        w, s, i, cfg = self.w, self.s, self.i, self.cfg
        n, v = cfg.qk_nope_head_dim, cfg.v_head_dim
        k_b, v_b = ("k_b", "v_b") if w.split else ("kv_b", "kv_b")
        absorb.absorb(w.k_q, w.k_d, i, s.q, n, v, s.scale, s.pos, s.qa, split=w.split)
        q, qa = s.q.to_numpy()[0], s.qa.to_numpy()[0]
        ref = absorb.absorb_ref(*split(self.source.blocks(k_b)), q, n, v, self.scale, split=w.split)
        self._compare(f"absorb ({'split' if w.split else 'unsplit'})", qa, ref)
        attention.attention(w.cache, i, s.pos, s.qa, s.attn)
        v_combine.join_splits(s.pos, s.attn, s.mix)
        mix = s.mix.to_numpy()
        rows = w.cache.to_numpy()[i, : self.pos + 1]
        self._compare(f"attention over {self.pos + 1} rows", mix, attention.attention_ref(rows, qa, cfg.kv_lora_rank))
        v_combine.v_combine(w.v_q, w.v_d, i, w.v_stride, w.v_offset, s.mix, s.o)
        o = s.o.to_numpy()[0]
        ref = v_combine.v_combine_ref(*split(self.source.blocks(v_b)), w.v_stride, w.v_offset, v, mix)
        self._compare("v-combine", o, ref)
        before = s.x.to_numpy()[0]
        linear.matvec_q8_add(w.attn_out_q, w.attn_out_d, i, w.residual_scale, s.o, s.x)
        added = s.x.to_numpy()[0] - before.astype(np.float64)
        self._compare("output projection", added, cfg.residual_scale * product(self.source.blocks("attn_out"), o))

    def _network(self) -> None:
        w, s, i, cfg, source = self.w, self.s, self.i, self.cfg, self.source
        before = s.x.to_numpy()[0]
        xn = self._norm("ffn_norm", before)
        chosen, weight = np.empty(0, int), np.empty(0)
        if w.moe:
            router.router(w, i, s.xn, s.route)
            chosen, weight = s.route.expert.to_numpy()[0], s.route.weight.to_numpy()[0]
            bias = source.vector("router_bias") if cfg.has_expert_bias else None
            want, ref = router.router_ref(source.vector("router"), bias, w.routing, xn)
            same = np.array_equal(chosen, want)
            error = relative_error(weight, ref) if same else float("inf")
            self.results.append(Result("router", self.where, error, TOLERANCE))
        ffn.ffn_up(w, i, s.xn, s.route, s.hidden)
        parts = [weight[k] * self._up("gate_exps", "up_exps", xn, int(e)) for k, e in enumerate(chosen)]
        if w.common_ffn_dim:
            parts.append(self._up("gate", "up", xn))
        ref = np.concatenate(parts)
        hidden = s.hidden.to_numpy()[0, : ref.size]
        self._compare("FFN gate and up", hidden, ref)
        ffn.ffn_down(w, i, w.residual_scale, s.route, s.hidden, s.x)
        down = np.zeros(cfg.dim)
        for k, e in enumerate(chosen):
            inner = hidden[k * w.expert_ffn_dim : (k + 1) * w.expert_ffn_dim]
            down += product(source.blocks("down_exps", int(e)), inner)
        if w.common_ffn_dim:
            down += product(source.blocks("down"), hidden[len(chosen) * w.expert_ffn_dim :])
        added = s.x.to_numpy()[0] - before.astype(np.float64)
        self._compare("FFN down", added, cfg.residual_scale * down)

    def _up(self, gate: str, up: str, xn: np.ndarray, expert: int | None = None) -> np.ndarray:
        gated = self.w.gated
        up_blocks = self.source.blocks(up, expert)
        gate_blocks = self.source.blocks(gate, expert) if gated else up_blocks
        step = slab_rows(xn.size)
        parts = [
            ffn.ffn_up_ref(split(gate_blocks[r : r + step]), split(up_blocks[r : r + step]), xn, gated=gated)
            for r in range(0, len(up_blocks), step)
        ]
        return np.concatenate(parts)


def check_ends(gf: GGUFFile, cfg: MLAConfig, g: Any, s: Any, token: int, x: np.ndarray) -> list[Result]:
    """Check what lies before and behind the layers: embedding, head, greedy choice.

    Parameters
    ----------
    g, s : Globals, State
    token : int
    x : f32 [D]
        Residual behind the last layer.
    """
    embed.embed(g.embd_q, g.embd_d, token, g.embd_scale, s.x)
    row = gf.q8_0_blocks("token_embd.weight")[token : token + 1]
    ref = embed.embed_ref(*split(row), 0, cfg.embd_scale)
    results = [Result("embedding", f"token {token}", relative_error(s.x.to_numpy()[0], ref), TOLERANCE)]
    s.x.from_numpy(x[None].astype(np.float32))
    layer.head(g, s)
    logits = s.logits.to_numpy()[0]
    normed = norm.rms_norm_ref(x, gf.array("output_norm.weight"), cfg.rms_eps)
    head = "token_embd.weight" if cfg.tied_head else "output.weight"
    ref = cfg.logit_scale * product(gf.q8_0_blocks(head), normed)
    results.append(Result("final norm and head", head, relative_error(logits, ref), TOLERANCE))
    argmax(s.logits, s.n_choice, s.token)
    missed = float(s.token[0] != argmax_ref(logits[: s.n_choice]))
    results.append(Result("greedy choice", f"{s.n_choice} ids", missed, 0.0))
    return results
