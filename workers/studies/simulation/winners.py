"""Three simulated talliers find winners together: the arithmetic of workers.studies.winner_reference, without waiting.

Between processes the three calls of a job run at the same time. Here one tallier has its turn after the other, so who
comes first is told that the others are not there yet, as by a job that has timed out, and is asked again; what it
brought stays in the room. The last to come finds all three.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from labeler.errors import ProtocolViolation, Unavailable
from labeler.sharing import unshard
from workers.studies.winner_reference import reference_winners
from workers.winner.engine import NUM_PARTIES, WinnerJob


class MeetingRoom:
    """A `workers.winner.engine.WinnerEngine` for the three talliers of one simulated federation."""

    def __init__(self) -> None:
        self._brought: dict[str, dict[int, tuple[str, NDArray[np.uint64], NDArray[np.uint64] | None]]] = {}

    def winners(
        self,
        job: WinnerJob,
        share: NDArray[np.uint64],
        stop: threading.Event | None = None,  # noqa: ARG002  # it never waits
        *,
        rows: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.int16]:
        """See WinnerEngine.

        Raises:
            Unavailable: not all three have come.
            ProtocolViolation: they were told different things, or a ballot's rows do not sum to zero.
        """
        job.check_share(share, rows)
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
