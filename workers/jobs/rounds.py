"""The rounds of a run: the coordinator's driver (feature_store.driving), turn by turn, with its parties in one thread.

    turn of the driver: machine steps, one commit, what leaves  ->  parties answer  ->  the next turn takes it

Every rule of a round is the machine's and every durable step the journal's, the same as in the service. Nobody is
waited for: each send is answered before the next turn. So a run that cannot go on is over, and says why; the same
command goes on from what is in the journal.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from feature_store.driving.coordinator import CoordinatorDriver
from feature_store.journal.jobs import JobRecord
from labeler.errors import ProtocolViolation, Unavailable
from labeler.rounds.effects import UNFINISHED
from labeler.rounds.job_state import JobRun
from labeler.task import Task
from workers.jobs.parties import RunParties
from workers.jobs.run_journal import RunJournal, RunSettlement, ended_because


class GivenQuestions:
    """Questions that were there before the job; a `feature_store.driving.stepping.Questions`."""

    def __init__(self, features: NDArray[np.int16]) -> None:
        self._features = features

    def has_features(self, job: JobRecord, task: Task) -> bool:  # noqa: ARG002  # of the only job
        """They were given."""
        return True

    def look(self, job: JobRecord, task: Task) -> NDArray[np.int16]:  # noqa: ARG002  # of the only job
        """See Questions."""
        return self._features

    def read(self, job_id: str) -> NDArray[np.int16]:  # noqa: ARG002  # as above
        """See Questions."""
        return self._features


def run_rounds(
    journal: RunJournal,
    job: JobRecord,
    features: NDArray[np.int16],
    parties: RunParties,
    *,
    is_seeded: bool,
    on_step: Callable[[JobRun], None] = lambda _: None,
) -> None:
    """Bring a job to its end.

    Args:
        features: its questions, int16, shape (queries, dimension).
        is_seeded: noise from a known seed is expected.
        on_step: told of the job after each step that is durable.

    Raises:
        LabelerError: a party refuses, or the job cannot go on; what was charged stays charged.
    """
    if job.state not in UNFINISHED:
        if job.state != "completed":
            raise ended_because(job)
        return
    settlement = RunSettlement(journal)
    driver = journal.driver(parties, parties, GivenQuestions(features), settlement, is_simulated=is_seeded)
    last: list[JobRun] = []

    def observe(_: JobRun, after: JobRun) -> None:
        last[:] = [after]
        on_step(after)

    driver.observe = observe
    while not (last and last[0].state not in UNFINISHED):
        _turns(driver, job.job_id)
        events = parties.answer()
        if not (events or (last and last[0].state not in UNFINISHED)):
            raise (
                ProtocolViolation(f"a job in one process stopped at {last[0].state}; this is a defect of this program")
                if last
                else Unavailable("the journal in the job's folder cannot be read now; run the same command again")
            )
        for event in events:
            driver.tell(job.job_id, event)
    if settlement.error is not None:
        raise settlement.error


def _turns(driver: CoordinatorDriver, job_id: str) -> None:
    """As many turns as follow from what was said.

    Raises:
        Exception: why the job could not go on; a service would try again, and a run is told.
    """
    is_more = True
    while is_more:
        is_more = driver.turn()
        trouble = driver.trouble(job_id)
        if trouble is not None:
            raise trouble
