"""Text from a model: prompt in, chunks of text out, with stops and limits."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from .errors import ContextError, ParameterError
from .sampling import Sampler
from .stops import StopScanner

__all__ = ["Chunk", "Stats", "StopScanner", "generate", "stream_generate"]

_GREEDY_AHEAD = 16  # tokens that the device may choose by itself before they are shown, at most
_GREEDY_AHEAD_S = 0.05  # and the time these may take


@dataclasses.dataclass(frozen=True)
class Stats:
    """Timings of one generation, without the time its reader took.

    Attributes
    ----------
    prompt_tokens, n_tokens : int
        Tokens fed before the first choice, and tokens chosen (the end token included).
    prompt_s, decode_s : float
        Seconds until the first logits, and seconds for the steps and choices after them.
    n_steps : int
        Decode steps done: one less than `n_tokens` as a rule, for the last token is not fed.
    """

    prompt_tokens: int
    prompt_s: float
    n_tokens: int
    decode_s: float
    n_steps: int

    @property
    def prompt_tok_s(self) -> float:
        """Prompt tokens a second; 0 without any."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Decode steps a second; 0 without any."""
        return self.n_steps / self.decode_s if self.n_steps else 0.0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One token's worth of output.

    Attributes
    ----------
    text : str
        What became certain with this token; empty while a character or a stop string may still be completed.
    token : int or None
        The token chosen; None if there was none to choose (``max_tokens=0``).
    reason : {None, "eos", "stop", "length", "context"}
        Set in the last chunk: the model ended its turn, a stop string came, `max_tokens` were chosen, or the cache is
        full.
    stats : Stats or None
        In the last chunk.
    """

    text: str
    token: int | None
    reason: str | None = None
    stats: Stats | None = None


def stream_generate(
    model: Any,
    prompt: str | Iterable[int],
    *,
    max_tokens: int | None = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    keep: bool = False,
    special: bool = False,
    ignore_eos: bool = False,
    skip_special: bool = True,
    history: Sequence[int] = (),
    **sampling: Any,
) -> Generator[Chunk, None, None]:
    """Generate text, chunk by chunk, one a token.

    Everything that can be refused is refused by this call; the work begins with the first chunk. The generator may be
    closed or interrupted at any point: the model then holds the prompt and the tokens shown, but for the last.

    Parameters
    ----------
    model : Model
        Its `tokenizer` may be None if `prompt` is a list of ids; chunks then have no text.
    prompt : str or iterable of int
        Text gets BOS exactly once if the file wants it (not if `keep` and the cache holds something); ids are fed as
        they are.
    max_tokens : int, optional
        Tokens to choose; None goes on until the context is full.
    temperature, top_k, top_p, min_p, seed
        As in :class:`tmla.sampling.Sampler`.
    stop : str or sequence of str
        Generation ends before the first of these in the text, which may span tokens.
    keep : bool
        Append to what the cache holds. Else the model is reset first.
    special : bool
        Read control tokens in a text prompt as such.
    ignore_eos : bool
        Never choose a token that ends the turn.
    skip_special : bool
        Leave control tokens out of the text.
    history : sequence of int
        What the cache holds, for the penalties; with `keep`.
    **sampling
        Further parameters of :class:`tmla.sampling.Sampler`: penalties, `logit_bias`, XTC.

    Raises
    ------
    ContextError
        The prompt does not fit; both numbers are named, nothing has been done.
    ParameterError
        The prompt is empty or no prompt, or a parameter is out of its range.
    NumericsError
        Logits are not finite (while generating).
    """
    tokenizer = model.tokenizer
    n_past = model.n_past if keep else 0
    ids = _prompt_ids(model, prompt, special, begins=n_past == 0)
    if n_past + len(ids) > model.n_ctx:
        after = f" after {n_past} in the cache" if n_past else ""
        raise ContextError(
            f"the prompt has {len(ids)} tokens{after}, but the context holds {model.n_ctx}; shorten it, "
            f"or load with n_ctx={n_past + len(ids)} or more (--ctx)"
        )
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0):
        raise ParameterError(f"max_tokens is {max_tokens!r}, expected a whole number from 0 on, or None")
    banned = list(sampling.pop("banned", ()))
    if tokenizer is not None:
        sampling.setdefault("n_vocab", min(tokenizer.n_vocab, model.config.n_vocab))
        banned += tokenizer.unused_ids.tolist() + (list(tokenizer.end_ids) if ignore_eos else [])
    try:
        sampler = Sampler(temperature, top_k, top_p, min_p, seed, banned=banned, **sampling)
    except TypeError as e:
        raise ParameterError(f"{str(e).removeprefix('Sampler.__init__() ')}; see tmla.sampling.Sampler") from None
    stream = tokenizer.stream(skip_special=skip_special, continues=True) if tokenizer is not None else None
    run = _Run(model, ids, history if keep else (), sampler, StopScanner(stop), stream, max_tokens)
    return run.chunks(keep)


def generate(model: Any, prompt: str | Iterable[int], **parameters: Any) -> str:
    """Return the whole text that :func:`stream_generate` gives in chunks, with the same parameters and errors."""
    return "".join(chunk.text for chunk in stream_generate(model, prompt, **parameters))


def _prompt_ids(model: Any, prompt: str | Iterable[int], special: bool, begins: bool) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ParameterError("the prompt is text, but the model has no tokenizer; give a list of ids")
        if begins:
            ids = model.tokenizer.encode_prompt(prompt, special=special)
        else:
            ids = model.tokenizer.encode(prompt, add_bos=False, special=special)
    else:
        try:
            ids = [operator.index(i) for i in prompt]
        except TypeError:
            raise ParameterError(
                f"the prompt is of type {type(prompt).__name__}, expected text or a list of ids"
            ) from None
    n_vocab = model.config.n_vocab
    if not ids:
        raise ParameterError("the prompt holds no tokens, expected at least one; give text, or the BOS token")
    if bad := [i for i in ids if not 0 <= i < n_vocab]:
        raise ParameterError(f"the prompt holds token id {bad[0]}, expected 0 to {n_vocab - 1}")
    return ids


class _Run:
    """One generation under way."""

    def __init__(
        self,
        model: Any,
        prompt: list[int],
        history: Sequence[int],
        sampler: Sampler,
        scanner: StopScanner,
        stream: Any,
        max_tokens: int | None,
    ):
        self.model, self.prompt, self.sampler, self.scanner, self.stream = model, prompt, sampler, scanner, stream
        self.history = [*history, *prompt]
        self.max_tokens = max_tokens
        self.end_ids = model.tokenizer.end_ids if model.tokenizer is not None else frozenset()
        self.prompt_s = self.decode_s = 0.0
        self.n_tokens = self.n_steps = 0

    def chunks(self, keep: bool) -> Generator[Chunk, None, None]:
        if not keep:
            self.model.reset()
        start = time.perf_counter()
        logits = self.model.prefill(self.prompt)
        self.prompt_s = time.perf_counter() - start
        if self.max_tokens == 0:
            yield Chunk("", None, "length", self._stats())
            return
        with contextlib.closing(self._tokens(logits)) as tokens:
            start = time.perf_counter()
            for token, n_filled in tokens:
                self.n_tokens += 1
                self.history.append(token)
                text, reason = self._judge(token, n_filled)
                self.decode_s += time.perf_counter() - start
                yield Chunk(text, token, reason, self._stats() if reason else None)
                if reason:
                    return
                start = time.perf_counter()

    def _judge(self, token: int, n_filled: int) -> tuple[str, str | None]:
        """Text that a token completes, and the reason to end with it."""
        is_end = token in self.end_ids
        text = "" if self.stream is None or is_end else self.scanner.push(self.stream.push(token))
        if self.scanner.stopped:
            return text, "stop"
        if is_end or self.n_tokens == self.max_tokens or n_filled == self.model.n_ctx:
            if self.stream is not None:
                text += self.scanner.push(self.stream.flush()) + self.scanner.flush()
            return text, "eos" if is_end else "length" if self.n_tokens == self.max_tokens else "context"
        return text, None

    def _tokens(self, logits: Any) -> Generator[tuple[int, int], None, None]:
        """Choose tokens without end; with each, the number of positions that are filled."""
        model = self.model
        ahead_s = _GREEDY_AHEAD_S if self.sampler.is_plain_greedy and hasattr(model, "decode_greedy") else 0.0
        token = self.sampler(logits, self.history)
        yield token, model.n_past
        while True:
            start = time.perf_counter()
            logits = model.decode(token)
            token = self.sampler(logits, self.history)
            step_s = time.perf_counter() - start
            self.n_steps += 1
            yield token, model.n_past
            while (n := min(int(ahead_s / step_s), _GREEDY_AHEAD, model.n_ctx - model.n_past, self._left())) > 1:
                start = time.perf_counter()
                chosen = model.decode_greedy(token, n)
                step_s = (time.perf_counter() - start) / n
                n_good = next((i for i, t in enumerate(chosen) if self.sampler.is_banned(t)), n)
                first, n_shown = model.n_past - n, 0
                try:
                    for token in chosen[:n_good]:
                        n_shown += 1
                        self.n_steps += 1
                        yield token, first + n_shown
                finally:
                    if n_shown < n:
                        model.rewind(first + n_shown)  # the last token shown is the next to be fed
                if n_good < n:
                    break  # the device chose a banned token: let the sampler choose

    def _left(self) -> int:
        return _GREEDY_AHEAD if self.max_tokens is None else self.max_tokens - self.n_tokens

    def _stats(self) -> Stats:
        return Stats(len(self.prompt), self.prompt_s, self.n_tokens, self.decode_s, self.n_steps)
