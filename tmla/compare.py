"""A model's logits against those that another engine left in a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tmla.errors import ContextError, ParameterError
from tmla.log_probs import blocks, log_softmax, rows_at_a_time
from tmla.logits_file import LogitsFile


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """One number a position, in the order of the file; *there* is the file, *here* the model.

    Attributes
    ----------
    kl : np.ndarray, float64 [T]
        KL(there || here) in nats: ``sum p_there (log p_there - log p_here)`` over the vocabulary.
    error : np.ndarray, float64 [T]
        Largest difference of a logit, in units of the standard deviation of the file's logits at that position.
    best_there, best_here : np.ndarray, int64 [T]
        The tokens with the largest logit.
    nats_there, nats_here : np.ndarray, float64 [T]
        Cross entropy of the token that follows in the same window; NaN behind the last of each.
    tokens, starts : np.ndarray, int64 [T] and [W]
        Of the file.
    n_vocab : int
    """

    kl: np.ndarray
    error: np.ndarray
    best_there: np.ndarray
    best_here: np.ndarray
    nats_there: np.ndarray
    nats_here: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray
    n_vocab: int

    @property
    def top1_agreement(self) -> float:
        """Share of positions at which both have the same best token."""
        return float((self.best_there == self.best_here).mean())

    @property
    def perplexity_there(self) -> float:
        """Of the tokens that follow others in their window; NaN if none does."""
        return _perplexity(self.nats_there)

    @property
    def perplexity_here(self) -> float:
        """The same from the model's logits."""
        return _perplexity(self.nats_here)

    def worst(self, n: int = 5) -> list[int]:
        """The `n` positions of largest KL, the worst first."""
        return np.argsort(-self.kl, kind="stable")[:n].tolist()

    def summary(self) -> dict[str, Any]:
        """All in numbers, for JSON: mean, median, 99 % and maximum of `kl` and `error`, agreement, perplexities."""
        return {
            "positions": len(self.kl),
            "windows": len(self.starts),
            "vocabulary": self.n_vocab,
            "kl_nats": _spread(self.kl),
            "max_error_sigma": _spread(self.error),
            "top1_agreement": self.top1_agreement,
            "perplexity_there": _or_none(self.perplexity_there),
            "perplexity_here": _or_none(self.perplexity_here),
            "worst": [
                {
                    "position": i,
                    "token": int(self.tokens[i]),
                    "kl_nats": float(self.kl[i]),
                    "max_error_sigma": float(self.error[i]),
                    "best_there": int(self.best_there[i]),
                    "best_here": int(self.best_here[i]),
                }
                for i in self.worst()
            ],
        }


def compare(
    model: Any, logits: str | os.PathLike[str] | LogitsFile, *, progress: Callable[[int, int], None] | None = None
) -> Comparison:
    """Compute the logits of a file's tokens and compare them with the file's.

    Parameters
    ----------
    model : Model
        Is reset.
    logits : str, os.PathLike or LogitsFile
        See :mod:`tmla.logits_file`. A file that is open is read to its end.
    progress : callable, optional
        Called with (positions done, positions in all).

    Returns
    -------
    Comparison

    Raises
    ------
    ParameterError
        The file is not of the form, is damaged, or has another vocabulary than the model.
    ContextError
        A window is longer than the model's context.
    NumericsError
        The model's logits are not finite.
    """
    if not isinstance(logits, LogitsFile):
        with LogitsFile(logits) as f:
            return compare(model, f, progress=progress)
    f, n_vocab = logits, model.config.n_vocab
    if f.n_vocab != n_vocab:
        raise ParameterError(
            f"{f.name}: has logits of {f.n_vocab:,} tokens, the model's vocabulary has {n_vocab:,}; give the logits of "
            "this model, without padding cut or added"
        )
    if f.longest > model.n_ctx:
        raise ContextError(
            f"{f.name}: has a window of {f.longest} tokens, but the context holds {model.n_ctx}; load with "
            f"n_ctx={f.longest} or more"
        )
    out, done, step = _columns(len(f.tokens)), 0, rows_at_a_time(n_vocab)
    for window in f.windows():
        model.reset()
        for at in range(0, len(window), step):
            part = window[at : at + step]
            following = window[at + 1 : at + 1 + len(part)]
            here, there = model.prefill(part.tolist(), all_logits=True), f.read(len(part))
            for rows in blocks(len(part), n_vocab):
                target = {name: column[done + rows.start : done + rows.stop] for name, column in out.items()}
                _compare_rows(there[rows], here[rows], following[rows], target)
            done += len(part)
            if progress is not None:
                progress(done, len(f.tokens))
    return Comparison(**out, tokens=f.tokens, starts=f.starts, n_vocab=n_vocab)


def _columns(n: int) -> dict[str, np.ndarray]:
    out = {name: np.full(n, np.nan) for name in ("kl", "error", "nats_there", "nats_here")}
    return out | {name: np.zeros(n, np.int64) for name in ("best_there", "best_here")}


def _compare_rows(there: np.ndarray, here: np.ndarray, following: np.ndarray, out: dict[str, np.ndarray]) -> None:
    """Fill some rows of the columns; `following` may be one shorter, at the end of a window."""
    p, q, rows = log_softmax(there), log_softmax(here), np.arange(len(following))
    out["kl"][:] = np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)  # rounding may leave -1e-17
    out["best_there"][:], out["best_here"][:] = there.argmax(-1), here.argmax(-1)
    out["nats_there"][: len(rows)], out["nats_here"][: len(rows)] = -p[rows, following], -q[rows, following]
    difference, sigma = np.abs(there.astype(np.float64) - here).max(-1), there.astype(np.float64).std(-1)
    out["error"][:] = difference / np.maximum(sigma, 1e-30)  # logits that are all equal have no scale


def _perplexity(nats: np.ndarray) -> float:
    known = nats[np.isfinite(nats)]
    return float(np.exp(known.mean())) if known.size else float("nan")


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.quantile(values, 0.99)),
        "max": float(values.max()),
    }


def _or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None
