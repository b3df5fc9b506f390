"""From what an engine found to the exact first records: order within ties, and ties across the last place.

An engine is asked for one record more than needed. If that one is strictly less similar than the last
one needed, the engine's set is the only possible one and needs sorting alone. If they are equal, records
the engine did not return may be tied too and have a smaller record id; such queries (about one in a
hundred on real images) are scored against all records of the block and decided on those scores.
Without this step the choice among tied records is the library's, and the proof is gone. Where a device compares keys
itself (engine.KeyedBlock), there is nothing to settle.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from feature_store.index.engine import Block
from feature_store.index.keys import pack, similarities_of

_SETTLE_BYTES = 16
"""Working memory of `_settle` for each query and record."""


def first_keys(
    block: Block, ranks: NDArray[np.int64], queries: NDArray[np.float32], count: int, *, scratch_bytes: int
) -> NDArray[np.int64]:
    """Keys of the exact first records of a block.

    Args:
        block: the records, in ascending order of rank.
        ranks: int64 (len(block),), ascending: the records' places in the order of ids.
        queries: float32 (nq, d) holding integers, nq at least 1.
        count: from 1 to len(block); count + 1 at most the engine's max_count unless count is len(block).
        scratch_bytes: working memory for settling ties; one query is always taken.

    Returns:
        int64 (nq, count), ascending.
    """
    similarities, positions = block.best(queries, min(count + 1, len(block)))
    keys = pack(similarities, ranks[positions])
    keys.sort(axis=1)
    if keys.shape[1] == count:
        return keys
    tied = np.flatnonzero(similarities_of(keys[:, count - 1]) == similarities_of(keys[:, count]))
    keys = keys[:, :count]
    step = max(1, scratch_bytes // (_SETTLE_BYTES * len(block)))
    for start in range(0, len(tied), step):
        some = tied[start : start + step]
        keys[some] = _settle(block.scores(queries[some]), ranks, similarities_of(keys[some, -1]), count)
    return keys


def _settle(
    scores: NDArray[np.float32], ranks: NDArray[np.int64], last: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """The first `count` of all records, given the similarity of the last of them.

    All records above it are taken, and of those equal to it as many as are missing, lowest rank first.
    """
    level = last.astype(np.float32)[:, None]
    above = scores > level
    equal = scores == level
    missing = count - above.sum(axis=1, keepdims=True)
    taken = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= missing))
    positions = np.nonzero(taken)[1].reshape(len(scores), count)
    keys = pack(np.take_along_axis(scores, positions, axis=1), ranks[positions])
    keys.sort(axis=1)
    return keys
