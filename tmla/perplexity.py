"""How well a model foresees a text: perplexity over sliding windows."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tmla.errors import ContextError, ParameterError
from tmla.log_probs import cross_entropy, rows_at_a_time
from tmla.logits_file import write_logits

CTX = 512  # positions of a window where nothing else is asked for, as in llama.cpp


@dataclasses.dataclass(frozen=True, eq=False)
class Perplexity:
    """What was measured.

    Attributes
    ----------
    nats : np.ndarray, float64 [n_tokens]
        Cross entropy of each scored token, in the order of the text.
    n_windows, n_fed : int
        Windows, and tokens that the model computed for them.
    ctx, stride : int
        As used.
    seconds : float
    """

    nats: np.ndarray
    n_windows: int
    n_fed: int
    ctx: int
    stride: int
    seconds: float

    @property
    def n_tokens(self) -> int:
        """Tokens that were scored."""
        return len(self.nats)

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean of `nats`."""
        return float(np.exp(self.nats.mean()))

    @property
    def standard_error(self) -> float:
        """Of :attr:`perplexity`, as llama.cpp has it: ``perplexity * std(nats) / sqrt(n_tokens - 1)``.

        It takes the tokens for independent, which those of a text are not, so it is rather too small. NaN for a
        single token.
        """
        return (
            self.perplexity * float(self.nats.std()) / math.sqrt(self.n_tokens - 1) if self.n_tokens > 1 else math.nan
        )

    @property
    def tok_s(self) -> float:
        """Tokens computed a second."""
        return self.n_fed / self.seconds


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens fed from an empty cache: ``targets[i]`` follows ``inputs[i]``, and those from `first` on are scored."""

    inputs: list[int]
    targets: list[int]
    first: int


def make_windows(
    ids: list[int], ctx: int, stride: int, bos: int | None = None, *, halves: bool = False
) -> list[Window]:
    """Cut a text into windows.

    Parameters
    ----------
    ids : list of int
        With the leading `bos`, if there is one.
    ctx, stride : int
        Window ``k`` begins at token ``k stride`` and has `ctx` inputs; in the last, fewer.
    bos : int, optional
        Takes the place of each window's first token.
    halves : bool
        llama.cpp's way: disjoint windows, the second half of each is scored, what is left over is not.

    Returns
    -------
    list of Window
        Each token is scored in the first window that foresees it: all but the very first, and only once.

    Raises
    ------
    ParameterError
        The text is too short, or `ctx` or `stride` is out of range.
    """
    least = 2 * ctx if halves else 2
    if ctx < 2 or not 1 <= stride <= ctx:
        raise ParameterError(f"ctx is {ctx} and stride {stride}, expected 2 <= ctx and 1 <= stride <= ctx")
    if len(ids) < least:
        raise ParameterError(f"the text has {len(ids)} tokens, expected at least {least}; give a longer one")
    windows, scored = [], 0  # the last token that was scored
    starts = range(0, len(ids) - ctx + 1, ctx) if halves else range(0, len(ids), stride)
    for start in starts:
        end = start + ctx - 1 if halves else min(start + ctx, len(ids) - 1)  # the last target
        first = ctx // 2 if halves else scored - start
        inputs = ids[start:end]
        windows.append(Window([bos, *inputs[1:]] if bos is not None else inputs, ids[start + 1 : end + 1], first))
        scored = end
        if not halves and end == len(ids) - 1:
            break
    return windows


def text_ids(tokenizer: Any, text: str | Iterable[int]) -> tuple[list[int], int | None]:
    """Ids of a text, BOS first if the file wants it, and that BOS or None; ids get it unless they begin with it."""
    bos = tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None
    if isinstance(text, str):
        if tokenizer is None:
            raise ParameterError("the text is text, but the model has no tokenizer; give a list of ids")
        return tokenizer.encode_prompt(text), bos
    ids = [int(i) for i in text]
    return (ids if bos is None or ids[:1] == [bos] else [bos, *ids]), bos


def perplexity(
    model: Any,
    text: str | Iterable[int],
    *,
    ctx: int | None = None,
    stride: int | None = None,
    halves: bool = False,
    dump: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Measure the perplexity of a text: ``exp`` of the mean cross entropy of its tokens.

    The text is cut into windows of `ctx` tokens; each is computed from an empty cache and begins with BOS, if the file
    wants one, in the place of its first token. Windows begin `stride` tokens after each other, and every token but the
    first is scored once, in the first window that foresees it: with at least ``ctx - stride`` tokens before it, but in
    the first window. Probabilities are over all rows of the head, in float64 from f32 logits.

    Parameters
    ----------
    model : Model
        Is reset.
    text : str or iterable of int
        Text, or ids (with or without the leading BOS).
    ctx : int, optional
        Default 512, or the model's context where that is smaller.
    stride : int, optional
        Default ``ctx // 2``.
    halves : bool
        As ``llama-perplexity`` of llama.cpp does by default: windows do not overlap, the tokens behind position
        ``ctx // 2`` of each are scored, and the text's last piece, shorter than a window, is not.
    dump : str or os.PathLike, optional
        Write tokens and logits of all windows there (:mod:`tmla.logits_file`): 4 bytes times the vocabulary for each
        token.
    progress : callable, optional
        Called with (tokens done, tokens in all).

    Returns
    -------
    Perplexity

    Raises
    ------
    ParameterError
        The text is too short, or a number is out of range.
    ContextError
        `ctx` is more than the context of the model, or an id is not in its vocabulary.
    NumericsError
        Logits are not finite.
    """
    ctx = min(CTX, model.n_ctx) if ctx is None else ctx
    stride = ctx if halves else max(1, ctx // 2) if stride is None else stride
    if ctx > model.n_ctx:
        raise ContextError(f"ctx is {ctx}, but the model's context holds {model.n_ctx}; load with n_ctx={ctx} or more")
    ids, bos = text_ids(model.tokenizer, text)
    windows = make_windows(ids, ctx, stride, bos, halves=halves)
    total = sum(len(w.inputs) for w in windows)
    run = _Run(model, total, progress)
    start = time.perf_counter()
    if dump is None:
        nats = [run.score(w) for w in windows]
    else:
        starts = np.cumsum([0, *(len(w.inputs) for w in windows[:-1])])
        tokens = np.concatenate([w.inputs for w in windows])
        with write_logits(dump, tokens, starts, model.config.n_vocab) as put:
            nats = [run.score(w, put) for w in windows]
    return Perplexity(np.concatenate(nats), len(windows), total, ctx, stride, time.perf_counter() - start)


class _Run:
    """A measurement under way."""

    def __init__(self, model: Any, total: int, progress: Callable[[int, int], None] | None):
        self.model, self.total, self.progress, self.done = model, total, progress, 0
        self.step = rows_at_a_time(model.config.n_vocab)

    def score(self, w: Window, put: Callable[[np.ndarray], None] | None = None) -> np.ndarray:
        """Nats of a window's scored tokens; `put` takes the logits of all its tokens."""
        self.model.reset()
        pos = 0
        if put is None and w.first:  # nothing looks at these logits
            self.model.prefill(w.inputs[: w.first])
            pos = w.first
            self._tell(pos)
        nats = []
        for at in range(pos, len(w.inputs), self.step):
            part = w.inputs[at : at + self.step]
            logits = self.model.prefill(part, all_logits=True)
            if put is not None:
                put(logits)
            nats.append(cross_entropy(logits, np.array(w.targets[at : at + len(part)])))
            self._tell(len(part))
        return np.concatenate(nats)[w.first - pos :]

    def _tell(self, n: int) -> None:
        self.done += n
        if self.progress is not None:
            self.progress(self.done, self.total)
