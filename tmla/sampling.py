"""Chooses the next token from one row of logits."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .errors import NumericsError, ParameterError

_COLUMN = 64  # logits that share one maximum, at most, when the best few are looked for
_DRAW_BLOCK = 256
_SAMPLED = 16  # every so-manieth token of a row is looked at to guess where its nucleus ends


class Sampler:
    """Greedy or random choice, with the filters that users know.

    Order: logit bias, penalties, top-k, top-p, min-p, XTC, temperature, as in llama.cpp; so top-p and min-p judge the
    probabilities at temperature 1.

    Parameters
    ----------
    temperature : float
        0 takes the best token (the lowest id of equals) and ignores the filters.
    top_k : int
        Keep the best `top_k` tokens; 0 keeps all.
    top_p : float
        Keep the fewest best tokens that hold this much probability; 1 keeps all.
    min_p : float
        Keep tokens at least this probable relative to the best; 0 keeps all.
    seed : int, optional
        Of the NumPy Generator. The same seed gives the same choices from the same logits.
    repeat_penalty : float
        Logits of tokens seen are divided by it if positive, else multiplied; 1 is off.
    presence_penalty, frequency_penalty : float
        Subtracted from the logit of a token seen, once and once per time.
    penalty_last_n : int
        How much of the history the three look at; -1 is all.
    logit_bias : dict of int to float, optional
        Added to the logits; minus infinity forbids a token.
    xtc_probability, xtc_threshold : float
        With this chance, leave out all tokens of at least that probability but the least probable of them.
    banned : iterable of int
        Tokens that are never chosen.
    n_vocab : int, optional
        Tokens the tokenizer knows. Logits may be wider; the rest is padding and never chosen.

    Raises
    ------
    ParameterError
        A value is out of its range; the message names it.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        *,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        penalty_last_n: int = 64,
        logit_bias: Mapping[int, float] | None = None,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        banned: Iterable[int] = (),
        n_vocab: int | None = None,
    ):
        self.temperature = _number("temperature", temperature, 0.0, math.inf)
        self.top_k = _integer("top_k", top_k, 0)
        self.top_p = _number("top_p", top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParameterError(
                "top_p is 0, expected more than 0 and at most 1; for the best token give temperature 0"
            )
        self.min_p = _number("min_p", min_p, 0.0, 1.0)
        self.repeat_penalty = _number("repeat_penalty", repeat_penalty, 0.0, math.inf)
        if self.repeat_penalty == 0.0:
            raise ParameterError("repeat_penalty is 0, expected more than 0; 1 turns it off")
        self.presence_penalty = _number("presence_penalty", presence_penalty, -math.inf, math.inf)
        self.frequency_penalty = _number("frequency_penalty", frequency_penalty, -math.inf, math.inf)
        self.penalty_last_n = _integer("penalty_last_n", penalty_last_n, -1)
        self.xtc_probability = _number("xtc_probability", xtc_probability, 0.0, 1.0)
        self.xtc_threshold = _number("xtc_threshold", xtc_threshold, 0.0, 1.0)
        self.n_vocab = None if n_vocab is None else _integer("n_vocab", n_vocab, 1)
        bias = dict(logit_bias or {})
        self._bias_ids = np.array([_integer("logit_bias token", i, 0) for i in bias], np.int64)
        self._bias = np.array([_bias(i, b) for i, b in bias.items()], np.float32)
        self._is_banned = frozenset(_integer("banned token", i, 0) for i in banned)
        self._banned = np.array(sorted(self._is_banned), np.int64)
        self._buffers = [np.empty(0, np.float32) for _ in range(2)]
        self._rng = np.random.default_rng(None if seed is None else _integer("seed", seed, 0))

    @property
    def is_plain_greedy(self) -> bool:
        """The choice is the plain maximum (but for banned tokens), so a device may make it."""
        return self.temperature == 0.0 and not self._penalises and not self._bias_ids.size

    @property
    def _penalises(self) -> bool:
        on = self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return on and self.penalty_last_n != 0

    def is_banned(self, token: int) -> bool:
        """Say whether `token` is never chosen."""
        return token in self._is_banned or (self.n_vocab is not None and token >= self.n_vocab)

    def __call__(self, logits: np.ndarray, history: Sequence[int] = ()) -> int:
        """Choose a token.

        Parameters
        ----------
        logits : np.ndarray, f32 [V]
            Left as it is. Minus infinity is allowed and never chosen.
        history : sequence of int
            Tokens so far, prompt included; read by the penalties only.

        Raises
        ------
        NumericsError
            A logit is NaN or plus infinity, or no token is left.
        ParameterError
            `logits` is not one row, or a biased token is outside it.
        """
        if logits.ndim != 1 or not logits.size:
            raise ParameterError(f"logits have shape {logits.shape}, expected one row [V]; give the last position's")
        x = self._adjusted(logits[: self.n_vocab], history)
        best = int(x.argmax())  # the first NaN, if there is one
        top = float(x[best])
        if not math.isfinite(top):
            if top == -math.inf:
                raise NumericsError(f"all {x.size} logits are minus infinity or banned; no token is left to choose")
            raise NumericsError(f"the logit of token {best} is {top}, expected finite numbers")
        if self.temperature == 0.0:
            return best
        if self.top_k == 1:
            return best
        ids = self._filter(x, top)
        if ids is None:
            return self._draw_from_all(x, top)
        kept = x[ids].astype(np.float64)
        if self.xtc_probability > 0.0 and self._rng.random() < self.xtc_probability:
            likely = np.flatnonzero(_softmax(kept, 1.0) >= self.xtc_threshold)
            dropped = np.delete(likely, kept[likely].argmin()) if likely.size else likely
            ids, kept = np.delete(ids, dropped), np.delete(kept, dropped)
        mass = np.cumsum(_softmax(kept, self.temperature))
        return int(ids[_last_below(mass, self._rng.random() * mass[-1])])

    def _adjusted(self, logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
        """Logits f32 [V] after bias, bans and penalties; the row itself where there is none."""
        if not (self._bias_ids.size or self._banned.size or self._penalises):
            return np.asarray(logits, np.float32)
        x = self._scratch(0, logits.size)
        x[:] = logits
        if self._bias_ids.size:
            if self._bias_ids.max() >= x.size:
                raise ParameterError(
                    f"logit_bias names token {self._bias_ids.max()}, expected 0 to {x.size - 1} in this vocabulary"
                )
            x[self._bias_ids] += self._bias
        if self._penalises:
            recent = history if self.penalty_last_n < 0 else history[-self.penalty_last_n :]
            seen, count = np.unique(np.asarray(recent, np.int64), return_counts=True)
            seen, count = seen[seen < x.size], count[seen < x.size]
            y = x[seen]
            y = np.where(y > 0.0, y / self.repeat_penalty, y * self.repeat_penalty)
            x[seen] = y - count * self.frequency_penalty - self.presence_penalty
        banned = self._banned[self._banned < x.size]
        if not np.isnan(x[banned]).any():
            x[banned] = -np.inf
        return x

    def _filter(self, x: np.ndarray, top: float) -> np.ndarray | None:
        """Ids i64 [n] that top-k, top-p and min-p keep, in any order; None where all are kept."""
        if self.top_k:
            ids = best_ids(x, self.top_k)
            if self.top_p < 1.0:
                ids = ids[: _nucleus(_softmax(x[ids].astype(np.float64), 1.0), self.top_p)]
        elif self.top_p < 1.0:
            ids = self._nucleus_of_all(x, top)
        elif self.min_p > 0.0:
            ids = np.flatnonzero(x >= np.float32(top + math.log(self.min_p)))
        elif self.xtc_probability > 0.0:
            ids = np.arange(x.size)
        else:
            return None
        kept = x[ids]
        return ids[kept >= top + math.log(self.min_p)] if self.min_p > 0.0 else ids[kept > -np.inf]

    def _exp(self, x: np.ndarray, top: float, temperature: float) -> np.ndarray:
        """exp((x - top) / temperature) in f32 [V], in a buffer of the sampler's own."""
        e = self._scratch(1, x.size)
        np.subtract(x, np.float32(top), out=e)
        np.multiply(e, np.float32(1.0 / temperature), out=e)
        return np.exp(e, out=e)

    def _nucleus_of_all(self, x: np.ndarray, top: float) -> np.ndarray:
        """Ids of the fewest best tokens of the whole row that hold `top_p`."""
        e = self._exp(x, top, 1.0)
        wanted = self.top_p * float(e.sum(dtype=np.float64))
        for k in (256, 4096):  # few tokens hold it as a rule
            ids = _candidates(x, k)
            if float(e[ids].sum(dtype=np.float64)) >= wanted:
                return _fewest(ids, e[ids], wanted)
        low, high = _bracket(e, self.top_p)
        above = np.flatnonzero(e > high)
        ids = np.flatnonzero((e <= high) & (e >= low))
        rest = wanted - float(e[above].sum(dtype=np.float64))
        if rest <= 0.0 or float(e[ids].sum(dtype=np.float64)) < rest:  # the sample misled
            return _fewest(np.arange(x.size), e, wanted)
        return np.concatenate([above, _fewest(ids, e[ids], rest)])

    def _draw_from_all(self, x: np.ndarray, top: float) -> int:
        """Draw from the whole row, f32 [V]: first a block of it, then a token of that block."""
        p = self._exp(x, top, self.temperature)
        edges = np.arange(0, p.size, _DRAW_BLOCK)
        blocks = np.cumsum(np.add.reduceat(p, edges, dtype=np.float64))
        u = self._rng.random() * blocks[-1]
        b = _last_below(blocks, u)
        inside = np.cumsum(p[edges[b] : edges[b] + _DRAW_BLOCK], dtype=np.float64)
        return int(edges[b]) + _last_below(inside, u - (blocks[b - 1] if b else 0.0))

    def _scratch(self, i: int, size: int) -> np.ndarray:
        """A buffer f32 [size], kept from call to call: new pages would cost more than the arithmetic."""
        if self._buffers[i].size != size:
            self._buffers[i] = np.empty(size, np.float32)
        return self._buffers[i]


def _bracket(e: np.ndarray, top_p: float) -> tuple[float, float]:
    """Values between which the smallest of a nucleus lies, guessed from a part of the row, f32 [V]."""
    sample = np.sort(e[::_SAMPLED])[::-1]
    mass = np.cumsum(sample, dtype=np.float64)
    i, margin = int(np.searchsorted(mass, top_p * mass[-1])), 4 * math.isqrt(sample.size)
    low = float(sample[i + margin]) if i + margin < sample.size else 0.0
    return low, float(sample[max(i - margin, 0)])


def _fewest(ids: np.ndarray, values: np.ndarray, wanted: float) -> np.ndarray:
    """The fewest of `ids`, of the largest values f32 [n], that hold `wanted` together; all if they do not."""
    order = np.sort(values)[::-1]  # values are sorted much faster than ids are
    n = min(int(np.searchsorted(np.cumsum(order, dtype=np.float64), wanted)) + 1, order.size)
    above = ids[values > order[n - 1]]
    return np.concatenate([above, ids[values == order[n - 1]][: n - above.size]])


def best_ids(x: np.ndarray, k: int) -> np.ndarray:
    """Ids of the `k` largest values of x, f32 [V] without NaN, best first and lower id first among equals: i64 [k]."""
    ids = _candidates(x, k)
    return ids[np.argsort(-x[ids], kind="stable")][:k]


def _candidates(x: np.ndarray, k: int) -> np.ndarray:
    """Ids, ascending, of at least the `k` largest values of x, f32 [V], and not many more.

    The k-th largest of the maxima of many columns bounds the k-th largest value from below.
    """
    width = _COLUMN
    while width > 1 and x.size // width < 4 * k:
        width //= 2
    n_column = x.size // width
    if k >= n_column:
        return np.arange(x.size)
    maxima = x[: n_column * width].reshape(width, n_column).max(axis=0)
    return np.flatnonzero(x >= np.partition(maxima, n_column - k)[n_column - k])


def _softmax(x: np.ndarray, temperature: float) -> np.ndarray:
    e = np.exp((x - x.max()) / temperature)
    return e / e.sum()


def _nucleus(p: np.ndarray, top_p: float) -> int:
    """Number of leading entries of p, f64 [n], that first hold `top_p`; all if none do."""
    return min(int(np.searchsorted(np.cumsum(p), top_p)) + 1, p.size)


def _last_below(mass: np.ndarray, u: float) -> int:
    """First index whose cumulated mass exceeds u, never one that adds nothing."""
    i = int(np.searchsorted(mass, u, side="right"))
    return i if i < mass.size else int(np.searchsorted(mass, mass[-1]))


def _number(name: str, value: float, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= value <= high or math.isinf(value):
        limits = (
            "a finite number" if math.isinf(low) else f"{low:g} or more" if math.isinf(high) else f"{low:g} to {high:g}"
        )
        raise ParameterError(f"{name} is {value!r}, expected {limits}")
    return float(value)


def _integer(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ParameterError(f"{name} is {value!r}, expected a whole number from {low} on")
    return int(value)


def _bias(token: int, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value) or value == math.inf:
        raise ParameterError(f"logit_bias of token {token} is {value!r}, expected a number or minus infinity")
    return float(value)
