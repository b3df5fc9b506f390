"""Settlement of jobs: the charges of a job by time, and its end.

    submitted        JOB/proposed reserves the worst case: every round, the federation and every agent of the task. Only
                     the federation's charges have entries; those of the agents are held, so a job that ends unasked
                     leaves few.
    settled          In one transaction it is given back, and JOB/0, JOB/1, ... reserve one round each, for the
                     federation and the agents that are asked. An agent that declined is charged nothing.
    round asked      From here on nobody can prove that no answer left.
    agreed on        JOB/N is posted.
    job ends         Rounds from which nothing left are given back, every other one is posted. Queries of rounds
                     without an asked agent return to their task, in the same transaction.

Queries of an asked round stay used, even if every agent refused and the charge was given back. The questions were
revealed, and an agent that refuses now may have paid and answered before.

A run in one process (workers.run) reserves nothing as a whole: its first charges are those of its rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labeler.budget import NothingLeft
from labeler.errors import LabelerError, NotReady
from labeler.ledger.database import Connection, Database
from labeler.ledger.jobs import JobRecord, JobState, JobStore, RoundRecord
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.rounds import proposed_id, reservation_id
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.rounds.effects import UNFINISHED
from labeler.task import Level

Amounts = Mapping[Level, int]
"""Nano-units by level."""


@dataclass(frozen=True)
class Settlement:
    """Settles the jobs of a journal.

    Attributes:
        price_rounds: returns the recorded charge of each round of a job, from its task, the queries of each round, and
            of the job. It may take seconds, so it runs before a transaction.
        charges_of: returns what the asked agents, and others, are charged for a round of these amounts.
        problem_of: returns an error as the job states it.
    """

    database: Database
    ledger: Ledger
    jobs: JobStore
    tasks: TaskStore
    price_rounds: Callable[[TaskRecord, Sequence[int], int], Sequence[Amounts]]
    charges_of: Callable[[Sequence[str], Amounts], list[Charge]]
    problem_of: Callable[[LabelerError], dict[str, Any]]

    def prices(self, job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord) -> Sequence[Amounts]:
        """Return the price of each round."""
        return self.price_rounds(task, [one.num_queries for one in rounds], job.num_queries)

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
        """Replace the job's reservation by one per round, for the asked agents.

        Nothing was asked under the job's reservation, and its replacements are part of it, so they always fit.

        Args:
            amounts: each round's cost (`prices`), computed before the transaction.

        Raises:
            NotReady: the job has ended meanwhile.
        """
        whole = proposed_id(job.job_id)
        state = self.ledger.state(whole, connection=connection)
        if state not in ("reserved", None):
            raise NotReady(f"job {job.job_id!r} has ended meanwhile, and its charge was given back")
        if state is not None:
            self.ledger.void(whole, NothingLeft(whole, "divided"), connection=connection)
        for one, nano in zip(rounds, amounts, strict=True):
            self.ledger.reserve(
                reservation_id(job.job_id, one.number),
                self.charges_of([agent for agent in task.participants if agent in asked], nano),
                detail={"job": job.job_id, "task": task.digest, "queries": one.num_queries, "by": job.created_by},
                connection=connection,
            )

    def end(
        self, job: JobRecord, state: JobState, error: LabelerError | None, *, connection: Connection | None = None
    ) -> JobRecord:
        """End a job in one transaction: void the charges of rounds from which nothing left, post all others.

        Nothing left from a round if no agent was asked, or if every asked agent refused and no share was ever passed on
        to a tallier. A refusal alone proves nothing: an agent may have answered, and refuse when it is asked again
        under another policy. In every other case shares may be in transit, so the charge stands.

        Args:
            job: unfinished.
            state: cancelled, failed, refused or expired.
            error: the reason, shown to the requester.
            connection: write transaction to join.

        Returns:
            The job in its new state.
        """
        with self.database.writing(connection) as connection:
            now = self.jobs.get(job.job_id, connection=connection)
            if now.is_finished:
                # Another caller ended it, and settled its charges.
                return now
            asked = self.jobs.willingness.asked(job.job_id, connection=connection)
            participants = set(asked or self.tasks.get(job.task_digest, connection=connection).participants)
            rounds = self.jobs.rounds(job.job_id, connection=connection)
            whole = proposed_id(job.job_id)
            state_of_whole = self.ledger.state(whole, connection=connection)
            if state_of_whole == "reserved":
                if all(one.state == "waiting" for one in rounds):
                    self.ledger.void(whole, NothingLeft(whole, "never-asked"), connection=connection)
                else:
                    # This program never asks before `divide`; if another did, its questions are paid for.
                    self.ledger.post(
                        whole, detail={"job": job.job_id, "because": "asked before divided"}, connection=connection
                    )
            for one in rounds:
                name = reservation_id(job.job_id, one.number)
                if self.ledger.state(name, connection=connection) is None:
                    continue  # reserved with the whole job, and no agent was asked
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
            problem = None if error is None else self.problem_of(error)
            ended = self.jobs.change(job.job_id, state, expected=UNFINISHED, problem=problem, connection=connection)
            # After the end: until then a waiting round could still be asked. A run claims no queries.
            unasked = self.jobs.unasked(job.job_id, connection=connection) if state_of_whole is not None else []
            for first_query, num_queries in unasked:
                self.tasks.give_back(job.task_digest, first_query, num_queries, connection=connection)
            return ended
