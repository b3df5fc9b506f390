"""A new job, its rounds and the key it was sent under, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import Connection, insert

from feature_store.journal.chain import time_text
from feature_store.journal.columns import json_text
from feature_store.journal.job_records import Idempotency, JobRecord, RoundRecord
from feature_store.journal.job_tables import idempotency_keys, jobs
from feature_store.journal.prepared import Parameter, Prepared

_ADD_JOB = Prepared(insert(jobs))
_ADD_ROUND = Prepared(
    "INSERT INTO rounds (job_id, number, first_query, num_queries, state) "
    "VALUES (:job_id, :number, :first_query, :num_queries, 'waiting')"
)
_KNOWN_KEY = Prepared("SELECT body_digest, job_id FROM idempotency_keys WHERE token_id = :token_id AND key = :key")
_ADD_KEY = Prepared(insert(idempotency_keys))


def add_job(connection: Connection, job: JobRecord, rounds_of_job: Sequence[RoundRecord]) -> None:
    """Write a job and its rounds, which are checked to be its own."""
    row: dict[str, Parameter] = {column.name: getattr(job, column.name) for column in jobs.columns}
    row |= {name: time_text(getattr(job, name)) for name in ("created_at", "updated_at", "expires_at")}
    row["problem"] = None if job.problem is None else json_text(job.problem)
    _ADD_JOB.run(connection, **row)
    names = ("job_id", "number", "first_query", "num_queries")
    _ADD_ROUND.run_many(connection, [{name: getattr(one, name) for name in names} for one in rounds_of_job])


def known_key(connection: Connection, token_id: str, key: str) -> Idempotency | None:
    """What a token has used a key for; None where it has not."""
    found = _KNOWN_KEY.first(connection, token_id=token_id, key=key)
    return None if found is None else Idempotency(token_id, key, body_digest=found[0], job_id=found[1])


def add_key(connection: Connection, idempotency: Idempotency) -> None:
    """Keep what a key is used for, for ever."""
    _ADD_KEY.run(connection, **asdict(idempotency))
