"""The whole model in NumPy float64, a prompt at a time, attention expanded: slow, independent, and meant to be read.

Multi-head Latent Attention keeps two things of a position: a latent `c_kv` [C] and a rotated key part `k_pe` [R], which
all heads share. Here the keys and values of each head are expanded from the latent, as the model was trained:

    c_kv = rms_norm(x W_a)[:C]             k_pe = rope(x W_a)[C:]
    k    = [c_kv W_uk ; k_pe]              v    = c_kv W_uv                 per head, N + R and V wide
    out  = softmax(q k^T * softmax_scale) v

The kernels never do this: they move W_uk to the query's side (absorption). So agreement between the two says something.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tmla import rope
from tmla.config import MIN_WEIGHT_SUM
from tmla.errors import ContextError, TmlaError
from tmla.reference_weights import Weights
from tmla.requantize import open_checked


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a forward pass went through at its T positions; float64, but for `experts`."""

    logits: np.ndarray  # [T, n_vocab]
    hidden: np.ndarray  # [L, T, D] residual stream after each layer
    cache: np.ndarray  # [L, T, C + R] what a latent cache holds: normalised latent, then the rotated key part
    experts: np.ndarray  # i64 [n_moe_layers, T, K], best first
    expert_weights: np.ndarray  # [n_moe_layers, T, K], as they multiply the experts' outputs


def logits(
    path: str | os.PathLike,
    tokens: Sequence[int] | np.ndarray,
    *,
    n_ctx: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    requantize: bool = False,
) -> np.ndarray:
    """Return the logits of every position, float64 [T, n_vocab]. Parameters and errors as for :func:`trace`."""
    return trace(path, tokens, n_ctx, overrides=overrides, requantize=requantize).logits


def trace(
    path: str | os.PathLike,
    tokens: Sequence[int] | np.ndarray,
    n_ctx: int | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    requantize: bool = False,
) -> Trace:
    """Run a prompt and keep what it went through.

    Parameters
    ----------
    path : str or os.PathLike
        GGUF file, or any shard of one.
    tokens : sequence of int
        Ids of the prompt, T >= 1; nothing is added to it.
    n_ctx : int, optional
        Context that a model would allocate, by default T. It matters for files with long and short rope factors only.
    overrides : dict, optional
        Metadata keys to replace or add.
    requantize : bool
        Take matrices of other types as the Q8_0 that :mod:`tmla.requantize` makes of them, as a model does.

    Returns
    -------
    Trace

    Raises
    ------
    GGUFError
        The file is not one that tmla runs.
    ContextError, TmlaError
        No tokens, more than `n_ctx`, or an id outside the vocabulary.
    """
    gf, cfg = open_checked(path, overrides=overrides, requantize=requantize)
    with gf:
        ids = _checked_tokens(tokens, n_ctx, cfg.n_vocab)
        return _forward(Weights(gf), cfg, ids, n_ctx or len(ids))


def _checked_tokens(tokens, n_ctx, n_vocab):
    tokens = np.asarray(tokens, np.int64)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ContextError(f"prompt of shape {list(tokens.shape)}, expected one row of at least one token id")
    if n_ctx is not None and tokens.size > n_ctx:
        raise ContextError(f"prompt of {tokens.size} tokens, expected at most n_ctx = {n_ctx}; raise n_ctx")
    if tokens.min() < 0 or tokens.max() >= n_vocab:
        raise TmlaError(f"token ids from {tokens.min()} to {tokens.max()}, expected 0 to {n_vocab - 1}")
    return tokens


def _forward(w, cfg, tokens, n_ctx):
    turns = np.arange(tokens.size)[:, None] * rope.rope_frequencies(cfg, n_ctx)  # [T, R/2] angles
    temperature = rope.temperature(cfg, tokens.size)
    x = w.rows("token_embd.weight", tokens) * cfg.embd_scale
    hidden, cache, routes = [], [], []
    for layer, is_moe in enumerate(cfg.is_moe_layer):
        block = f"blk.{layer}."
        normed = rms_norm(x, w.vector(block + "attn_norm.weight"), cfg.rms_eps)
        branch, rows = attention(w, cfg, block, normed, turns, temperature)
        x = x + cfg.residual_scale * branch
        normed = rms_norm(x, w.vector(block + "ffn_norm.weight"), cfg.rms_eps)
        if is_moe:
            branch, route = experts_ffn(w, cfg, block, normed)
            routes.append(route)
        else:
            branch = dense_ffn(w, cfg, block, normed, "")
        x = x + cfg.residual_scale * branch
        hidden.append(x)
        cache.append(rows)
    normed = rms_norm(x, w.vector("output_norm.weight"), cfg.rms_eps)
    out = w.linear(normed, "token_embd.weight" if cfg.tied_head else "output.weight") * cfg.logit_scale
    chosen, weights = zip(*routes) if routes else ((), ())
    per_layer = (cfg.n_moe_layers, tokens.size, cfg.n_experts_used)
    return Trace(
        logits=out,
        hidden=np.stack(hidden),
        cache=np.stack(cache),
        experts=np.asarray(chosen, np.int64).reshape(per_layer),
        expert_weights=np.asarray(weights, np.float64).reshape(per_layer),
    )


def rms_norm(x, weight, eps):
    """Scale each row to a root mean square of one, then by `weight`: [T, I], [I] -> [T, I]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, turns, pairs, magnitude):
    """Turn the pairs of the last axis by their angles: [T, ..., R], [T, R/2] -> [T, ..., R].

    `pairs` is "consecutive", (2i, 2i + 1), or "half", (i, i + R/2).
    """
    turns = turns.reshape(turns.shape[0], *(1,) * (x.ndim - 2), turns.shape[1])
    cos, sin = magnitude * np.cos(turns), magnitude * np.sin(turns)
    half = x.shape[-1] // 2
    if pairs == "consecutive":
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        first, second = slice(half), slice(half, None)
    a, b = x[..., first], x[..., second]
    out = np.empty_like(x)
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def attention(w, cfg, block, x, turns, temperature):
    """Causal attention of one layer, expanded.

    Parameters
    ----------
    x : float64 [T, D]
        Normalised input.
    turns : float64 [T, R/2]
    temperature : float64 [T]
        Factor on the scores of each query.

    Returns
    -------
    out : float64 [T, D]
    rows : float64 [T, C + R]
        What a latent cache keeps: all that later positions need of these.
    """
    n_tokens, h, c, n, v = len(x), cfg.n_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.v_head_dim

    if cfg.q_lora_rank:
        c_q = rms_norm(w.linear(x, block + "attn_q_a.weight"), w.vector(block + "attn_q_a_norm.weight"), cfg.rms_eps)
        q = w.linear(c_q, block + "attn_q_b.weight")
    else:
        q = w.linear(x, block + "attn_q.weight")
    q = q.reshape(n_tokens, h, n + cfg.qk_rope_head_dim)
    q_nope, q_pe = q[..., :n], rotate(q[..., n:], turns, cfg.rope_pairs, cfg.rope_magnitude)

    kv_a = w.linear(x, block + "attn_kv_a_mqa.weight")
    c_kv = rms_norm(kv_a[:, :c], w.vector(block + "attn_kv_a_norm.weight"), cfg.rms_eps)
    k_pe = rotate(kv_a[:, c:], turns, cfg.rope_pairs, cfg.rope_magnitude)

    future = np.triu(np.full((n_tokens, n_tokens), -np.inf), 1)
    heads = np.empty((n_tokens, h, v))
    for head in range(h):
        w_uk, w_uv = head_expansion(w, cfg, block, head)
        k_nope, value = c_kv @ w_uk, c_kv @ w_uv
        scores = (q_nope[:, head] @ k_nope.T + q_pe[:, head] @ k_pe.T) * (cfg.softmax_scale * temperature[:, None])
        heads[:, head] = softmax(scores + future) @ value
    out = w.linear(heads.reshape(n_tokens, h * v), block + "attn_output.weight")
    return out, np.concatenate([c_kv, k_pe], axis=1)


def head_expansion(w, cfg, block, head):
    """Return what expands the latent for one head: `w_uk` [C, N] to the key, `w_uv` [C, V] to the value.

    A split file has them as attn_k_b [H, C, N] and attn_v_b [H, V, C]; in an unsplit one, each head has N key rows and
    then V value rows of attn_kv_b.
    """
    if cfg.kv_b_split:
        return w.part(block + "attn_k_b.weight", head), w.part(block + "attn_v_b.weight", head).T
    n, v = cfg.qk_nope_head_dim, cfg.v_head_dim
    rows = w.slab(block + "attn_kv_b.weight", head * (n + v), (head + 1) * (n + v))
    return rows[:n].T, rows[n:].T


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sigmoid(x):
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right 0
        return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def dense_ffn(w, cfg, block, x, suffix):
    """SwiGLU, or squared ReLU without a gate: [T, D] -> [T, D]. `suffix` is "" or "_shexp" for the shared experts."""
    up = w.linear(x, f"{block}ffn_up{suffix}.weight")
    if cfg.ffn_act == "relu2":
        inner = np.maximum(up, 0.0) ** 2
    else:
        inner = silu(w.linear(x, f"{block}ffn_gate{suffix}.weight")) * up
    return w.linear(inner, f"{block}ffn_down{suffix}.weight")


def experts_ffn(w, cfg, block, x):
    """Shared experts plus the chosen ones: [T, D] -> [T, D], and the choice ([T, K], [T, K])."""
    scores = x @ w.vector(block + "ffn_gate_inp.weight").T
    bias = w.vector(block + "exp_probs_b.bias") if cfg.has_expert_bias else 0.0
    chosen, weights = choose_experts(cfg, scores, bias)
    out = dense_ffn(w, cfg, block, x, "_shexp") if cfg.shared_ffn_dim else np.zeros_like(x)
    for expert in np.unique(chosen):
        token, slot = np.nonzero(chosen == expert)  # the tokens that go there
        inner = _expert_gate_up(w, cfg, block, expert, x[token])
        out[token] += weights[token, slot][:, None] * w.linear(inner, block + "ffn_down_exps.weight", expert)
    return out, (chosen, weights)


def _expert_gate_up(w, cfg, block, expert, x):
    if cfg.fused_gate_up:
        gate, up = np.split(w.linear(x, block + "ffn_gate_up_exps.weight", expert), 2, axis=1)
    else:
        gate = w.linear(x, block + "ffn_gate_exps.weight", expert)
        up = w.linear(x, block + "ffn_up_exps.weight", expert)
    return silu(gate) * up


def choose_experts(cfg, scores, bias):
    """Choose K experts per token: router scores [T, E] and bias [E] -> experts i64 [T, K] (best first), weights [T, K].

    The bias takes part in the choice only. Of equal experts the one with the lower index is better.
    """
    probs = softmax(scores) if cfg.gating == "softmax" else sigmoid(scores)
    rank = probs + bias
    if cfg.n_expert_groups > 1:
        rank = np.where(_in_best_groups(cfg, rank), rank, -np.inf)
    chosen = np.argsort(-rank, axis=1, kind="stable")[:, : cfg.n_experts_used]
    weights = np.take_along_axis(probs, chosen, axis=1)
    if cfg.expert_weights_norm:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), MIN_WEIGHT_SUM)
    return chosen, weights * cfg.expert_weights_scale


def _in_best_groups(cfg, rank):
    """Return bool [T, E]: is the expert in one of the groups whose two best experts together rank highest?"""
    groups = rank.reshape(len(rank), cfg.n_expert_groups, -1)
    strength = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argsort(-strength, axis=1, kind="stable")[:, : cfg.n_expert_groups_used]
    allowed = np.zeros(strength.shape, bool)
    np.put_along_axis(allowed, best, True, axis=1)
    return np.repeat(allowed, groups.shape[2], axis=1)
