"""A new job, its rounds and the key it was sent under, as rows: statements compiled once for a database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import Connection, Text, bindparam, insert, literal_column, select
from sqlalchemy.sql import ClauseElement

from feature_store.journal.chain import time_text
from feature_store.journal.columns import json_text
from feature_store.journal.job_records import Idempotency, JobRecord, RoundRecord
from feature_store.journal.job_tables import idempotency_keys, jobs, rounds
from feature_store.journal.prepared import Parameter, prepared


def add_job(connection: Connection, job: JobRecord, rounds_of_job: Sequence[RoundRecord]) -> None:
    """Write a job and its rounds, which are checked to be its own."""
    row: dict[str, Parameter] = {column.name: getattr(job, column.name) for column in jobs.columns}
    row |= {name: time_text(getattr(job, name)) for name in ("created_at", "updated_at", "expires_at")}
    row["problem"] = None if job.problem is None else json_text(job.problem)
    prepared(_add_job, connection.dialect).run(connection, **row)
    names = ("job_id", "number", "first_query", "num_queries")
    prepared(_add_round, connection.dialect).run_many(
        connection, [{name: getattr(one, name) for name in names} for one in rounds_of_job]
    )


def known_key(connection: Connection, token_id: str, key: str) -> Idempotency | None:
    """What a token has used a key for; None where it has not."""
    found = prepared(_known_key, connection.dialect).first(connection, of_token=token_id, of_key=key)
    return None if found is None else Idempotency(token_id, key, body_digest=found[0], job_id=found[1])


def add_key(connection: Connection, idempotency: Idempotency) -> None:
    """Keep what a key is used for, for ever."""
    prepared(_add_key, connection.dialect).run(connection, **asdict(idempotency))


def _add_job() -> ClauseElement:
    return insert(jobs)


def _add_round() -> ClauseElement:
    names = ("job_id", "number", "first_query", "num_queries")
    values = {name: bindparam(name, type_=rounds.c[name].type) for name in names}
    return insert(rounds).values(state=literal_column("'waiting'", Text), **values)


def _known_key() -> ClauseElement:
    table = idempotency_keys.c
    this = (table.token_id == bindparam("of_token"), table.key == bindparam("of_key"))
    return select(table.body_digest, table.job_id).where(*this)


def _add_key() -> ClauseElement:
    return insert(idempotency_keys)
