"""The twin of the secure computation: puts the noisy sums together, looks at them, and keeps the winners.

It defines what talliers that see no sum must answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labeler.sharing import PrimeField, unshard
from workers.winner.engine import ABSTAINED


def reference_winners(
    shares: Sequence[NDArray[np.uint64]], *, field: PrimeField, threshold: int | None = None
) -> NDArray[np.int16]:
    """The lowest class with the largest sum of each query, or -1 where that sum is below the threshold.

    Args:
        shares: of all talliers, residues, shape (num_queries, num_classes).
        field: where they add up.
        threshold: in the unit of the sums; None never abstains.

    Returns:
        int16, shape (num_queries,).
    """
    sums = unshard(shares, field=field)
    winners: NDArray[np.int16] = np.argmax(sums, axis=1).astype(np.int16)
    if threshold is not None:
        winners[sums.max(axis=1) < threshold] = ABSTAINED
    return winners
