"""Access tokens: shown once, kept as a hash, found by the secret and by nothing else."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from labeler.errors import InvalidSetting, NotFound
from labeler.ledger.database import Database
from labeler.ledger.tokens import TokenRecord, TokenStore
from tests.labeler.ledger.conftest import Clock


@pytest.fixture
def store(database: Database, clock: Clock) -> TokenStore:
    return TokenStore(database, clock=clock)


def test_a_token_is_found_by_its_secret_alone(store: TokenStore, clock: Clock) -> None:
    assert store.count() == 0
    record, secret = store.create("ci", "requester")
    other, _ = store.create("ops", "admin")
    assert (record.name, record.role, record.created_at, record.revoked_at) == ("ci", "requester", clock.now, None)
    assert secret.startswith("lab_")
    assert len(secret) >= 4 + 43  # 256 bits in base64
    assert store.find(secret) == record
    for wrong in ("", "lab_", secret[:-1], secret + "x", secret.upper(), record.token_id, secret[4:], "lab_" + "é" * 9):
        assert store.find(wrong) is None
    assert store.find("lab_\ud800") is None
    assert store.find("lab_" + "x" * 10_000) is None
    assert {one.token_id for one in store.list()} == {record.token_id, other.token_id}
    assert store.count() == 2


def test_the_secret_is_kept_nowhere(store: TokenStore, database: Database) -> None:
    record, secret = store.create("ci", "viewer")
    with database.read() as connection:
        stored = str(connection.execute(text("SELECT * FROM tokens")).all())
    assert secret not in stored
    assert secret[4:] not in stored
    assert secret not in repr(record)


def test_the_name_of_a_token_is_told_also_after_it_was_revoked(store: TokenStore) -> None:
    record, _ = store.create("data team", "requester")
    assert store.name_of("tok_nobody") == ""
    store.revoke(record.token_id)
    assert [store.name_of(record.token_id) for _ in range(2)] == ["data team"] * 2


def test_secrets_differ(store: TokenStore) -> None:
    made = [store.create("t", "viewer") for _ in range(20)]
    assert len({secret for _, secret in made}) == len({record.token_id for record, _ in made}) == 20


def test_a_revoked_token_opens_nothing_for_ever(store: TokenStore, database: Database, clock: Clock) -> None:
    record, secret = store.create("ci", "admin")
    clock.turn(hours=1)
    revoked = store.revoke(record.token_id)
    assert revoked == TokenRecord(record.token_id, "ci", "admin", record.created_at, clock.now)
    clock.turn(hours=1)
    assert store.revoke(record.token_id) == revoked
    assert store.find(secret) is None
    assert store.list() == [revoked]
    assert store.count() == 0
    with pytest.raises(NotFound):
        store.revoke("tok_none")
    for statement in ("UPDATE tokens SET revoked_at = NULL", "UPDATE tokens SET role = 'admin', name = 'x'"):
        with pytest.raises(IntegrityError), database.write() as connection:
            connection.execute(text(statement))


@pytest.mark.parametrize(("name", "role"), [("", "admin"), ("x" * 101, "admin"), ("a\nb", "admin"), ("a", "root")])
def test_a_malformed_token_is_refused(store: TokenStore, name: str, role: str) -> None:
    with pytest.raises(InvalidSetting):
        store.create(name, role)  # type: ignore[arg-type]
    assert store.list() == []
