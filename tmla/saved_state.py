"""What a model has in its cache, into a file and back: a session goes on as if it had never stopped."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from typing import Any

import numpy as np

from tmla.cache_copy import CacheRows
from tmla.config import MLAConfig
from tmla.errors import ContextError
from tmla.gguf_file import GGUFFile
from tmla.gguf_kind import quote
from tmla.state_file import Header, StateFile, open_state, write_state

_SAMPLES, _SAMPLE_BYTES = 16, 64  # pieces of each tensor that the fingerprint covers
_OUTSIDE = ("name", "notes", "ignored_tensors", "gating_source", "context_length")  # of the config: decide no number


def fingerprint(gf: GGUFFile, cfg: MLAConfig, n_ctx: int) -> str:
    """Digest of what decides the rows of a cache, cheap to get.

    It covers the architecture with all overrides (:class:`MLAConfig`, but for names and notes), whether `n_ctx` asks
    for the long rope factors, and of every tensor that decoding reads the name, type, shape and 16 pieces of 64 bytes,
    evenly spread from its first byte to its last. Not the tokenizer, nor bytes between the pieces: a file of which a
    few bytes were changed by hand may have the same one.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    fields = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in _OUTSIDE}
    fields["long_factors"] = cfg.rope_scaling == "longrope" and n_ctx > cfg.rope_orig_ctx
    digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16)
    for name in sorted(cfg.expected_tensors().keys() & gf.tensors.keys()):
        t = gf.tensors[name]
        digest.update(json.dumps([name, t.type, t.shape, t.n_bytes]).encode())
        raw = gf.raw(name)
        for start in np.linspace(0, max(0, t.n_bytes - _SAMPLE_BYTES), _SAMPLES).astype(np.int64):
            digest.update(raw[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


class KeepsTokens:
    """The part of a model that knows which tokens are in its cache, and saves and restores both."""

    file: GGUFFile
    config: MLAConfig
    n_ctx: int
    n_past: int
    cache_dtype: str
    attention_banks: list[Any]
    _fed: np.ndarray  # i32 [n_ctx]: ids by position, -1 where they are not known

    @property
    def tokens(self) -> list[int]:
        """Ids in the cache, [n_past]; fewer after a :meth:`decode_greedy` that was interrupted: those still known."""
        ids = self._fed[: self.n_past]
        unknown = np.flatnonzero(ids < 0)
        return ids[: unknown[0] if unknown.size else None].tolist()

    @functools.cached_property
    def fingerprint(self) -> str:
        """See :func:`tmla.saved_state.fingerprint`."""
        return fingerprint(self.file, self.config, self.n_ctx)

    @functools.cached_property
    def _rows(self) -> CacheRows:
        return CacheRows(self.attention_banks)

    def save_state(self, path: str | os.PathLike[str], note: Any = None) -> int:
        """Save tokens and cached rows; only the positions that are filled, in the cache's own type.

        Parameters
        ----------
        path : str or os.PathLike
            Replaced at the end, when all is written: whatever happens before, an older file stays as it was. Only its
            owner may read it.
        note : JSON value, optional
            Kept with it; :meth:`restore_state` returns it.

        Returns
        -------
        int
            Bytes written.

        Raises
        ------
        StateError
            The file cannot be written.
        ContextError
            An interrupted run has left positions whose tokens are not known.
        """
        tokens = self.tokens
        if len(tokens) < self.n_past:
            raise ContextError(
                f"of the {self.n_past} positions in the cache only {len(tokens)} have known tokens: decode_greedy was "
                f"interrupted; rewind({len(tokens)}) first"
            )
        cfg = self.config
        header = Header(
            self.fingerprint, cfg.name, self.cache_dtype, cfg.n_layers, cfg.cache_row_width, self.n_past, note
        )
        return write_state(path, header, tokens, self._rows.all_of(self.n_past, header.slab_rows))

    def restore_state(self, path: str | os.PathLike[str]) -> Any:
        """Put back what :meth:`save_state` saved: decoding goes on as it would have, bit for bit on the same backend.

        Returns
        -------
        JSON value
            The `note` it was saved with.

        Raises
        ------
        StateError
            The file is none, is cut or damaged, or is of another model or type of cache. The model is as it was (but
            empty, should the file be changed between its check and its reading).
        ContextError
            It holds more positions than the context.
        """
        saved = open_state(path)
        self.restore_from(saved)
        return saved.header.note

    def check_fits(self, saved: StateFile, n_past: int | None = None) -> None:
        """Refuse a state that this model cannot take; parameters and errors as of :meth:`restore_from`."""
        h, cfg = saved.header, self.config
        if h.fingerprint != self.fingerprint:
            why = (
                "or another --ctx, which chooses its rope factors" if cfg.rope_scaling == "longrope" else "or overrides"
            )
            raise saved.fail(
                f"was saved by {quote(h.model)} with fingerprint {quote(h.fingerprint)}, this is {quote(cfg.name)} "
                f"with {self.fingerprint!r}: another file {why}; load that model, or give another state"
            )
        if h.cache_dtype != self.cache_dtype:
            raise saved.fail(
                f"has rows in {h.cache_dtype}, the cache is {self.cache_dtype}; rows are never converted: "
                f"load with cache_dtype={h.cache_dtype!r} (--cache {h.cache_dtype})"
            )
        if (h.n_layers, h.row_width) != (cfg.n_layers, cfg.cache_row_width):
            raise saved.fail(
                f"has {h.n_layers} layers of rows of {h.row_width}, expected {cfg.n_layers} of {cfg.cache_row_width}"
            )
        if bad := [t for t in saved.tokens if not 0 <= t < cfg.n_vocab]:
            raise saved.fail(f"holds token {bad[0]}, expected 0 to {cfg.n_vocab - 1}")
        n = h.n_past if n_past is None else n_past
        assert 0 <= n <= h.n_past
        if n > self.n_ctx:
            raise ContextError(
                f"{saved.path.name}: the state has {n} positions, but the context holds {self.n_ctx}; "
                f"load with n_ctx={n} or more (--ctx)"
            )

    def restore_from(self, saved: StateFile, n_past: int | None = None) -> None:
        """Take the first `n_past` positions of a state (all by default); errors as of :meth:`restore_state`."""
        self.check_fits(saved, n_past)
        n = saved.header.n_past if n_past is None else n_past
        self.n_past = 0  # until the last row is in, the cache is empty
        for layer, first, slab in saved.slabs():
            if first < n:
                self._rows.put(layer, first, slab[: n - first])
        self._fed[:n] = saved.tokens[:n]
        self.n_past = n

    def _note(self, tokens: list[int]) -> None:
        """Remember what will be fed from here on."""
        self._fed[self.n_past : self.n_past + len(tokens)] = tokens
