"""Enrolled parties: one party one pair of keys, one number one tallier, and journals that never get shorter.

Also their invitations: used once, withdrawn once, whatever program writes.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, update
from sqlalchemy.exc import DatabaseError

from labeler.errors import InvalidSetting, JournalBehind, LabelerError, NotEnrolled, NotFound, ProtocolViolation
from labeler.ledger.chain import Head
from labeler.ledger.database import Database
from labeler.ledger.parties import InvitationRecord, InvitationStore, PartyRecord, PartyStore
from labeler.ledger.schema import invitations
from tests.labeler.ledger.conftest import Clock, at_once, refuses

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
EMPTY = Head(0, "0" * 64)


def key(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def store(database: Database, clock: Clock) -> PartyStore:
    return PartyStore(database, clock=clock)


def enrol(store: PartyStore, name: str = "alice", first: int = 1) -> PartyRecord:
    """Enroll an agent with two keys in a row."""
    return store.enrol(name, "agent", key(first), key(first + 1))


def test_a_party_is_enrolled_once_and_the_same_again_changes_nothing(store: PartyStore, clock: Clock) -> None:
    alice = enrol(store)
    assert alice == PartyRecord("alice", "agent", None, key(1), key(2), "active", clock.now)
    clock.turn(hours=1)
    assert enrol(store) == alice
    assert store.get("alice") == alice
    tallier = store.enrol("t1", "tallier", key(3), key(4), tallier=1)
    assert store.list() == [alice, tallier]
    assert store.list("tallier") == [tallier]
    with pytest.raises(NotFound):
        store.get("bob")


@pytest.mark.parametrize(
    ("role", "keys", "number"),
    [("agent", (1, 9), None), ("agent", (9, 2), None), ("tallier", (1, 2), 0), ("agent", (8, 9), None)],
)
def test_a_known_id_with_anything_else_is_refused(
    store: PartyStore, role: str, keys: tuple[int, int], number: int | None
) -> None:
    alice = enrol(store)
    with pytest.raises(ProtocolViolation, match="rotate"):
        store.enrol("alice", role, key(keys[0]), key(keys[1]), tallier=number)  # type: ignore[arg-type]
    assert store.list() == [alice]


@pytest.mark.parametrize(
    ("party_id", "role", "verify", "seal", "number"),
    [
        ("coordinator", "agent", key(1), key(2), None),
        ("", "agent", key(1), key(2), None),
        ("a\nb", "agent", key(1), key(2), None),
        ("a", "admin", key(1), key(2), None),
        ("a", "agent", key(1), key(2), 0),
        ("a", "tallier", key(1), key(2), None),
        ("a", "tallier", key(1), key(2), 3),
        ("a", "tallier", key(1), key(2), -1),
        ("a", "tallier", key(1), key(2), True),
        ("a", "agent", "A" * 64, key(2), None),
        ("a", "agent", key(1), "12", None),
        ("a", "agent", key(1), key(1), None),
    ],
)
def test_a_malformed_party_is_refused(
    store: PartyStore, party_id: str, role: str, verify: str, seal: str, number: int | None
) -> None:
    with pytest.raises(LabelerError):
        store.enrol(party_id, role, verify, seal, tallier=number)  # type: ignore[arg-type]
    assert store.list() == []


def test_a_key_belongs_to_one_party_and_is_never_taken_twice(store: PartyStore) -> None:
    enrol(store)
    for verify, seal in ((1, 5), (5, 1), (2, 5), (5, 2)):
        with pytest.raises(ProtocolViolation, match="'alice'"):
            store.enrol("bob", "agent", key(verify), key(seal))
    enrol(store, "bob", 3)
    store.rotate("alice", key(6), key(7))
    for verify, seal in ((1, 2), (3, 8), (1, 8), (8, 2), (6, 8)):
        with pytest.raises(ProtocolViolation, match="enrolled before"):
            store.rotate("alice", key(verify), key(seal))
    with pytest.raises(ProtocolViolation):
        enrol(store, "carol")


def test_new_keys_take_the_place_of_the_old_and_what_is_known_of_the_journal_stays(store: PartyStore) -> None:
    enrol(store)
    store.contact("alice", NOW, {"classes": ["x"]}, Head(7, key(70)))
    rotated = store.rotate("alice", key(3), key(4))
    assert (rotated.verify_key, rotated.seal_key, rotated.journal_seq) == (key(3), key(4), 7)
    assert store.rotate("alice", key(3), key(4)) == rotated
    with pytest.raises(NotFound):
        store.rotate("bob", key(5), key(6))


def test_a_revoked_party_is_not_believed_until_it_has_new_keys(store: PartyStore) -> None:
    enrol(store)
    assert store.revoke("alice").state == "revoked"
    assert store.revoke("alice").state == "revoked"
    with pytest.raises(NotEnrolled):
        store.contact("alice", NOW, {}, EMPTY)
    for again in (lambda: enrol(store), lambda: store.rotate("alice", key(1), key(2))):
        with pytest.raises(ProtocolViolation):
            again()
    assert store.rotate("alice", key(3), key(4)).state == "active"
    with pytest.raises(NotFound):
        store.revoke("bob")


def test_two_active_talliers_never_have_one_number(store: PartyStore, database: Database) -> None:
    store.enrol("t0", "tallier", key(1), key(2), tallier=0)
    with pytest.raises(ProtocolViolation, match="tallier 0 is 't0'"):
        store.enrol("other", "tallier", key(3), key(4), tallier=0)
    store.revoke("t0")
    store.enrol("other", "tallier", key(3), key(4), tallier=0)
    with pytest.raises(ProtocolViolation, match="tallier 0 is 'other'"):
        store.rotate("t0", key(5), key(6))
    assert store.get("t0").state == "revoked"
    refuses(database, "UPDATE parties SET state = 'active'")


def test_of_many_talliers_enrolled_at_once_one_gets_the_number(store: PartyStore) -> None:
    def take(number: int) -> PartyRecord:
        return store.enrol(f"t{number}", "tallier", key(2 * number + 1), key(2 * number + 2), tallier=0)

    assert [one for one in at_once(6, take, ProtocolViolation) if one] == store.list()
    assert len(store.list()) == 1


def test_a_contact_is_noted_and_last_contact_never_goes_back(store: PartyStore) -> None:
    enrol(store)
    store.contact("alice", NOW, {"backbone_fingerprint": "f"}, EMPTY)
    assert (store.get("alice").journal_seq, store.get("alice").journal_hash) == (0, "")
    store.contact("alice", NOW - timedelta(days=1), {"classes": ["ä", "b"]}, Head(3, key(30)))
    found = store.get("alice")
    assert (found.last_contact, found.facts) == (NOW, {"classes": ["ä", "b"]})
    assert (found.journal_seq, found.journal_hash) == (3, key(30))


def test_a_party_with_an_older_or_another_journal_is_refused(store: PartyStore) -> None:
    enrol(store)
    store.contact("alice", NOW, {}, Head(5, key(50)))
    store.contact("alice", NOW, {}, Head(5, key(50)))
    before = store.get("alice")
    for head in (EMPTY, Head(4, key(40)), Head(5, key(51))):
        with pytest.raises(JournalBehind, match="entry 5"):
            store.contact("alice", NOW + timedelta(hours=1), {"x": 1}, head)
    assert store.get("alice") == before
    store.contact("alice", NOW, {}, Head(6, key(60)))


def test_what_came_with_an_answer_is_seen_of_a_journal_and_only_rises(store: PartyStore, database: Database) -> None:
    enrol(store)
    assert store.last_answer("alice") == EMPTY
    store.contact("alice", NOW, {}, Head(5, key(50)))
    for head in (Head(7, key(70)), Head(6, key(60)), Head(7, key(71))):
        with database.write() as connection:
            store.answered({"alice": head}, connection=connection)
        assert store.last_answer("alice") == PartyStore(database).last_answer("alice") == Head(7, key(70))
    for head in (Head(6, key(60)), Head(7, key(71))):
        assert not store.is_as_far(store.get("alice"), head)
        with pytest.raises(JournalBehind, match="entry 7"):
            store.contact("alice", NOW, {}, head)
    # A longer one may be that journal, or an older copy that has grown: its owner learns of the answer, and compares.
    store.contact("alice", NOW, {}, Head(9, key(90)))
    assert store.last_answer("alice") == Head(7, key(70))
    refuses(database, "DELETE FROM party_heads", "UPDATE party_heads SET seq = 6")


def test_facts_that_are_no_json_are_refused_without_repeating_them(store: PartyStore) -> None:
    enrol(store)
    for fact in (float("nan"), {1, 2}, b"votes"):
        with pytest.raises(InvalidSetting) as refusal:
            store.contact("alice", NOW, {"secret": fact}, EMPTY)
        assert "secret" not in str(refusal.value)


def test_the_database_itself_keeps_parties_keys_and_heads(store: PartyStore, database: Database) -> None:
    enrol(store)
    store.contact("alice", NOW, {}, Head(5, key(50)))
    before = store.get("alice")
    refuses(
        database,
        "UPDATE parties SET journal_seq = 4",
        "UPDATE parties SET role = 'tallier', tallier = 0",
        "UPDATE parties SET party_id = 'mallory'",
        "DELETE FROM party_keys",
        "UPDATE party_keys SET party_id = 'alice', key = 'x'",
        "DELETE FROM parties",
    )
    assert store.get("alice") == before


# Invitations.


@pytest.fixture
def invited(database: Database, clock: Clock) -> InvitationStore:
    return InvitationStore(database, clock=clock)


def invite(store: InvitationStore, party_id: str = "registry") -> tuple[InvitationRecord, str]:
    return store.create(
        party_id, "tallier", tallier=0, is_rotation=False, expires_at=NOW + timedelta(days=7), created_by="tok-1"
    )


def test_an_invitation_is_found_by_its_token_alone(invited: InvitationStore) -> None:
    record, secret = invite(invited)
    assert invited.find(secret) == record
    assert (record.is_rotation, record.tallier) == (False, 0)
    assert invited.find(secret[:-1] + ("x" if secret[-1] != "x" else "y")) is invited.find("") is None


def test_a_second_invitation_of_a_name_withdraws_the_first(invited: InvitationStore) -> None:
    _, first = invite(invited)
    invite(invited, "university")
    _, second = invite(invited)
    states = {secret: invited.find(secret) for secret in (first, second)}
    assert [found.withdrawn_at is None for found in states.values() if found] == [False, True]
    assert [one.withdrawn_at for one in invited.list()].count(None) == 2


def test_what_was_used_stays_as_it_was_used(invited: InvitationStore, database: Database) -> None:
    record, secret = invite(invited)
    invited.use(record.invitation_id, key(1), key(2))
    for changes in (
        {"verify_key": key(3)},
        {"used_at": NOW + timedelta(days=1)},
        {"party_id": "hospital-b"},
        {"withdrawn_at": NOW},
        {"token_digest": "00" * 32},
    ):
        with pytest.raises(DatabaseError), database.write() as connection:
            connection.execute(update(invitations).values(**changes))
    with pytest.raises(DatabaseError), database.write() as connection:
        connection.execute(delete(invitations))
    found = invited.find(secret)
    assert (found.verify_key, found.seal_key, found.used_at) == (key(1), key(2), NOW)
    assert invited.withdraw("registry") == 0
