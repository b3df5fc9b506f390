"""Access tokens: shown once, kept as a hash, found by the secret and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from labeler.errors import InvalidSetting, NotFound
from labeler.ledger import tokens as tokens_module
from labeler.ledger.database import Database
from labeler.ledger.tokens import TokenRecord, TokenStore
from tests.labeler.ledger.conftest import Clock, refuses


@pytest.fixture
def store(database: Database, clock: Clock) -> TokenStore:
    return TokenStore(database, clock=clock)


def test_a_token_is_found_by_its_secret_alone(store: TokenStore, clock: Clock) -> None:
    assert store.count() == 0
    record, secret = store.create("ci", "requester")
    other, different = store.create("ops", "admin")
    assert secret != different
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
    refuses(database, "UPDATE tokens SET revoked_at = NULL", "UPDATE tokens SET role = 'admin', name = 'x'")


def test_a_token_is_known_from_its_first_use_until_any_is_revoked(store: TokenStore, database: Database) -> None:
    (record, secret), (other, _) = store.create("ci", "admin"), store.create("ops", "admin")
    assert store.known(secret) is None
    assert store.find(secret) == record == store.known(secret)
    store.revoke(other.token_id)
    assert store.known(secret) is None
    assert store.find(secret) == record
    store.revoke(record.token_id)
    assert store.known(secret) is store.find(secret) is None


def test_a_look_that_began_before_a_revocation_is_not_remembered(
    store: TokenStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, secret = store.create("ci", "admin")
    read = tokens_module.select_rows

    def and_then_revoked(*asked: Any, **values: Any) -> Any:
        found = read(*asked, **values)
        monkeypatch.undo()
        return found if store.revoke(record.token_id) else None

    monkeypatch.setattr(tokens_module, "select_rows", and_then_revoked)
    assert store.find(secret) == record  # it was asked while the token was good
    assert store.known(secret) is store.find(secret) is None


@pytest.mark.parametrize(("name", "role"), [("", "admin"), ("x" * 101, "admin"), ("a\nb", "admin"), ("a", "root")])
def test_a_malformed_token_is_refused(store: TokenStore, name: str, role: str) -> None:
    with pytest.raises(InvalidSetting):
        store.create(name, role)  # type: ignore[arg-type]
    assert store.list() == []
