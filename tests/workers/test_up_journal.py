"""Before a federation's coordinator starts its parties are enrolled, and its administrator's token is there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from feature_store.journal.database import open_database
from feature_store.journal.parties import PartyStore
from feature_store.keys import PartyKeys
from labeler.errors import BadData
from workers.federation.home import LocalFederation, make_federation
from workers.federation.journal import prepare_journal
from workers.federation.plan import Plan


@pytest.fixture
def federation(tmp_path: Path) -> LocalFederation:
    home = tmp_path / "federation"
    home.mkdir(mode=0o700)
    return make_federation(home, Plan(agents=2))


def parties_of(federation: LocalFederation) -> dict[str, tuple[str, int | None, str, str]]:
    with closing(open_database(federation.coordinator / "journal.db", read_only=True)) as database:
        found = PartyStore(database).list()
    return {one.party_id: (one.role, one.tallier, one.state, one.verify_key) for one in found}


def test_everybody_is_enrolled_with_keys_and_numbers_once(federation: LocalFederation) -> None:
    prepare_journal(federation)
    enrolled = parties_of(federation)
    keys = {one.party_id: one.keys.verify_key for one in federation.enrolments()}
    assert enrolled == {
        "tallier-0": ("tallier", 0, "active", keys["tallier-0"]),
        "tallier-1": ("tallier", 1, "active", keys["tallier-1"]),
        "tallier-2": ("tallier", 2, "active", keys["tallier-2"]),
        "agent-1": ("agent", None, "active", keys["agent-1"]),
        "agent-2": ("agent", None, "active", keys["agent-2"]),
    }
    prepare_journal(federation)
    assert parties_of(federation) == enrolled


def test_whom_an_administrator_has_revoked_stays_revoked_at_the_next_start(federation: LocalFederation) -> None:
    prepare_journal(federation)
    with closing(open_database(federation.coordinator / "journal.db")) as database:
        PartyStore(database).revoke("agent-2")
    prepare_journal(federation)
    assert {name: state for name, (_, _, state, _) in parties_of(federation).items()}["agent-2"] == "revoked"


def test_keys_that_are_not_those_enrolled_are_refused_with_the_party_they_are_of(federation: LocalFederation) -> None:
    prepare_journal(federation)
    path = federation.agents["agent-2"] / "keys.json"
    path.unlink()
    PartyKeys.generate().save(path)
    with pytest.raises(BadData, match="agent-2 cannot be enrolled: 'agent-2' is enrolled already"):
        prepare_journal(federation)
