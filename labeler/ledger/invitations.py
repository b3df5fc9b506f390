"""Invitations that a coordinator has made: for whom, until when, and by which keys they were used.

The token itself is shown once, in the file; here lies its hash. An invitation is used by one pair of keys for ever, so
a request that is sent again is answered the same, and other keys are refused. Rows are kept: who was let in, when and
by whose word is what an auditor asks for.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from labeler.invitation import token_digest
from labeler.ledger.database import Database, now_utc
from labeler.ledger.parties import Role
from labeler.ledger.schema import invitations
from labeler.system.clock import Clock

_SECRET_BYTES = 32


@dataclass(frozen=True)
class InvitationRecord:
    """An invitation without its token.

    Attributes:
        invitation_id: what it is called in records and logs; not secret.
        party_id, role, tallier: who is invited, as what.
        is_rotation: the party is enrolled and gets new keys.
        created_by: id of the access token that made it.
        withdrawn_at: since when it opens nothing; None while it may.
        used_at: when keys were enrolled with it; None before.
        verify_key, seal_key: those keys.
    """

    invitation_id: str
    party_id: str
    role: Role
    tallier: int | None
    is_rotation: bool
    created_by: str
    created_at: datetime
    expires_at: datetime
    withdrawn_at: datetime | None = None
    used_at: datetime | None = None
    verify_key: str | None = None
    seal_key: str | None = None

    def is_open(self, now: datetime) -> bool:
        """Return whether keys may still be enrolled with it."""
        return self.used_at is None and self.withdrawn_at is None and self.expires_at > now


_SHOWN = tuple(column for column in invitations.c if column.name != "token_digest")


class InvitationStore:
    """All invitations of a coordinator. Every method that writes can join a transaction by `connection`."""

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock

    def create(
        self,
        party_id: str,
        role: Role,
        *,
        tallier: int | None,
        is_rotation: bool,
        expires_at: datetime,
        created_by: str,
        connection: Connection | None = None,
    ) -> tuple[InvitationRecord, str]:
        """Invite a party; an earlier invitation of this name that was not used opens nothing any more.

        Returns:
            The record, and the token "inv_..."; nobody can show it a second time.
        """
        secret = "inv_" + secrets.token_urlsafe(_SECRET_BYTES)
        with self._database.writing(connection) as joined:
            self.withdraw(party_id, connection=joined)
            record = InvitationRecord(
                f"inv-{secrets.token_hex(8)}",
                party_id,
                role,
                tallier,
                is_rotation,
                created_by,
                self._clock(),
                expires_at,
            )
            fields = {column.name: getattr(record, column.name) for column in _SHOWN}
            joined.execute(
                insert(invitations),
                fields | {"is_rotation": int(is_rotation), "token_digest": token_digest(secret)},
            )
        return record, secret

    def find(self, secret: str, *, connection: Connection | None = None) -> InvitationRecord | None:
        """The invitation of a token, in whatever state; None where there is none.

        What is looked up is a hash that the asker cannot steer, and it is compared in constant time, so the time an
        answer takes says nothing about any token.
        """
        digest = token_digest(secret)
        query = select(*_SHOWN, invitations.c.token_digest).where(invitations.c.token_digest == digest)
        with self._database.reading(connection) as joined:
            row = joined.execute(query).first()
        if row is None or not hmac.compare_digest(row.token_digest, digest):
            return None
        return _record(row)

    def use(self, invitation_id: str, verify_key: str, seal_key: str, *, connection: Connection | None = None) -> None:
        """Note by which keys an open invitation was used, for ever."""
        with self._database.writing(connection) as joined:
            joined.execute(
                update(invitations)
                .where(invitations.c.invitation_id == invitation_id)
                .values(used_at=self._clock(), verify_key=verify_key, seal_key=seal_key)
            )

    def withdraw(self, party_id: str, *, connection: Connection | None = None) -> int:
        """Let invitations of a name that were not used open nothing any more; how many those were."""
        is_open = (
            invitations.c.party_id == party_id,
            invitations.c.used_at.is_(None),
            invitations.c.withdrawn_at.is_(None),
        )
        with self._database.writing(connection) as joined:
            done = joined.execute(update(invitations).where(*is_open).values(withdrawn_at=self._clock()))
        return int(done.rowcount)

    def lately(self, now: datetime, *, used_since: datetime) -> list[InvitationRecord]:
        """Invitations that may be used at a moment, and those that were used since another, oldest first."""
        is_open = (invitations.c.used_at.is_(None)) & (invitations.c.withdrawn_at.is_(None))
        lately = (is_open & (invitations.c.expires_at > now)) | (invitations.c.used_at >= used_since)
        query = select(*_SHOWN).where(lately).order_by(invitations.c.created_at, invitations.c.invitation_id)
        with self._database.read() as joined:
            return [_record(row) for row in joined.execute(query)]

    def list(self, *, connection: Connection | None = None) -> list[InvitationRecord]:
        """Every invitation, oldest first."""
        query = select(*_SHOWN).order_by(invitations.c.created_at, invitations.c.invitation_id)
        with self._database.reading(connection) as joined:
            return [_record(row) for row in joined.execute(query)]


def _record(row: Row[*tuple[Any, ...]]) -> InvitationRecord:
    fields = {name: value for name, value in row._mapping.items() if name != "token_digest"}
    return InvitationRecord(**(fields | {"is_rotation": bool(row.is_rotation)}))
