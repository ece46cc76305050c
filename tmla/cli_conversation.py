"""The conversation that ``tmla chat`` keeps beside the cache in a saved state."""

from __future__ import annotations

import dataclasses
from typing import Any

from tmla.state_file import StateFile


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What was said, besides what the cache holds of it.

    Attributes
    ----------
    messages : list of dict
        ``{"role": "user" or "assistant", "content": text}``
    system : str or None
    said : list of int or None
        All ids of a conversation without a template (``--raw``), which has no messages to make them of again.
    """

    messages: list[dict[str, str]]
    system: str | None
    said: list[int] | None = None

    def note(self) -> dict[str, Any]:
        """The note of a saved state."""
        return {"chat": dataclasses.asdict(self)}

    @classmethod
    def of(cls, saved: StateFile, *, raw: bool) -> Conversation:
        """Read the note of a saved state.

        Parameters
        ----------
        saved : StateFile
        raw : bool
            The conversation that is to go on has no template.

        Raises
        ------
        StateError
            There is no conversation in it, or one that this session cannot go on with.
        """
        note = saved.header.note
        chat = note.get("chat") if isinstance(note, dict) else None
        if not isinstance(chat, dict) or chat.keys() != {"messages", "system", "said"}:
            raise saved.fail("holds no conversation; give a file that /save wrote")
        found = cls(**chat)
        if not found._is_sound():
            raise saved.fail("holds a conversation that is not of the expected form; give a file that /save wrote")
        if raw != (found.said is not None):
            raise saved.fail(f"its conversation was held {'with a template' if raw else 'with --raw'}; start chat so")
        if found.said is not None and found.said[: len(saved.tokens)] != saved.tokens:
            raise saved.fail("its cache is not that of its conversation; give a file that /save wrote")
        return found

    def _is_sound(self) -> bool:
        return (
            isinstance(self.messages, list)
            and all(_is_message(m) for m in self.messages)
            and isinstance(self.system, str | None)
            and (self.said is None or (isinstance(self.said, list) and all(type(i) is int for i in self.said)))
        )


def _is_message(m: Any) -> bool:
    texts = isinstance(m, dict) and all(isinstance(v, str) for v in m.values())
    return texts and m.keys() == {"role", "content"} and m["role"] in ("user", "assistant")
