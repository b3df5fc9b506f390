"""Enrolled agents and talliers: their public keys, last contact, how far their journals are, and their invitations.

A key is used by one party, once: a key that was replaced or revoked is never taken again, and no two parties share one.
The store remembers the head of each party's journal. A party that comes back with an older journal has lost charges,
and is refused.

The token of an invitation is shown once, in the file; the store has its hash. An invitation is permanently bound to
the first pair of keys that uses it: the same request gets the same answer again, and other keys are refused. Rows are
kept, because an auditor asks who was let in, when and on whose authority.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Row, insert, select, update

from labeler.errors import InvalidSetting, JournalBehind, NotEnrolled, NotFound, ProtocolViolation
from labeler.invitation import token_digest
from labeler.ledger.chain import EMPTY, Head
from labeler.ledger.database import Database, insert_rows, now_utc, select_rows, update_rows
from labeler.ledger.schema import invitations, json_text, parties, party_heads, party_keys
from labeler.messages import COORDINATOR
from labeler.system.clock import Clock
from labeler.tally import MAX_TALLIERS
from labeler.untrusted import check_party_id

Role = Literal["agent", "tallier"]
State = Literal["active", "revoked"]

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PartyRecord:
    """A party as the coordinator knows it.

    Attributes:
        tallier: number of the tallier, from 0; None for an agent.
        verify_key, seal_key: public, 64 hexadecimal digits.
        state: revoked parties are neither asked nor believed.
        last_contact: when it was last heard of; None if never.
        facts: what it says about itself; nothing private.
        journal_seq, journal_hash: the furthest head of its journal that it reported when it polled; 0 and "" if none.
    """

    party_id: str
    role: Role
    tallier: int | None
    verify_key: str
    seal_key: str
    state: State
    enrolled_at: datetime
    last_contact: datetime | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    journal_seq: int = 0
    journal_hash: str = ""


class PartyStore:
    """All parties of a coordinator. Every method that writes can join a transaction by `connection`.

    Args:
        clock: the time now, with a time zone; used for `enrolled_at`.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._version = 0
        self._known: tuple[int, tuple[PartyRecord, ...]] | None = None

    @property
    def version(self) -> int:
        """Return a counter of durable changes through this store; a cache of parties compares it."""
        return self._version

    def all(self) -> tuple[PartyRecord, ...]:
        """Return all parties by id, as they are now; cached until one is changed through this store."""
        with self._lock:
            version, known = self._version, self._known
        if known is None or known[0] != version or self._database.is_read_only:  # another process changes them
            # Read the rows after the version, so that a change in between is read again.
            known = (version, tuple(self.list()))
            with self._lock:
                self._known = known
        return known[1]

    def known(self, party_id: str) -> PartyRecord | None:
        """Return one party as `all` remembers it; None if no party of this id was enrolled."""
        return next((one for one in self.all() if one.party_id == party_id), None)

    def _changed(self) -> None:
        """Count a change. Call it in the write transaction of the change."""

        def count() -> None:
            with self._lock:
                self._version += 1

        self._database.after_commit(count)

    def enrol(
        self,
        party_id: str,
        role: Role,
        verify_key: str,
        seal_key: str,
        *,
        tallier: int | None = None,
        connection: Connection | None = None,
    ) -> PartyRecord:
        """Enrol a party; a repeat changes nothing.

        Raises:
            InvalidSetting: a tallier without a number from 0 to 2, an agent with one, or a malformed key.
            ProtocolViolation: the id is known with another role or other keys, a key was used before, or another
                active tallier has this number.
        """
        check_party_id(party_id, "the id of a party")
        if party_id == COORDINATOR:
            raise InvalidSetting(f"the id {COORDINATOR!r} is the coordinator's own; choose another")
        if role not in ("agent", "tallier"):
            raise InvalidSetting("a party is an agent or a tallier")
        if (role == "tallier") != (tallier is not None):
            raise InvalidSetting("a tallier has a number from 0, and an agent has none")
        if tallier is not None and (type(tallier) is not int or not 0 <= tallier < MAX_TALLIERS):
            raise InvalidSetting(f"the number of a tallier lies between 0 and {MAX_TALLIERS - 1}")
        _check_keys(verify_key, seal_key)
        with self._database.writing(connection) as joined:
            known = self._find(party_id, joined)
            if known is not None:
                asked = (role, tallier, verify_key, seal_key, "active")
                if (known.role, known.tallier, known.verify_key, known.seal_key, known.state) != asked:
                    raise ProtocolViolation(
                        f"{party_id!r} is enrolled already (role {known.role}, {known.state}), and not with exactly "
                        "this role, number and keys. To give it new keys, rotate them; another party needs another id"
                    )
                return known
            self._check_number(tallier, joined)
            self._check_unused((verify_key, seal_key), joined)
            record = PartyRecord(party_id, role, tallier, verify_key, seal_key, "active", self._clock())
            self._changed()
            insert_rows(joined, parties, {column.name: getattr(record, column.name) for column in parties.columns})
            self._keep_keys(party_id, (verify_key, seal_key), joined)
            return record

    def get(self, party_id: str, *, connection: Connection | None = None) -> PartyRecord:
        """Return one party, active or revoked.

        Raises:
            NotFound: no party of this id was enrolled.
        """
        with self._database.reading(connection) as joined:
            found = self._find(party_id, joined)
        if found is None:
            raise NotFound(f"no party {party_id[:200]!r} is enrolled; an administrator has to enrol its keys")
        return found

    def list(self, role: Role | None = None, *, connection: Connection | None = None) -> list[PartyRecord]:
        """Return all parties, or those of one role, by id, including revoked ones."""
        with self._database.reading(connection) as joined:
            found = select_rows(joined, parties, ("party_id",)).all()
        return [PartyRecord(**row._mapping) for row in found if role in (None, row.role)]

    def rotate(
        self, party_id: str, verify_key: str, seal_key: str, *, connection: Connection | None = None
    ) -> PartyRecord:
        """Give a party new keys, both of them; a revoked party becomes active again. A repeat changes nothing.

        The known head of its journal stays: new keys do not excuse a lost journal.

        Raises:
            NotFound: no party of this id was enrolled.
            ProtocolViolation: a key was used before, by this party or another, or its tallier number was taken over.
        """
        _check_keys(verify_key, seal_key)
        with self._database.writing(connection) as joined:
            known = self.get(party_id, connection=joined)
            if (known.state, known.verify_key, known.seal_key) == ("active", verify_key, seal_key):
                return known
            if known.state == "revoked":
                self._check_number(known.tallier, joined)
            self._check_unused((verify_key, seal_key), joined)
            self._changed()
            self._keep_keys(party_id, (verify_key, seal_key), joined)
            new = {"verify_key": verify_key, "seal_key": seal_key, "state": "active"}
            update_rows(joined, parties, new, party_id=party_id)
            return self.get(party_id, connection=joined)

    def revoke(self, party_id: str) -> PartyRecord:
        """Revoke a party's keys permanently; its number as a tallier becomes free.

        Raises:
            NotFound: no party of this id was enrolled.
        """
        with self._database.write() as joined:
            self._changed()
            update_rows(joined, parties, {"state": "revoked"}, party_id=party_id)
            return self.get(party_id, connection=joined)

    def contact(
        self,
        party_id: str,
        at: datetime,
        facts: Mapping[str, Any],
        head: Head,
        *,
        connection: Connection | None = None,
    ) -> None:
        """Note that a party was heard from, what it says about itself, and how far its journal is.

        Raises:
            NotFound: no party of this id was enrolled.
            NotEnrolled: its keys were revoked.
            JournalBehind: its journal is shorter than it was, or has another entry where it ended.
        """
        json_text(dict(facts))
        with self._database.writing(connection) as joined:
            known = self.get(party_id, connection=joined)
            if known.state != "active":
                raise NotEnrolled(f"the keys of {party_id!r} were revoked; ask the administrator")
            seen = _furthest(known, self._answered_at(party_id, joined))
            if not _is_as_far(head, seen):
                raise JournalBehind(
                    f"the journal of {party_id!r} ended at entry {seen.seq} and now ends at entry {head.seq}, "
                    "or holds another entry there: it was restored from an older copy, and charges are missing from "
                    "it. Restore its newest journal"
                )
            self._changed()
            heard = {"last_contact": max(at, known.last_contact or at), "facts": dict(facts)}
            heard |= {"journal_seq": head.seq, "journal_hash": head.hash if head.seq else ""}
            update_rows(joined, parties, heard, party_id=party_id)

    def answered(self, heads: Mapping[str, Head], *, connection: Connection) -> None:
        """Keep the journal heads that came with parties' answers; a head that is not further changes nothing."""
        for party_id, head in heads.items():
            before = self._answered_at(party_id, connection)
            values = {"seq": head.seq, "hash": head.hash}
            if before == EMPTY and head.seq:
                insert_rows(connection, party_heads, {"party_id": party_id} | values)
            elif head.seq > before.seq:
                update_rows(connection, party_heads, values, party_id=party_id)

    def last_answer(self, party_id: str) -> Head:
        """Return the head of a party's journal at its last answer.

        The coordinator sends it to the party. An older copy that has grown since reports another, longer head when it
        polls, but it answers nothing before it has compared this one.
        """
        with self._database.read() as connection:
            return self._answered_at(party_id, connection)

    def is_as_far(self, party: PartyRecord, head: Head) -> bool:
        """Return whether a journal with this head is long enough; only its owner can check that it is the same."""
        return _is_as_far(head, _furthest(party, self.last_answer(party.party_id)))

    def _answered_at(self, party_id: str, connection: Connection) -> Head:
        found = select_rows(connection, party_heads, party_id=party_id).first()
        return EMPTY if found is None else Head(found.seq, found.hash)

    def _find(self, party_id: str, connection: Connection) -> PartyRecord | None:
        row = select_rows(connection, parties, party_id=party_id).first()
        return None if row is None else PartyRecord(**row._mapping)

    def _check_number(self, tallier: int | None, connection: Connection) -> None:
        if tallier is None:
            return
        other = select_rows(connection, parties, tallier=tallier, state="active").first()
        if other is not None:
            raise ProtocolViolation(
                f"tallier {tallier} is {other.party_id!r}; two parties of one number would each hold a share meant for "
                "one. Revoke the other first"
            )

    def _check_unused(self, keys: tuple[str, str], connection: Connection) -> None:
        used = select_rows(connection, party_keys, key=list(keys)).first()
        if used is not None:
            raise ProtocolViolation(
                f"one of these keys was enrolled before, for {used.party_id!r}; a key belongs to one party and is not "
                "taken twice. Make new ones with `labeler keys`"
            )

    def _keep_keys(self, party_id: str, keys: tuple[str, str], connection: Connection) -> None:
        insert_rows(connection, party_keys, *({"key": key, "party_id": party_id} for key in keys))


def _is_as_far(head: Head, seen: Head) -> bool:
    return head.seq > seen.seq or head == seen


def _furthest(party: PartyRecord, answered: Head) -> Head:
    polled = Head(party.journal_seq, party.journal_hash) if party.journal_seq else EMPTY
    return max(polled, answered, key=lambda head: head.seq)


def _check_keys(verify_key: str, seal_key: str) -> None:
    if not all(isinstance(key, str) and _KEY.fullmatch(key) for key in (verify_key, seal_key)):
        raise InvalidSetting("a public key is 64 hexadecimal digits in lower case")
    if verify_key == seal_key:
        raise InvalidSetting("the key that verifies and the key that seals are two different ones")


_SECRET_BYTES = 32


@dataclass(frozen=True)
class InvitationRecord:
    """An invitation without its token.

    Attributes:
        invitation_id: its name in records and logs; not secret.
        party_id, role, tallier: the invited party.
        is_rotation: the party is enrolled and gets new keys.
        created_by: id of the access token that made it.
        withdrawn_at: when it was withdrawn; None while it may be used.
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
        """Invite a party; an earlier unused invitation of this name stops working.

        Returns:
            The record, and the token "inv_..."; it cannot be shown a second time.
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
        """Return the invitation of a token, in any state; None if there is none.

        The lookup key is a hash that the caller cannot steer, and it is compared in constant time. So the time of an
        answer tells nothing about any token.
        """
        digest = token_digest(secret)
        query = select(*_SHOWN, invitations.c.token_digest).where(invitations.c.token_digest == digest)
        with self._database.reading(connection) as joined:
            row = joined.execute(query).first()
        if row is None or not hmac.compare_digest(row.token_digest, digest):
            return None
        return _record(row)

    def use(self, invitation_id: str, verify_key: str, seal_key: str, *, connection: Connection | None = None) -> None:
        """Record permanently the keys that used an open invitation."""
        with self._database.writing(connection) as joined:
            joined.execute(
                update(invitations)
                .where(invitations.c.invitation_id == invitation_id)
                .values(used_at=self._clock(), verify_key=verify_key, seal_key=seal_key)
            )

    def withdraw(self, party_id: str, *, connection: Connection | None = None) -> int:
        """Withdraw the unused invitations of a name; return their number."""
        is_open = (
            invitations.c.party_id == party_id,
            invitations.c.used_at.is_(None),
            invitations.c.withdrawn_at.is_(None),
        )
        with self._database.writing(connection) as joined:
            done = joined.execute(update(invitations).where(*is_open).values(withdrawn_at=self._clock()))
        return int(done.rowcount)

    def lately(self, now: datetime, *, used_since: datetime) -> list[InvitationRecord]:
        """Return invitations that may be used at a moment, and those used since another moment, oldest first."""
        is_open = (invitations.c.used_at.is_(None)) & (invitations.c.withdrawn_at.is_(None))
        lately = (is_open & (invitations.c.expires_at > now)) | (invitations.c.used_at >= used_since)
        query = select(*_SHOWN).where(lately).order_by(invitations.c.created_at, invitations.c.invitation_id)
        with self._database.read() as joined:
            return [_record(row) for row in joined.execute(query)]

    def list(self, *, connection: Connection | None = None) -> list[InvitationRecord]:
        """Return every invitation, oldest first."""
        query = select(*_SHOWN).order_by(invitations.c.created_at, invitations.c.invitation_id)
        with self._database.reading(connection) as joined:
            return [_record(row) for row in joined.execute(query)]


def _record(row: Row[*tuple[Any, ...]]) -> InvitationRecord:
    fields = {name: value for name, value in row._mapping.items() if name != "token_digest"}
    return InvitationRecord(**(fields | {"is_rotation": bool(row.is_rotation)}))
