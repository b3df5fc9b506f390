"""A step of a round by itself, as tests take it; the driver takes those of a turn in one transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from labeler.ledger import rounds
from labeler.ledger.jobs import JobStore


def take_step(
    store: JobStore, name: str, job_id: str, *args: Any, connection: Connection | None = None, **named: Any
) -> None:
    """Take the step of that name (labeler.ledger.rounds), and raise the job's version where it changed it."""
    with store._database.writing(connection) as joined:
        if getattr(rounds, name)(joined, job_id, *args, **named):
            store.touch(job_id, connection=joined)
