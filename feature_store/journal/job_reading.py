"""Jobs and their rounds out of the journal: three statements, however many there are.

What a turn of the driver reads, what a requester who looks is shown, and what a restart begins with are the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import datetime

from sqlalchemy import Connection

from feature_store.journal.by_ids import ByIds
from feature_store.journal.job_records import JobRecord, RoundCharge, RoundRecord
from feature_store.journal.job_tables import jobs

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


def read_jobs(connection: Connection, job_ids: Collection[str]) -> dict[str, JobRecord]:
    """Jobs by id; those that are not there are left out."""
    found = {}
    for row in _JOBS.all(connection, job_ids):
        values = dict(zip(_COLUMNS, row, strict=True))
        # Exact and fast for what `time_text` wrote; a text that comes from people is read by `time_of`.
        values |= {name: datetime.fromisoformat(values[name]) for name in _TIMES}
        values["problem"] = None if values["problem"] is None else json.loads(values["problem"])
        found[values["job_id"]] = JobRecord(**values)
    return found


def read_rounds_of(connection: Connection, job_ids: Collection[str]) -> dict[str, list[RoundRecord]]:
    """The rounds of jobs in order, by job; an empty list where there is no such job."""
    found: dict[str, list[RoundRecord]] = {job_id: [] for job_id in job_ids}
    holdings: dict[tuple[str, int], dict[str, dict[str, str]]] = {}
    refusals: dict[tuple[str, int], dict[str, str]] = {}
    final: dict[tuple[str, int], set[str]] = {}
    for job_id, number, party_id, said, kind in _SAID.all(connection, job_ids):
        if not kind:
            holdings.setdefault((job_id, number), {})[party_id] = json.loads(said)
            continue
        refusals.setdefault((job_id, number), {})[party_id] = said
        if kind == "final":
            final.setdefault((job_id, number), set()).add(party_id)
    for row in _ROUNDS.all(connection, job_ids):
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
