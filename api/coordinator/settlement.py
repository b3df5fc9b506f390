"""What is charged when, and to whom; how a job ends.

    submitted        JOB/proposed reserves the worst case: every round, the federation and every agent of the task
    settled          in one transaction it is given back, and JOB/0, JOB/1, ... reserve one round each, for the
                     federation and the agents that are asked; who declined is charged nothing
    round asked      from here on nobody can say that nothing left
    agreed on        JOB/N is posted
    job ends         rounds of which nothing left are given back, every other one is posted; queries of rounds that
                     nobody was asked about go back to their task, in the same transaction. Those of a round that
                     was asked stay used up, even where everybody refused and its charge went back: the questions
                     were told, and who refuses now may have paid and answered before

A job of an earlier version has JOB/N from its submission on, for every agent of its task, and is asked that way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from api.coordinator.pricing import charges_of, finite_levels, round_amounts
from api.problems import problem_of
from labeler.budget import NothingLeft
from labeler.errors import LabelerError, NotReady
from labeler.ledger.database import Connection, Database
from labeler.ledger.jobs import JobRecord, JobState, JobStore, RoundRecord
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.rounds.effects import UNFINISHED
from labeler.task import Level

Amounts = Mapping[Level, int]
"""Nano-units by level."""


def reservation_id(job_id: str, number: int) -> str:
    """The ledger's name for the charge of one round."""
    return f"{job_id}/{number}"


def proposed_id(job_id: str) -> str:
    """The ledger's name for the worst case of a whole job, until it is known whom it asks."""
    return f"{job_id}/proposed"


def worst_case(task: TaskRecord, sizes: Sequence[int], num_queries: int) -> list[Charge]:
    """What a job reserves while it is proposed: all its rounds, in the accounts of everybody who may take part.

    Args:
        task: with its agents.
        sizes: queries of each round.
        num_queries: of the job.
    """
    total: dict[Level, int] = {}
    for amounts in round_prices(task, sizes, num_queries):
        for level, amount in amounts.items():
            total[level] = total.get(level, 0) + amount
    return charges_of(task.participants, total)


def round_prices(task: TaskRecord, sizes: Sequence[int], num_queries: int) -> list[dict[Level, int]]:
    """What each round of a job is recorded as, by level: of rounds of such sizes."""
    finite = finite_levels(task.task, num_queries)
    by_size = {
        (size, is_first): round_amounts(task.task, size, finite=finite, answered=0 if is_first else 1)
        for size in set(sizes)
        for is_first in (True, False)
    }
    return [by_size[size, number == 0] for number, size in enumerate(sizes)]


@dataclass(frozen=True)
class JournalSettlement:
    """How jobs are settled in this journal (labeler.driver.storing.Settlement)."""

    database: Database
    ledger: Ledger
    jobs: JobStore
    tasks: TaskStore

    def prices(self, job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord) -> list[dict[Level, int]]:
        """See `round_prices`."""
        return round_prices(task, [one.num_queries for one in rounds], job.num_queries)

    def divide(
        self,
        job: JobRecord,
        rounds: Sequence[RoundRecord],
        task: TaskRecord,
        asked: Collection[str],
        *,
        amounts: Sequence[Amounts],
        connection: Connection,
    ) -> None:
        """Put one reservation per round, for those who are asked, in the place of the job's.

        Nothing was asked under the job's reservation, and what takes its place is part of it, so it always fits.

        Args:
            amounts: what each round costs (`prices`), worked out before the transaction: a price may take seconds.

        Raises:
            NotReady: the job has ended meanwhile.
        """
        whole = proposed_id(job.job_id)
        state = self.ledger.state(whole, connection=connection)
        if state is None:
            return  # of an earlier version: its rounds are reserved already
        if state != "reserved":
            raise NotReady(f"job {job.job_id!r} has ended meanwhile, and its charge was given back")
        self.ledger.void(whole, NothingLeft(whole, "divided"), connection=connection)
        for one, nano in zip(rounds, amounts, strict=True):
            self.ledger.reserve(
                reservation_id(job.job_id, one.number),
                charges_of([agent for agent in task.participants if agent in asked], nano),
                detail={"job": job.job_id, "task": task.digest, "queries": one.num_queries, "by": job.created_by},
                connection=connection,
            )

    def end(
        self, job: JobRecord, state: JobState, error: LabelerError | None, *, connection: Connection | None = None
    ) -> JobRecord:
        """End a job in one transaction: void the charge of rounds of which nothing left, post all others.

        Nothing left of a round where nobody was asked, or where everybody who was asked refused and no share was ever
        passed on to a tallier. A refusal alone proves nothing: an agent may have answered, and refuse when it is asked
        again under another policy. In every other case shares may be on their way, so the charge stands.

        Args:
            job: unfinished.
            state: cancelled, failed, refused or expired.
            error: why, shown to the requester.
            connection: write transaction to join.

        Returns:
            The job as it is now.
        """
        with self.database.writing(connection) as connection:
            now = self.jobs.get(job.job_id, connection=connection)
            if now.is_finished:
                # Somebody else ended it, and gave back what there was.
                return now
            asked = self.jobs.willingness.asked(job.job_id, connection=connection)
            participants = set(asked or self.tasks.get(job.task_digest, connection=connection).participants)
            rounds = self.jobs.rounds(job.job_id, connection=connection)
            whole = proposed_id(job.job_id)
            if self.ledger.state(whole, connection=connection) == "reserved":
                if all(one.state == "waiting" for one in rounds):
                    self.ledger.void(whole, NothingLeft(whole, "never-asked"), connection=connection)
                else:
                    # No program of ours asks before it has divided; whichever did, what it asked is paid for.
                    self.ledger.post(
                        whole, detail={"job": job.job_id, "because": "asked before divided"}, connection=connection
                    )
            for one in rounds:
                name = reservation_id(job.job_id, one.number)
                if self.ledger.state(name, connection=connection) is None:
                    continue  # it was reserved with the whole job, and nobody was asked
                if one.state == "waiting":
                    self.ledger.void(name, NothingLeft(name, "never-asked"), connection=connection)
                elif one.state == "asked" and participants <= one.final_refusals and not one.has_shares:
                    self.ledger.void(name, NothingLeft(name, "refused"), connection=connection)
                elif one.state in ("asked", "agreed"):
                    detail = {
                        "job": job.job_id,
                        "queries": one.num_queries,
                        "because": f"{state} after agents were asked",
                    }
                    self.ledger.post(name, detail=detail, connection=connection)
            problem = None if error is None else problem_of(error)
            ended = self.jobs.change(job.job_id, state, expected=UNFINISHED, problem=problem, connection=connection)
            # After the end: until then a round that waits could still be asked.
            for first_query, num_queries in self.jobs.unasked(job.job_id, connection=connection):
                self.tasks.give_back(job.task_digest, first_query, num_queries, connection=connection)
            return ended
