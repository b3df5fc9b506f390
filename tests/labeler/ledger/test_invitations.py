"""Invitations in the journal: used once, withdrawn once, whatever program writes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, update
from sqlalchemy.exc import DatabaseError

from labeler.ledger.database import Database
from labeler.ledger.parties import InvitationStore
from labeler.ledger.schema import invitations

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
KEYS = ("a1" * 32, "a2" * 32)


def make(store: InvitationStore, party_id: str = "registry") -> tuple[str, str]:
    record, secret = store.create(
        party_id, "tallier", tallier=0, is_rotation=False, expires_at=NOW + timedelta(days=7), created_by="tok-1"
    )
    return record.invitation_id, secret


def test_an_invitation_is_found_by_its_token_alone(database: Database) -> None:
    store = InvitationStore(database, clock=lambda: NOW)
    invitation_id, secret = make(store)
    found = store.find(secret)
    assert found is not None
    assert (found.invitation_id, found.is_rotation, found.tallier) == (invitation_id, False, 0)
    assert store.find(secret[:-1] + ("x" if secret[-1] != "x" else "y")) is None
    assert store.find("") is None


def test_a_second_invitation_of_a_name_withdraws_the_first(database: Database) -> None:
    store = InvitationStore(database, clock=lambda: NOW)
    _, first = make(store)
    make(store, "university")
    _, second = make(store)
    states = {secret: store.find(secret) for secret in (first, second)}
    assert [found.withdrawn_at is None for found in states.values() if found] == [False, True]
    assert [one.withdrawn_at for one in store.list()].count(None) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"verify_key": "b1" * 32},
        {"used_at": NOW + timedelta(days=1)},
        {"party_id": "hospital-b"},
        {"withdrawn_at": NOW},
        {"token_digest": "00" * 32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_used_stays_as_it_was_used(database: Database, changes: dict[str, object]) -> None:
    store = InvitationStore(database, clock=lambda: NOW)
    invitation_id, secret = make(store)
    store.use(invitation_id, *KEYS)
    with pytest.raises(DatabaseError), database.write() as connection:
        connection.execute(update(invitations).values(**changes))
    with pytest.raises(DatabaseError), database.write() as connection:
        connection.execute(delete(invitations))
    found = store.find(secret)
    assert found is not None
    assert (found.verify_key, found.seal_key, found.used_at) == (*KEYS, NOW)
    assert store.withdraw("registry") == 0
