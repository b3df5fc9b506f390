"""Jobs and their rounds out of the journal: three statements, however many there are, or all of it in one.

What a turn of the driver reads, what a requester who looks is shown, and what a restart begins with are the same rows.
Who looks is also shown what agents said before they were asked, and whether the job was forgotten: one statement.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection

from feature_store.journal.by_ids import ByIds, Together
from feature_store.journal.forgotten import FORGOTTEN, forgotten_in
from feature_store.journal.job_records import JobRecord, RoundCharge, RoundRecord
from feature_store.journal.job_tables import jobs
from feature_store.journal.willingness import ANSWERS, answers_in
from labeler.rounds.effects import Said

_COLUMNS = tuple(column.name for column in jobs.columns)
_TIMES = ("created_at", "updated_at", "expires_at")

_JOBS = ByIds(f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE job_id IN {{ids}}")  # names of columns
# Until it is known whom a job asks, one reservation, JOB/proposed, stands for all its rounds.
_ROUNDS = ByIds("""
SELECT r.job_id, r.number, r.first_query, r.num_queries, r.state, coalesce(r.batch_digest, planned.batch_digest),
       coalesce(r.round_digest, planned.round_digest), r.contributors, r.ledger_seq, who.verify_keys,
       CASE WHEN shared.number IS NULL THEN 0 ELSE 1 END,
       coalesce(own.state, whole.state), coalesce(own.settled_seq, own.first_seq, whole.settled_seq, whole.first_seq)
FROM rounds AS r
LEFT JOIN planned_batches AS planned ON planned.job_id = r.job_id AND planned.number = r.number
LEFT JOIN round_participants AS who ON who.job_id = r.job_id AND who.number = r.number
LEFT JOIN round_shares AS shared ON shared.job_id = r.job_id AND shared.number = r.number
LEFT JOIN ledger_reservations AS own ON own.reservation_id = r.job_id || '/' || CAST(r.number AS TEXT)
LEFT JOIN ledger_reservations AS whole ON whole.reservation_id = r.job_id || '/proposed'
WHERE r.job_id IN {ids} ORDER BY r.job_id, r.number""")
_SAID = ByIds("""
SELECT job_id, number, tallier_id, holdings, '' FROM round_holdings WHERE job_id IN {ids}
UNION ALL SELECT job_id, number, agent_id, sentence, kind FROM round_refusals WHERE job_id IN {ids}""")

_LOOK = Together((_JOBS, len(_COLUMNS)), (_ROUNDS, 13), (_SAID, 5), (ANSWERS, 6), (FORGOTTEN, 2))


@dataclass(frozen=True)
class Looked:
    """A job with everything that its view shows, from one moment of the journal.

    Attributes:
        rounds: in order.
        answers: agent id -> what it said last before it was asked.
        forgotten_at: when what it sent and got was deleted; None where it was not.
    """

    job: JobRecord
    rounds: list[RoundRecord]
    answers: Mapping[str, Said]
    forgotten_at: datetime | None


@dataclass(frozen=True)
class LookedRows:
    """The rows of one job as they were found: most are never looked at, since a job changes faster than people look.

    Attributes:
        others: rows of its rounds, of what was said of them, of agents' answers, and of its being forgotten.
    """

    job: Sequence[Any]
    others: tuple[list[Sequence[Any]], list[Sequence[Any]], list[Sequence[Any]], list[Sequence[Any]]]

    @property
    def state(self) -> str:
        """Of the job."""
        return str(self.job[_COLUMNS.index("state")])

    @property
    def task_digest(self) -> str:
        """Of the job."""
        return str(self.job[_COLUMNS.index("task_digest")])

    @property
    def num_rounds(self) -> int:
        """Of the job."""
        return len(self.others[0])

    @property
    def size(self) -> int:
        """Characters of all that was said of it, which is what making a view of it takes its time by."""
        return sum(len(value) for rows in self.others for row in rows for value in row if isinstance(value, str))

    def looked(self) -> Looked:
        """The job that they are of."""
        rounds, said, answers, forgotten = self.others
        ((job_id, job),) = _jobs_in([self.job]).items()
        return Looked(
            job,
            _rounds_in([job_id], sorted(rounds, key=itemgetter(0, 1)), said)[job_id],
            answers_in(answers).get(job_id, {}),
            forgotten_in(forgotten).get(job_id),
        )


def look_at(connection: Connection, job_ids: Collection[str]) -> dict[str, LookedRows]:
    """Rows of jobs by id, in one statement; jobs that are not there are left out."""
    in_jobs, *others = _LOOK.all(connection, job_ids)
    place = _COLUMNS.index("job_id")
    found = {row[place]: LookedRows(row, ([], [], [], [])) for row in in_jobs}
    for number, rows in enumerate(others):
        for row in rows:
            found[row[0]].others[number].append(row)
    return found


def read_jobs(connection: Connection, job_ids: Collection[str]) -> dict[str, JobRecord]:
    """Jobs by id; those that are not there are left out."""
    return _jobs_in(_JOBS.all(connection, job_ids))


def read_rounds_of(connection: Connection, job_ids: Collection[str]) -> dict[str, list[RoundRecord]]:
    """The rounds of jobs in order, by job; an empty list where there is no such job."""
    said = _SAID.all(connection, job_ids)
    return _rounds_in(job_ids, _ROUNDS.all(connection, job_ids), said)


def _jobs_in(rows: Iterable[Sequence[Any]]) -> dict[str, JobRecord]:
    found = {}
    for row in rows:
        values = dict(zip(_COLUMNS, row, strict=True))
        # Exact and fast for what `time_text` wrote; a text that comes from people is read by `time_of`.
        values |= {name: datetime.fromisoformat(values[name]) for name in _TIMES}
        values["problem"] = None if values["problem"] is None else json.loads(values["problem"])
        found[values["job_id"]] = JobRecord(**values)
    return found


def _rounds_in(
    job_ids: Collection[str], rows: Iterable[Sequence[Any]], said_rows: Iterable[Sequence[Any]]
) -> dict[str, list[RoundRecord]]:
    found: dict[str, list[RoundRecord]] = {job_id: [] for job_id in job_ids}
    holdings: dict[tuple[str, int], dict[str, dict[str, str]]] = {}
    refusals: dict[tuple[str, int], dict[str, str]] = {}
    final: dict[tuple[str, int], set[str]] = {}
    for job_id, number, party_id, said, kind in said_rows:
        if not kind:
            holdings.setdefault((job_id, number), {})[party_id] = json.loads(said)
            continue
        refusals.setdefault((job_id, number), {})[party_id] = said
        if kind == "final":
            final.setdefault((job_id, number), set()).add(party_id)
    for row in rows:
        job_id, number, first, count, state, batch, digest, contributors, seq, keys, shared, charged, charged_seq = row
        here = (job_id, number)
        found[job_id].append(
            RoundRecord(
                job_id=job_id,
                number=number,
                first_query=first,
                num_queries=count,
                state=state,
                batch_digest=batch or "",
                round_digest=digest or "",
                contributors=() if contributors is None else tuple(json.loads(contributors)),
                participants={} if keys is None else json.loads(keys),
                holdings=holdings.get(here, {}),
                refusals=refusals.get(here, {}),
                final_refusals=frozenset(final.get(here, ())),
                ledger_seq=seq,
                has_shares=bool(shared),
                charge=None if charged is None else RoundCharge(charged, charged_seq),
            )
        )
    return found
