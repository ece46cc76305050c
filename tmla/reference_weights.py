"""Weights of an open file in float64, for the reference: dequantised when asked for, a slab of rows at a time."""

import numpy as np

from tmla.gguf_file import q8_0_split

SLAB_VALUES = 1 << 22  # weights held in float64 at a time: 32 MB


class Weights:
    """Reads norms whole and matrices by rows; keeps nothing.

    Parameters
    ----------
    gf : GGUFFile or RequantizedFile
        Its matrices are read as Q8_0, in slices.
    """

    def __init__(self, gf):
        self.gf = gf

    def vector(self, name):
        """Norm, router, bias: whole, in its shape."""
        return self.gf.array(name).astype(np.float64)

    def slab(self, name, start, stop):
        """Rows of a matrix, leading axes counted as rows: [stop - start, I]."""
        quants, scales = q8_0_split(self.gf.q8_0_blocks(name)[start:stop])
        values = quants.view(np.int8) * scales.astype(np.float64)[..., None]
        return values.reshape(len(values), -1)

    def rows(self, name, index):
        """Single rows of a matrix: [len(index), I]."""
        return np.concatenate([self.slab(name, i, i + 1) for i in index])

    def part(self, name, index):
        """One matrix of a stack [E, O, I]: [O, I]."""
        n_out = self.gf.tensors[name].shape[1]
        return self.slab(name, index * n_out, (index + 1) * n_out)

    def linear(self, x, name, index=0):
        """Return ``x @ W.T``: [T, I] -> [T, O]; of a stack [E, O, I], `index` picks the matrix."""
        *_, n_out, n_in = self.gf.tensors[name].shape
        step = max(1, SLAB_VALUES // n_in)
        out = np.empty((len(x), n_out))
        for start in range(0, n_out, step):
            stop = min(start + step, n_out)
            out[:, start:stop] = x @ self.slab(name, index * n_out + start, index * n_out + stop).T
        return out
