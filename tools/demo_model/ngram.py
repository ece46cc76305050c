"""Interpolated Kneser-Ney n-gram model over token ids: the baseline that a trained network must beat."""

import numpy as np


class KneserNey:
    """n-gram model with one absolute discount an order, ``n1 / (n1 + 2 n2)``.

    Parameters
    ----------
    ids : np.ndarray, integer [T]
        Training stream.
    order : int
        3 for a trigram model; ``order * bits(vocabulary)`` must stay below 63.
    vocabulary : int
        Number of token ids; the lowest order is mixed with the even distribution over them.
    """

    def __init__(self, ids, order, vocabulary):
        self.order, self.vocabulary = order, vocabulary
        self.bits = int(vocabulary - 1).bit_length()
        assert order * self.bits < 63, "an n-gram must fit a 64-bit number"
        self.levels = [None] * (order + 1)
        grams, counts = np.unique(self._pack(ids, order), return_counts=True)
        for n in range(order, 0, -1):
            self.levels[n] = self._level(grams, counts)
            if n > 1:  # a lower order counts the different tokens that came before
                grams, counts = np.unique(grams & ((1 << (n - 1) * self.bits) - 1), return_counts=True)

    def _pack(self, ids, n):
        """The n-gram that ends at each token from the n-th on, as one number: int64 [T - n + 1]."""
        ids = np.asarray(ids, np.int64)
        code = np.zeros(len(ids) - n + 1, np.int64)
        for k in range(n):
            code = code << self.bits | ids[k : len(ids) - n + 1 + k]
        return code

    def _level(self, grams, counts):
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        discount = once / (once + 2 * twice) if once else 0.5  # so that an unseen token has a chance in any text
        histories, first = np.unique(grams >> self.bits, return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(np.append(first, len(grams)))
        return grams, counts, discount, histories, totals, kinds

    def probabilities(self, ids):
        """Probability of each token after the ones before it, from token `order` - 1 on: f64 [T - order + 1]."""
        full = self._pack(ids, self.order)
        p = np.full(len(full), 1.0 / self.vocabulary)
        for n in range(1, self.order + 1):
            grams, counts, discount, histories, totals, kinds = self.levels[n]
            code = full & ((1 << n * self.bits) - 1)
            count = _look_up(grams, counts, code)
            total = _look_up(histories, totals, code >> self.bits)
            kind = _look_up(histories, kinds, code >> self.bits)
            seen = total > 0
            mixed = (np.maximum(count - discount, 0.0) + discount * kind * p) / np.maximum(total, 1)
            p = np.where(seen, mixed, p)
        return p


def _look_up(keys, values, wanted):
    """Value of each wanted key in the sorted `keys`, 0 where it is missing."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
