"""Sums of single talliers as they arrive at the coordinator, kept until the round is opened.

A tallier's sum is fixed by the first that arrives: another one of the same round would be over other agents, and two
sums of one round differ by single ballots. When the release is stored the sums are dropped; their digests stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from sqlalchemy import Connection, select

from feature_store.journal import round_statements as sql
from feature_store.journal.database import Database
from feature_store.journal.job_tables import JOB_TABLES, aggregate_shares
from feature_store.journal.joining import reading, writing
from labeler.errors import NotFound, NotReady, PrivacyRefusal


class AggregateStore:
    """All sums of talliers that wait to be put together. Secret until then: never printed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(*JOB_TABLES)

    def put(
        self,
        round_digest: str,
        tallier_id: str,
        data: bytes,
        *,
        is_kept: bool = True,
        connection: Connection | None = None,
    ) -> None:
        """Keep one tallier's sum; the same bytes again change nothing, also after they were dropped.

        Args:
            is_kept: False where the round is opened in this very transaction: only its digest stays, and it never
                reaches the disk.

        Raises:
            NotFound: there is no such round.
            NotReady: its charge is not posted yet.
            PrivacyRefusal: this tallier has sent another sum of this round.
        """
        digest = hashlib.sha256(data).hexdigest()
        with writing(self._database, connection) as joined:
            known = sql.SUM_DIGEST.first(joined, digest=round_digest, tallier_id=tallier_id)
            if known is not None and known[0] == digest:
                return
            if known is not None:
                raise PrivacyRefusal(
                    f"tallier {tallier_id!r} has sent another sum of round {round_digest[:12]!r}; a round is summed "
                    "once, so the second is refused for ever. Find out why its journal forgot the first"
                )
            asked = sql.STATE_OF_DIGEST.first(joined, digest=round_digest)
            asked = asked or sql.STATE_OF_LIVE_ROUND.first(joined, digest=round_digest)
            if asked is None:
                raise NotFound(f"there is no round {round_digest[:12]!r}")
            if asked[0] != "posted":
                raise NotReady(
                    f"round {round_digest[:12]!r} is {asked[0]}; a sum is taken while its round is posted only"
                )
            sql.ADD_SUM.run(
                joined,
                round_digest=round_digest,
                tallier_id=tallier_id,
                data=data if is_kept else None,
                data_digest=digest,
            )

    def of_all(
        self, round_digests: Collection[str], *, connection: Connection | None = None
    ) -> dict[str, dict[str, bytes]]:
        """Round -> tallier id -> its sum, of those that have arrived and were not dropped."""
        table = aggregate_shares
        found: dict[str, dict[str, bytes]] = {}
        if not round_digests:
            return found
        query = select(table.c.round_digest, table.c.tallier_id, table.c.data).where(
            table.c.round_digest.in_(list(round_digests)), table.c.data.is_not(None)
        )
        with reading(self._database, connection) as joined:
            for row in joined.execute(query):
                found.setdefault(row.round_digest, {})[row.tallier_id] = bytes(row.data)
        return found


def drop_sums(connection: Connection, round_digest: str) -> None:
    """Drop the sums of a round, in a write transaction."""
    sql.DROP_SUMS.run(connection, digest=round_digest)
