"""How a job ends: the charge of rounds of which nothing left is given back, every other one stands."""

from __future__ import annotations

from api.problems import problem_of
from feature_store.journal.database import Database
from feature_store.journal.jobs import JobRecord, JobState, JobStore
from feature_store.journal.ledger import Ledger
from feature_store.journal.tasks import TaskStore
from labeler.budget import NothingLeft
from labeler.errors import LabelerError

UNFINISHED: tuple[JobState, ...] = ("queued", "collecting", "tallying")


def reservation_id(job_id: str, number: int) -> str:
    """The ledger's name for the charge of one round."""
    return f"{job_id}/{number}"


def settle_rounds(
    job: JobRecord,
    state: JobState,
    error: LabelerError | None,
    *,
    database: Database,
    ledger: Ledger,
    jobs: JobStore,
    tasks: TaskStore,
) -> JobRecord:
    """End a job in one transaction: void the charge of rounds of which nothing left, post all others.

    Nothing left of a round where nobody was asked, or where every participant refused and no share was ever passed on
    to a tallier. A refusal alone proves nothing: an agent may have answered, and refuse when it is asked again under
    another policy. In every other case shares may be on their way, so the charge stands.

    Args:
        job: unfinished.
        state: cancelled, failed or expired.
        error: why, shown to the requester.

    Returns:
        The job as it is now.
    """
    participants = set(tasks.get(job.task_digest).participants)
    with database.write() as connection:
        for one in jobs.rounds(job.job_id, connection=connection):
            name = reservation_id(job.job_id, one.number)
            if one.state == "waiting":
                ledger.void(name, NothingLeft(name, "never-asked"), connection=connection)
            elif one.state == "asked" and participants <= one.final_refusals and not one.has_shares:
                ledger.void(name, NothingLeft(name, "refused"), connection=connection)
            elif one.state in ("asked", "agreed"):
                detail = {"job": job.job_id, "queries": one.num_queries, "because": f"{state} after agents were asked"}
                ledger.post(name, detail=detail, connection=connection)
        problem = None if error is None else problem_of(error)
        return jobs.change(job.job_id, state, expected=UNFINISHED, problem=problem, connection=connection)
