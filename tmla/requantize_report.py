"""What loading matrices of other types as Q8_0 takes and costs: told before anything is loaded."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tmla.config import MLAConfig
from tmla.gguf_file import Q8_BLOCK, Q8_BLOCK_BYTES, GGUFFile, q8_0_dequantize
from tmla.requantize import RequantizedFile, matrices_by_type

SAMPLE_VALUES = 1 << 20  # weights of each type that are looked at
SAMPLE_TENSORS = 8  # at most as many tensors of each type
SAMPLE_RUN = 16  # rows read together


@dataclasses.dataclass(frozen=True)
class TypeLoss:
    """What becomes of all matrices of one type."""

    type: str
    n_tensors: int
    bytes_before: int  # in the file
    bytes_after: int  # as Q8_0
    rms_error: float  # root of the mean squared rounding error, relative to that of the values; 0.0 for Q8_0


@dataclasses.dataclass(frozen=True)
class RequantizeReport:
    """What requantising a file's matrices takes and costs, type by type."""

    name: str
    types: tuple[TypeLoss, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of all matrices in the file."""
        return sum(t.bytes_before for t in self.types)

    @property
    def bytes_after(self) -> int:
        """Bytes of all matrices as Q8_0, which is what they take in memory."""
        return sum(t.bytes_after for t in self.types)

    def text(self) -> str:
        """Return two lines for a terminal; the empty string if nothing is requantised."""
        others = [t for t in self.types if t.type != "Q8_0"]
        if not others:
            return ""
        found = ", ".join(f"{t.n_tensors} {t.type}" for t in self.types)
        loss = ", ".join(f"{100 * t.rms_error:.2g} % of {t.type}" for t in others)
        return (
            f"requantising to Q8_0: matrices {found}; {self.bytes_before / 1e6:,.1f} MB in the file become "
            f"{self.bytes_after / 1e6:,.1f} MB in memory\n"
            f"rounding adds a relative rms error of {loss} (measured on a sample of rows)"
        )


def requantize_report(gf: GGUFFile, cfg: MLAConfig) -> RequantizeReport:
    """Say what requantising takes and costs, before anything is loaded.

    Parameters
    ----------
    gf : GGUFFile or RequantizedFile
        Passed by :func:`tmla.tensor_check.check_tensors` with the types that can be requantised.
    cfg : MLAConfig

    Returns
    -------
    RequantizeReport
        Its errors are measured on about a million values of each type.

    Raises
    ------
    GGUFError
        The sample has values that are not finite.
    """
    source = gf if isinstance(gf, RequantizedFile) else RequantizedFile(gf)
    types = []
    for kind, names in matrices_by_type(gf, cfg).items():
        infos = [gf.tensors[name] for name in names]
        after = sum(t.n_elements // Q8_BLOCK * Q8_BLOCK_BYTES for t in infos)
        error = 0.0 if kind == "Q8_0" else _sampled_error(source, names)
        types.append(TypeLoss(kind, len(names), sum(t.n_bytes for t in infos), after, error))
    return RequantizeReport(gf.name, tuple(types))


def _sampled_error(gf: RequantizedFile, names: list[str]) -> float:
    """Relative rms error of rounding to Q8_0, on runs of rows spread over some of the tensors."""
    chosen = [names[i] for i in np.unique(np.linspace(0, len(names) - 1, SAMPLE_TENSORS).astype(int))]
    squared_error = squared = 0.0
    for name in chosen:
        *lead, width = gf.tensors[name].shape
        n_rows = math.prod(lead)
        n_runs = max(1, SAMPLE_VALUES // (len(chosen) * SAMPLE_RUN * width))
        for start in np.unique(np.linspace(0, max(0, n_rows - SAMPLE_RUN), n_runs).astype(int)).tolist():
            stop = min(start + SAMPLE_RUN, n_rows)
            values = gf.rows(name, start, stop)
            rounded = q8_0_dequantize(gf.q8_0_rows(name, start, stop)).reshape(values.shape)
            squared_error += float(np.sum(np.square(rounded - values, dtype=np.float64)))
            squared += float(np.sum(np.square(values, dtype=np.float64)))
    return math.sqrt(squared_error / squared) if squared else 0.0
