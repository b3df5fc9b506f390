"""A whole private sum in one process and without messages: what the papers' training loops repeat in simulation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, QuorumNotReached
from labeler.noise import VectorSum
from labeler.randomness import ByteSource
from labeler.sharing import split, unshard


def private_sum(
    spec: VectorSum, vectors: Iterable[NDArray[np.floating]], *, sources: Iterable[ByteSource], talliers: int = 2
) -> NDArray[np.float64]:
    """Every agent's contribution, secret-shared to the talliers, summed by each of them, opened.

    The same steps as a round of the service, in one process and without messages: for training in simulation.

    Args:
        spec: the sum.
        vectors: one per contributing agent; an agent that has nothing to say contributes zeros, never nothing.
        sources: one secret source per contributing agent.
        talliers: 2 or 3.

    Returns:
        The noisy sum, float64, shape (dimension,).

    Raises:
        QuorumNotReached: fewer contributors than the quorum.
        InvalidSetting: more than `agents` of them, or not one source each.
        PrivacyRefusal: a vector beyond the bound.
    """
    totals = [np.zeros(spec.dimension, dtype=np.uint64) for _ in range(talliers)]
    count = 0
    for vector, source in zip(vectors, sources, strict=True):
        shares = split(spec.contribution(vector, source=source), num_talliers=talliers, source=source)
        for total, share in zip(totals, shares, strict=True):
            total += share.expand()
        count += 1
    if count < spec.quorum:
        raise QuorumNotReached(f"{count} agents contributed, the quorum is {spec.quorum}; nothing is opened")
    if count > spec.agents:
        raise InvalidSetting(f"{count} agents contributed to a sum of {spec.agents}")
    return spec.open(unshard(totals))
