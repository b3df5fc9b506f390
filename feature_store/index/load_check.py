"""Four random queries in full, at every load: a neighbour that is missing is found, not only one that is rounded.

Recomputing the similarity of what an engine returned cannot see a record that it did not return: one lost on the way
to a device, in a tile, or by a selection that is wrong for some shape. So the first keys of four queries are compared
with those of the definition, over every record of the block. Similarities are taken in float64, whose products and
sums of admitted rows are exact with 29 bits to spare, whatever a process allows float32.

Two queries are records of the block, whose similarity to themselves is the largest there is; two are random vectors of
nearly the largest norm, so that 24 bits are needed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.gathered import GatheredRows
from feature_store.index.keys import merge, pack

CHECKED_QUERIES: Final = 4
_FOUND: Final = 100
_NORM: Final = 4090.0


def check_queries(rows: GatheredRows, rng: np.random.Generator) -> NDArray[np.int16]:
    """Queries int16 (4, d) within the exact range: two of the block's own records, two at random."""
    own = [_row(rows, int(rng.integers(len(rows)))) for _ in range(2)]
    vectors = rng.standard_normal((CHECKED_QUERIES - 2, rows.dimension))
    vectors *= _NORM / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.concatenate([*own, np.clip(np.trunc(vectors), -2048, 2048).astype(np.int16)])


def reference_keys(rows: GatheredRows, ranks: NDArray[np.int64], queries: NDArray[np.int16]) -> NDArray[np.int64]:
    """First keys by definition, int64 (4, at most 100), ascending.

    Args:
        rows: the records of a block.
        ranks: int64 (len(rows),), their ranks.
        queries: int16 (4, d).
    """
    asked = queries.astype(np.float64)
    best = np.empty((len(queries), 0), dtype=np.int64)
    for where, chunk in rows.chunks():
        keys = pack(asked @ chunk.astype(np.float64).T, ranks[where])
        best = merge(best, keys, min(_FOUND, best.shape[1] + keys.shape[1]))
    return best


def _row(rows: GatheredRows, number: int) -> NDArray[np.int16]:
    ((_, chunk),) = rows.part(number, number + 1).chunks()
    return chunk
