"""SentencePiece's BPE: joins the neighbours whose union has the best score, until none is a token."""

import heapq

import numpy as np

from .vocabulary import BYTE, CONTROL, UNKNOWN, Vocabulary

SPACE = "▁"  # stands for a space in the vocabulary


class SentencePiece:
    """Ids of plain text for a vocabulary with scores (``tokenizer.ggml.model`` = ``llama``).

    The `tokenizers` library ranks merges and cannot express equal scores, which SentencePiece resolves by position;
    hence this loop, in O(n log n). Characters that are no tokens become the byte tokens ``<0x00>`` ... ``<0xFF>``.
    """

    def __init__(self, vocab: Vocabulary):
        hidden = np.isin(vocab.types, (UNKNOWN, CONTROL, BYTE))  # text never makes these by joining characters
        self._ids = {text: i for i, text in enumerate(vocab.tokens) if not hidden[i]}
        self._scores = vocab.scores.tolist()
        index = {text: i for i, text in enumerate(vocab.tokens)}
        self.byte_ids = [index.get(f"<0x{b:02X}>", self._ids.get(chr(b))) for b in range(256)]
        self._unknown = next((int(i) for i in np.flatnonzero(vocab.types == UNKNOWN)), None)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, whose spaces are turned into the vocabulary's mark first."""
        parts = list(text.replace(" ", SPACE))
        n = len(parts)
        left, right = list(range(-1, n - 1)), [*range(1, n), -1]
        queue: list[tuple[float, int, int]] = []  # minus score, left part, characters of the union

        def push(a: int, b: int) -> None:
            token = self._ids.get(parts[a] + parts[b]) if a >= 0 and b >= 0 else None
            if token is not None:
                heapq.heappush(queue, (-self._scores[token], a, len(parts[a]) + len(parts[b])))

        for i in range(1, n):
            push(i - 1, i)
        while queue:
            _, a, length = heapq.heappop(queue)
            b = right[a]
            if b < 0 or not parts[a] or len(parts[a]) + len(parts[b]) != length:
                continue  # one of the two has been joined otherwise since
            parts[a], parts[b] = parts[a] + parts[b], ""
            right[a] = right[b]
            if right[b] >= 0:
                left[right[b]] = a
            push(left[a], a)
            push(a, right[a])
        return [token for part in parts if part for token in self._part_ids(part)]

    def _part_ids(self, part: str) -> list[int]:
        if part in self._ids:
            return [self._ids[part]]
        ids = [self.byte_ids[b] for b in part.encode()]
        if None in ids:
            return [] if self._unknown is None else [self._unknown]
        return [i for i in ids if i is not None]
