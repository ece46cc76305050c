"""How the long-context attention of a GPU cuts its work: compile-time numbers, by kind of lanes."""

import dataclasses

from tmla import runtime
from tmla.stages.lanes import cdiv, pow2

BLOCK = 256  # threads of a block
AHEAD = 4  # value rows in flight
MAX_LATENT = 4 * BLOCK  # widest latent: a thread has 4 columns


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a block cuts its work: compile-time numbers.

    Attributes
    ----------
    heads : int
        Heads of a block, a power of two, at least 4.
    rows : int
        Cached rows of a tile.
    columns : int
        Columns of a chunk of the score product.
    """

    heads: int
    rows: int
    columns: int

    @property
    def score_threads(self) -> int:
        """Threads that cover a tile's scores, 4 heads x 4 rows each."""
        return self.heads * self.rows // 16

    @property
    def column_groups(self) -> int:
        """Groups of threads that share a chunk's columns."""
        return BLOCK // self.score_threads

    @property
    def pairs(self) -> int:
        """Pairs of columns of such a group."""
        return self.columns // 2 // self.column_groups

    @property
    def pair_stride(self) -> int:
        """Pairs from row to row in shared memory: even for 16-byte loads, 4 banks apart."""
        return self.columns // 2 + 2

    @property
    def row_pairs(self) -> int:
        """Pairs of shared memory for the rows, later the partial scores, later the weights."""
        return max(self.rows * self.pair_stride, BLOCK * 8)

    @property
    def query_pairs(self) -> int:
        """Pairs of shared memory for the queries, later the scores."""
        return max(self.heads * self.pair_stride, self.heads // 2 * (self.rows + 1))

    @property
    def row_words(self) -> int:
        """Words of a chunk of rows that a thread fetches."""
        return self.rows * self.columns // 4 // BLOCK

    @property
    def query_words(self) -> int:
        """Pairs of a chunk of queries that a thread fetches."""
        return cdiv(self.heads * self.columns // 2, BLOCK)

    def value_threads(self, n_latent: int) -> int:
        """Threads that cover the latent, 4 columns each."""
        return max(pow2(n_latent // 4), BLOCK // self.heads)

    def heads_per_thread(self, n_latent: int) -> int:
        """Heads whose values a thread sums."""
        return self.heads // (BLOCK // self.value_threads(n_latent))


def tile() -> Tile:
    """Tile of the running backend (measured: docs/log.md)."""
    if runtime.caps().lane_ops == "warp":
        return Tile(heads=8, rows=64, columns=64)
    return Tile(heads=16, rows=64, columns=48)
