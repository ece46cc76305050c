"""Compares what this machine and backend compute with NumPy: every stage, one layer of a kind, the whole model."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tmla import reference
from tmla.check_extent import Extent, choose_extent, fewer_layers, values_per_second
from tmla.check_layer import TOLERANCE, LayerCheck, Result, check_ends, relative_error
from tmla.check_shapes import check_odd_shapes
from tmla.check_weights import FileWeights, split
from tmla.errors import ContextError, NumericsError
from tmla.loading import load
from tmla.model import Model
from tmla.requantize import open_checked
from tmla.stages.embed import embed_ref

TOLERANCE_MODEL = 1e-4  # of the standard deviation: f32 arithmetic reaches 1e-5
NEAR_TIE = 1e-5  # router scores closer than this may order differently in f32
N_CTX = 128
STAGE_POSITION = 67  # rows in the cache when a layer's stages are checked: three tiles
N_ROWS_LONG = 1 << 20  # a context so long that kernels for long ones run
MAX_REFERENCE_S = 60.0  # what the float64 reference may take unless a prompt length was asked for


@dataclasses.dataclass
class Report:
    """All results, and sentences about what was done."""

    arch: str
    results: list[Result]
    notes: list[str]

    @property
    def ok(self) -> bool:
        """True when no error is above its tolerance."""
        return all(r.ok for r in self.results)


def run_check(
    path: Any,
    *,
    arch: str | None = None,
    n_tokens: int | None = None,
    threads: int | None = None,
    overrides: dict[str, Any] | None = None,
    requantize: bool = False,
    step: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    max_reference_s: float = MAX_REFERENCE_S,
) -> Report:
    """Check a file on this machine.

    Parameters
    ----------
    path, arch, threads, overrides, requantize
        As for :func:`tmla.load`.
    n_tokens : int, optional
        Prompt length, 2 to ``N_CTX``. Default 8, fewer where the reference would take more than `max_reference_s`; then
        also fewer layers. Asked for, it is kept, and all layers run.
    step : callable, optional
        Called with the name of each part, gives a context manager around it, whose value may be a `progress` for
        :func:`tmla.load`.
    max_reference_s : float
        Seconds.

    Returns
    -------
    Report

    Raises
    ------
    TmlaError
        As :func:`tmla.load`; ContextError for a prompt length that is not possible.
    """
    if n_tokens is not None and not 2 <= n_tokens <= N_CTX:
        raise ContextError(
            f"a check of {n_tokens} tokens was asked for, expected 2 (position 0 has no rope) to {N_CTX}"
        )
    gf, cfg = open_checked(path, overrides=overrides, requantize=requantize)
    with gf:
        if n_tokens is None:
            extent = choose_extent(cfg, values_per_second(gf), max_reference_s)
        else:
            extent = Extent(n_tokens, cfg.n_layers, 0.0)
        overrides = (overrides or {}) | fewer_layers(gf, cfg, extent.n_layers)
    with step("loading") as progress:
        if not callable(progress):
            progress = None
        model = load(
            path,
            arch=arch,
            n_ctx=N_CTX,
            cache_dtype="f32",
            overrides=overrides,
            progress=progress,
            threads=threads,
            requantize=requantize,
        )
    tokens = np.random.default_rng(0).integers(0, cfg.n_vocab, extent.n_tokens).tolist()
    report = check_model(model, path, tokens, overrides=overrides, requantize=requantize, step=step)
    if extent.n_layers < cfg.n_layers:
        report.notes.append(f"the first {extent.n_layers} of {cfg.n_layers} layers were loaded and checked")
    return report


def check_model(
    model: Model,
    path: Any,
    tokens: list[int],
    *,
    overrides: dict[str, Any] | None = None,
    requantize: bool = False,
    step: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Report:
    """Check a loaded model with an f32 cache of at least ``STAGE_POSITION + 1`` positions; its cache is reset.

    Parameters
    ----------
    path : str or os.PathLike
        Its file, for the reference; `overrides` and `requantize` as it was loaded.
    tokens : list of int
        Prompt.
    step : callable
        As for :func:`run_check`.
    """
    report = Report(model.arch, [], [])
    with step("stages on odd shapes"):
        report.results += check_odd_shapes(model.config)
    start = time.perf_counter()
    with step(f"float64 reference of {len(tokens)} tokens"):
        trace = reference.trace(path, tokens, model.n_ctx, overrides=overrides, requantize=requantize)
    reference_s = time.perf_counter() - start
    report.notes.append(
        f"model rows: {len(tokens)} tokens through {model.config.n_layers} layers, f32 cache, against tmla.reference "
        f"(float64, attention expanded; {reference_s:.1f} s), in standard deviations; other rows relative to the "
        "largest value"
    )
    with step("the whole model"):
        report.results += compare_model(model, tokens, trace, report.notes)
    with step("stages on the file's weights"):
        report.results += _check_file_stages(model, tokens, trace)
    return report


def compare_model(model: Model, tokens: list[int], trace: reference.Trace, notes: list[str]) -> list[Result]:
    """Walk the fused layers one by one, then prefill and decode as a caller would."""
    where = f"{len(tokens)} tokens"
    hidden, n_same, gap = _walk(model, tokens, trace, notes)
    results = []
    if model.config.n_moe_layers:
        results.append(Result("experts chosen", where, gap, NEAR_TIE))
    worst = [_deviation(hidden[l, :n_same], trace.hidden[l, :n_same]) for l in range(len(hidden))]
    results.append(_worst("residual behind each layer", worst))
    cache = np.concatenate([bank.cache_rows(len(tokens)) for bank in model.attention_banks])
    worst = [_deviation(cache[l, :n_same], trace.cache[l, :n_same]) for l in range(len(cache))]
    results.append(_worst("cache rows", worst))
    try:
        model.reset()
        whole = model.prefill(tokens, all_logits=True)
        model.reset()
        single = np.stack([model.decode(token) for token in tokens])
    except NumericsError:
        whole = single = np.full(trace.logits.shape, np.nan)
    for what, got in (
        ("logits of prefill", whole),
        ("logits of decode", single),
        ("logits of a chunk, absorbed", _chunk_logits(model, tokens, expand=False)),
        ("logits of a chunk, expanded", _chunk_logits(model, tokens, expand=True)),
    ):
        n = min(n_same, len(got))
        results.append(Result(what, where, _deviation(got[:n], trace.logits[:n]), TOLERANCE_MODEL))
    return results


def _chunk_logits(model: Model, tokens: list[int], *, expand: bool) -> np.ndarray:
    """Logits behind as many of the tokens as one chunk takes, however few they are, in one form of attention."""
    tokens = tokens[: model._prefill.chunk.n_tokens]
    model._prefill.run(tokens, 0, expand=expand)
    return np.vstack([*model._prefill.logits(len(tokens))])


def _walk(model: Model, tokens: list[int], trace: reference.Trace, notes: list[str]) -> tuple[np.ndarray, int, float]:
    """Feed the tokens a layer at a time.

    Returns
    -------
    hidden : f32 [L, T, D]
        Residual behind every layer.
    n_same : int
        Leading positions that chose the reference's experts in every layer.
    gap : float
        How far apart the scores lay where the choice first differed; 0 if it never did.
    """
    cfg, steps, s = model.config, model._steps, model._state
    hidden = np.empty(trace.hidden.shape, np.float32)
    n_same, gap = len(tokens), 0.0
    model.reset()
    for pos, token in enumerate(tokens):
        steps.begin(token, pos)
        for number, moe in enumerate(cfg.is_moe_layer):
            steps.run_layer(number, pos + 1)
            hidden[number, pos] = s.x.to_numpy()[0]
            if not moe or n_same < len(tokens):
                continue
            want = set(trace.experts[sum(cfg.is_moe_layer[:number]), pos].tolist())
            got = set(s.route.expert.to_numpy()[0].tolist())
            if got != want:
                n_same, gap = pos, _score_gap(model, number, sorted(got - want), sorted(want - got))
                notes.append(
                    f"position {pos}, layer {number}: experts {sorted(got)} on the device, {sorted(want)} in the "
                    f"reference, scores {gap:.1e} apart; model rows end before it"
                )
    return hidden, n_same, gap


def _score_gap(model: Model, number: int, got: list[int], want: list[int]) -> float:
    """Distance of the scores that decided otherwise, relative to the best: near ties may order differently in f32."""
    logit = model._state.route.logit.to_numpy()[0].astype(np.float64)
    if model.config.gating == "sigmoid":
        rank = 1.0 / (1.0 + np.exp(-logit))
    else:
        rank = np.exp(logit - logit.max()) / np.exp(logit - logit.max()).sum()
    if model.config.has_expert_bias:
        rank += FileWeights(model.file, model.config, number).vector("router_bias")
    gap = float(np.abs(rank[got].max() - rank[want].min()))
    return gap / (float(np.abs(rank).max()) or 1.0)


def _deviation(got: np.ndarray, ref: np.ndarray) -> float:
    """Largest error in standard deviations of the reference; 0 of nothing."""
    if not got.size:
        return 0.0
    return relative_error(got, ref) * float(np.abs(ref).max()) / (float(ref.std()) or 1.0)


def _worst(what: str, errors: list[float]) -> Result:
    number = int(np.argmax(errors))
    return Result(what, f"worst in layer {number}", errors[number], TOLERANCE_MODEL)


def _check_file_stages(model: Model, tokens: list[int], trace: reference.Trace) -> list[Result]:
    """Stages of the first dense and the first mixture layer, on real residuals and cache rows; then both ends."""
    cfg, s, rng = model.config, model._state, np.random.default_rng(1)
    row = model.file.q8_0_blocks("token_embd.weight")[tokens[-1] : tokens[-1] + 1]
    results = []
    for moe in (False, True):
        if moe not in cfg.is_moe_layer:
            continue
        number = cfg.is_moe_layer.index(moe)
        x = embed_ref(*split(row), 0, cfg.embd_scale) if number == 0 else trace.hidden[number - 1, -1]
        rows = trace.cache[number, rng.integers(0, len(tokens), STAGE_POSITION)]
        rows = rows * rng.uniform(0.5, 1.5, (STAGE_POSITION, 1))  # like the model's own, and no two the same
        where = f"layer {number} ({'mixture' if moe else 'dense'})"
        a, f = (_bank_of(banks, number) for banks in (model.attention_banks, model.ffn_banks))
        check = LayerCheck(cfg, a, f, s, number, FileWeights(model.file, cfg, number), where)
        results += check.run(x.astype(np.float32), rows.astype(np.float32))
        after = s.x.to_numpy()[0]
        kernels = {"layer in few kernels": STAGE_POSITION + 1}
        if model._steps.layers is not model._steps.layers_short:
            kernels["the same for long contexts"] = N_ROWS_LONG
        for what, n_rows in kernels.items():
            check.place(x, rows)
            model._steps.run_layer(number, n_rows)
            results.append(Result(what, where, relative_error(s.x.to_numpy()[0], after), TOLERANCE))
    head = model._steps.head
    results += check_ends(model.file, cfg, model._globals, s, head, tokens[-1], trace.hidden[-1, -1])
    model.reset()
    return results


def _bank_of(banks: list[Any], number: int) -> Any:
    return next(b for b in banks if b.first <= number < b.first + b.n)
