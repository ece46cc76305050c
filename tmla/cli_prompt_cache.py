"""``tmla run --prompt-cache FILE``: what a prompt shares with the last one is not computed again."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

from tmla import cli_terminal as terminal
from tmla import info
from tmla.errors import StateError
from tmla.generate import Chunk, stream_generate
from tmla.gguf_kind import show
from tmla.model import Model
from tmla.state_file import open_state


class PromptCache:
    """A saved state that a run begins with, if there is one, and that it leaves behind.

    Parameters
    ----------
    path : str
        Read and checked at once, so that a file that is no state is refused before anything is loaded; and never
        written over. If there is none, the first run makes it.

    Raises
    ------
    StateError
        The file cannot be used, or there is no folder for it.
    """

    def __init__(self, path: str):
        self._path, self.name = path, show(Path(path).name)
        self._saved = open_state(path) if Path(path).exists() else None
        if self._saved is None and not Path(path).resolve().parent.is_dir():
            raise StateError(f"{self.name}: there is no folder {show(Path(path).parent)}; create it first")
        if self._saved is not None and self._saved.header.note is not None:
            raise StateError(f"{self.name}: holds a conversation, which a run would lose; give another file")

    def check_fits(self, model: Model) -> None:
        """Refuse a state of another model before kernels are compiled."""
        if self._saved is not None:
            model.check_fits(self._saved, 0)

    def resume(self, model: Model, ids: list[int], **parameters: Any) -> Generator[Chunk, None, None]:
        """Continue a prompt from the longest part of it that is saved.

        The prompt's last token is always fed: the logits behind it are not saved.

        Parameters
        ----------
        model : Model
        ids : list of int
            The whole prompt.
        **parameters
            As of :func:`tmla.generate.stream_generate`.
        """
        model.reset()
        n_same = 0
        if self._saved is not None:
            old = self._saved.tokens
            while n_same < min(len(ids) - 1, len(old)) and ids[n_same] == old[n_same]:
                n_same += 1
            model.restore_from(self._saved, n_same)
        terminal.say(f"prompt cache {self.name}: {n_same} of {len(ids)} prompt tokens reused")
        return stream_generate(model, ids[n_same:], keep=True, history=ids[:n_same], **parameters)

    def save(self, model: Model, *, interrupted: bool = False) -> None:
        """Save all that the model has computed; after an interrupt all but the row that may be half written."""
        if interrupted:
            model.rewind(max(0, min(len(model.tokens), model.n_past - 1)))
        n_bytes = model.save_state(self._path)
        terminal.say(f"prompt cache {self.name}: {model.n_past} tokens saved, {info.size(n_bytes)}")
