"""The twin of the secure computation: puts the noisy sums together, looks at them, and keeps the winners.

It defines what every engine must answer. Whoever reads this process's memory sees the noisy sums, so it
serves tests and simulations in one process, not talliers that distrust each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from labeler.errors import LabelerError, ProtocolViolation, Unavailable
from labeler.sharing import PrimeField, unshard
from labeler.tally import refuse_misshapen
from workers.winner.engine import ABSTAINED, NUM_PARTIES, Outcome, WinnerOrder

_POLL_S = 0.02


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


@dataclass
class _Meeting:
    """The talliers that have come to one job."""

    digests: dict[int, str] = field(default_factory=dict)
    shares: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    rows: dict[int, NDArray[np.uint64]] = field(default_factory=dict)


class ReferenceEngine:
    """An engine for three talliers in one process: the three calls of a job meet in one object; see the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[str, _Meeting] = {}

    def winners(
        self,
        orders: Sequence[WinnerOrder],
        stop: threading.Event | None = None,
        *,
        met: threading.Event | None = None,
    ) -> list[Outcome]:
        """See `WinnerEngine.winners`; jobs meet one after the other."""
        outcomes: list[Outcome] = []
        for order in orders:
            try:
                outcomes.append(self._winners(order, stop, met))
            except LabelerError as error:
                outcomes.append(error)
        return outcomes

    def _winners(
        self, order: WinnerOrder, stop: threading.Event | None, met: threading.Event | None
    ) -> NDArray[np.int16]:
        job = order.job
        with self._lock:
            meeting = self._meetings.setdefault(job.job_id, _Meeting())
            meeting.digests[job.party] = job.digest
            meeting.shares[job.party] = order.share
            if order.rows is not None:
                meeting.rows[job.party] = order.rows
        deadline = time.monotonic() + job.time_limit_s
        while len(meeting.shares) < NUM_PARTIES:
            if time.monotonic() > deadline or (stop is not None and stop.wait(_POLL_S)):
                raise Unavailable("the other talliers did not come to the job in time, or it was stopped; try again")
            time.sleep(_POLL_S)
        if met is not None:
            met.set()
        if len(set(meeting.digests.values())) != 1:
            raise ProtocolViolation("the talliers were given different jobs; nothing was computed")
        if job.checks_rows:
            sums = job.field.total([meeting.rows[party].ravel() for party in range(NUM_PARTIES)]).reshape(
                len(job.contributors), job.num_queries
            )
            refuse_misshapen([agent for agent, row in zip(job.contributors, sums, strict=True) if row.any()])
        shares = [meeting.shares[party] for party in range(NUM_PARTIES)]
        return reference_winners(shares, field=job.field, threshold=job.threshold)
