"""Three simulated talliers find winners together: the arithmetic of tests.oracles.winner_reference, without waiting.

Between processes the three calls of a job run at the same time. Here one tallier has its turn after the other, so who
comes first is told that the others are not there yet, as by a job that has timed out, and is asked again; what it
brought stays in the room. The last to come finds all three.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labeler.errors import LabelerError, ProtocolViolation, Unavailable
from labeler.sharing import unshard
from tests.oracles.winner_reference import reference_winners
from workers.winner.engine import NUM_PARTIES, Outcome, WinnerOrder


class MeetingRoom:
    """A `workers.winner.engine.WinnerEngine` for the three talliers of one simulated federation."""

    def __init__(self) -> None:
        self._brought: dict[str, dict[int, tuple[str, NDArray[np.uint64], NDArray[np.uint64] | None]]] = {}

    def winners(
        self,
        orders: Sequence[WinnerOrder],
        stop: threading.Event | None = None,  # noqa: ARG002  # it never waits
        *,
        met: threading.Event | None = None,  # noqa: ARG002
    ) -> list[Outcome]:
        """See WinnerEngine."""
        outcomes: list[Outcome] = []
        for order in orders:
            try:
                outcomes.append(self._winners(order))
            except LabelerError as error:
                outcomes.append(error)
        return outcomes

    def _winners(self, order: WinnerOrder) -> NDArray[np.int16]:
        """The winners of one job.

        Raises:
            Unavailable: not all three have come.
            ProtocolViolation: they were told different things, or a ballot's rows do not sum to zero.
        """
        job, share, rows = order.job, order.share, order.rows
        there = self._brought.setdefault(job.job_id, {})
        there[job.party] = (job.digest, share, rows)
        if len(there) < NUM_PARTIES:
            raise Unavailable("the other talliers have not come yet")
        if len({digest for digest, _, _ in there.values()}) != 1:
            raise ProtocolViolation("the talliers were told different things about this round")
        brought = [there[party] for party in range(NUM_PARTIES)]
        sums = [part for _, _, part in brought if part is not None]
        if sums and np.any(unshard(sums, field=job.field)):
            raise ProtocolViolation("the rows of a ballot do not sum to what they must")
        return reference_winners([part for _, part, _ in brought], field=job.field, threshold=job.threshold)
