"""The share that each requester has taken: what is given back counts for nobody, and no sum leaves 64 bits."""

from __future__ import annotations

import pytest

from labeler.budget import UNBOUNDED_NANO, NothingLeft
from labeler.ledger.database import Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.promises import RequesterShares
from tests.labeler.ledger.conftest import refuses


@pytest.fixture
def shares(database: Database, ledger: Ledger) -> RequesterShares:
    """Three prices: two of ada's, of which one is given back, and one of grace's that has no bound for the site."""
    for level in ("instance", "agent"):
        ledger.open_account("agent:a", level, None)  # type: ignore[arg-type]
    made = RequesterShares()
    for name, requester, agent in (("r1", "ada", 7), ("r2", "ada", 9), ("r3", "grace", UNBOUNDED_NANO)):
        charges = [Charge("agent:a", "instance", 5), Charge("agent:a", "agent", agent)]
        with database.write() as connection:
            ledger.reserve(name, charges, connection=connection)
            amounts = {one.level: one.amount for one in charges}
            made.note(requester, [(name, amounts)], life_nano=3, connection=connection)
    ledger.void("r2", NothingLeft("r2", "lapsed"))
    return made


def test_what_was_given_back_counts_for_nobody(database: Database, shares: RequesterShares) -> None:
    with database.read() as connection:
        found = {name: shares.taken(name, connection=connection) for name in ("ada", "grace", "nobody")}
    assert found == {
        "ada": ({"instance": 5, "agent": 7}, 3),
        "grace": ({"instance": 5, "agent": UNBOUNDED_NANO}, 3),
        "nobody": ({"instance": 0, "agent": 0}, 0),
    }


def test_what_was_noted_stays(database: Database, shares: RequesterShares) -> None:
    refuses(
        database,
        "UPDATE taken_by SET requester = 'grace' WHERE requester = 'ada'",
        "UPDATE taken_by SET instance_nano = 0",
        "DELETE FROM taken_by",
        "INSERT INTO taken_by VALUES ('of no ledger', 'ada', 1, 1, 1)",
    )
