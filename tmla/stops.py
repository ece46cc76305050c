"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ParameterError


class StopScanner:
    """Holds text back while a stop string could still be completed, and cuts it where one is.

    Parameters
    ----------
    stop : str or sequence of str

    Raises
    ------
    ParameterError
        One is empty or no text.
    """

    def __init__(self, stop: str | Sequence[str] = ()):
        self._stops = [stop] if isinstance(stop, str) else list(stop)
        if bad := [s for s in self._stops if not isinstance(s, str) or not s]:
            raise ParameterError(f"a stop string is {bad[0]!r}, expected text of at least one character")
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take more text, return what may be shown. After a stop string nothing more is."""
        if self.stopped:
            return ""
        self._held += text
        found = [i for i in (self._held.find(s) for s in self._stops) if i >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        n_held = max((self._overlap(s) for s in self._stops), default=0)
        cut = len(self._held) - n_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
