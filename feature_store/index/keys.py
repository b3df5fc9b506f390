"""One integer per neighbour, so that the order of neighbours is the order of integers.

    key = (2^24 - similarity) * 2^38 + rank

where rank is the record's place in the order of record ids. Similarities lie strictly between -2^24
and 2^24, so a key is a positive int64, and smaller keys are exactly those that come first by
(similarity descending, record id ascending). Keys are unique: no sort is ever asked about a tie.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

RANK_BITS: Final = 38
NO_KEY: Final = int(np.iinfo(np.int64).max)
"""Larger than every key: marks the absence of a neighbour."""

_RANK_MASK: Final = (1 << RANK_BITS) - 1
_OFFSET: Final = 1 << 24


def pack(similarities: NDArray[np.floating], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keys of neighbours, from exact similarities and ranks of equal shape."""
    keys = similarities.astype(np.int64)
    np.subtract(_OFFSET, keys, out=keys)
    keys <<= RANK_BITS
    keys |= ranks
    return keys


def ranks_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rank in the order of record ids. Meaningless for NO_KEY."""
    return keys & _RANK_MASK


def similarities_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exact similarity. Meaningless for NO_KEY."""
    return _OFFSET - (keys >> RANK_BITS)


def merge(first: NDArray[np.int64], second: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The k smallest keys of both, in order, for each query.

    Args:
        first: (nq, a) with a + b at least k.
        second: (nq, b), from other records.

    Returns:
        (nq, k), ascending.
    """
    both = np.concatenate([first, second], axis=1)
    both.sort(axis=1)
    return both[:, :k]
