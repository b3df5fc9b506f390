"""Jobs out of the journal into the coordinator's machine: all of a turn in one read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from feature_store.job_files.releases import release_from_bytes
from feature_store.journal.database import Connection, Database
from feature_store.journal.jobs import JobRecord, JobStore, RoundRecord
from feature_store.journal.parties import PartyRecord
from feature_store.journal.rounds import AggregateStore
from feature_store.journal.tasks import TaskRecord, TaskStore
from labeler.release import Release
from labeler.rounds.effects import Party, Patience, Said
from labeler.rounds.job_state import JobRun, RoundRun

_MOST_TASKS = 1024


@dataclass(frozen=True)
class Loaded:
    """A job as it was read.

    Attributes:
        record: its row; what never changes of it may be kept.
        rounds: their rows; what never changes of them may be kept.
    """

    record: JobRecord
    task: TaskRecord
    rounds: tuple[RoundRecord, ...]
    run: JobRun


class Loader:
    """Reads jobs; remembers tasks, which never change but for the queries given out.

    Args:
        requester_of: the name of whoever holds a token, by its id; never of a job that nobody submitted.
        is_simulated: noise from a known seed is expected.
    """

    def __init__(
        self,
        database: Database,
        tasks: TaskStore,
        jobs: JobStore,
        aggregates: AggregateStore,
        patience: Patience,
        *,
        requester_of: Callable[[str], str],
        is_simulated: bool = False,
    ) -> None:
        self._database = database
        self._tasks = tasks
        self._jobs = jobs
        self._aggregates = aggregates
        self._patience = patience
        self._requester_of = requester_of
        self._is_simulated = is_simulated
        self._known: dict[str, TaskRecord] = {}

    def unfinished(self) -> list[str]:
        """Ids of every job that is not finished, oldest first."""
        return self._jobs.unfinished_ids()

    def job_of_round(self, round_digest: str) -> str:
        """The job of a round.

        Raises:
            NotFound: there is none.
        """
        return self._jobs.round_of(round_digest).job_id

    def load(self, job_ids: Collection[str], parties: Mapping[str, Party]) -> dict[str, Loaded]:
        """Jobs as they are kept; those that are not there are left out."""
        if not job_ids:
            return {}
        with self._database.read() as connection:
            records = self._jobs.many(job_ids, connection=connection)
            rounds = self._jobs.rounds_of(list(records), connection=connection)
            answers = self._jobs.willingness.answers_of(list(records), connection=connection)
            asked = self._jobs.willingness.asked_of(list(records), connection=connection)
            self._learn({record.task_digest for record in records.values()}, connection)
            posted = [one.round_digest for found in rounds.values() for one in found if one.state == "posted"]
            sums = self._aggregates.of_all(posted, connection=connection)
            opened = {
                one.round_digest: release_from_bytes(data)
                for job_id, found in rounds.items()
                if self._known[records[job_id].task_digest].task.traits.is_sampled
                for one in found
                if (data := self._jobs.release(job_id, one.number, connection=connection)) is not None
            }
        return {
            job_id: Loaded(
                record,
                self._known[record.task_digest],
                tuple(rounds[job_id]),
                self._run(record, rounds[job_id], sums, opened, answers.get(job_id, {}), asked.get(job_id), parties),
            )
            for job_id, record in records.items()
        }

    def _learn(self, digests: Collection[str], connection: Connection) -> None:
        missing = [digest for digest in digests if digest not in self._known]
        if missing:
            while len(self._known) + len(missing) > _MOST_TASKS and self._known:
                self._known.pop(next(iter(self._known)))
            # Those of this turn that were dropped just now are read again.
            wanted = [digest for digest in digests if digest not in self._known]
            self._known |= self._tasks.get_all(wanted, connection=connection)

    def _run(
        self,
        record: JobRecord,
        rounds: Iterable[RoundRecord],
        sums: Mapping[str, Mapping[str, bytes]],
        opened: Mapping[str, Release],
        answers: Mapping[str, Said],
        asked: tuple[str, ...] | None,
        parties: Mapping[str, Party],
    ) -> JobRun:
        task = self._known[record.task_digest]
        return JobRun(
            job_id=record.job_id,
            task=task.task,
            participants=task.participants,
            num_queries=record.num_queries,
            expires_at_s=record.expires_at.timestamp(),
            patience=self._patience,
            state=record.state,
            rounds=tuple(
                RoundRun(
                    number=one.number,
                    first_query=one.first_query,
                    num_queries=one.num_queries,
                    state=one.state,
                    batch_digest=one.batch_digest,
                    round_digest=one.round_digest,
                    participants=one.participants,
                    holdings=one.holdings,
                    refusals=one.refusals,
                    final=one.final_refusals,
                    contributors=one.contributors,
                    has_shares=one.has_shares,
                    sums=sums.get(one.round_digest, {}),
                    opened=opened.get(one.round_digest),
                )
                for one in rounds
            ),
            answers=answers,
            asked=asked,
            parties=parties,
            requester=self._requester_of(record.created_by),
            is_simulated=self._is_simulated,
        )


def parties_of(records: Iterable[PartyRecord]) -> dict[str, Party]:
    """The parties whose keys are in force, as the machine needs them."""
    return {one.party_id: _party(one) for one in records if one.state == "active"}


def _party(one: PartyRecord) -> Party:
    return Party(one.party_id, one.tallier, one.verify_key, one.seal_key, one.last_contact is not None)
