"""Spends of votes for life in both databases: added with an answer or not at all, never less, never gone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, update
from sqlalchemy.exc import DBAPIError

from labeler.errors import BudgetExceeded, InvalidSetting, LabelerError, PrivacyRefusal
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import (
    CLOSED,
    NO_DIGESTS,
    OTHER_KEY,
    CastVotes,
    LifetimeSpends,
    all_set_aside,
    close_lifetimes,
    set_aside,
)
from labeler.ledger.schema import life_aside, life_closed, life_rounds, life_spends
from tests.labeler.ledger.conftest import Place, undone


def digests(*numbers: int) -> np.ndarray:
    return np.array([[number, -number] for number in numbers], dtype=np.int64).reshape(-1, 2)


def cast(spends: LifetimeSpends, nano: dict[int, int], *, key: str = "site") -> CastVotes:
    images = digests(*nano)
    return CastVotes(spends.spent(images).version, key, images, np.array(list(nano.values()), dtype=np.int64))


@pytest.mark.process
def test_spends_add_up_and_outlive_the_process(place: Place) -> None:
    database = place.open()
    spends = LifetimeSpends(database)
    for number, nano in enumerate(({1: 5, 2: 7}, {2: 1, 3: 9}, {})):
        with database.write() as connection:
            spends.add(f"{number:064}", cast(spends, nano), connection=connection)
    assert spends.spent(digests(3, 1, 4, 2)).spent.tolist() == [9, 5, 0, 8]
    place.close()
    again = LifetimeSpends(place.open())
    assert again.spent(digests(1, 2, 3)).spent.tolist() == [5, 8, 9]
    assert again.rounds() == 3


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rounds=st.lists(st.dictionaries(st.integers(0, 5), st.integers(0, 2**40), max_size=6), max_size=6))
def test_any_order_of_rounds_is_the_sum_in_unlimited_integers(
    rounds: list[dict[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with open_database(tmp_path_factory.mktemp("life") / "journal.db", allow_unsynced=True) as database:
        spends, expected = LifetimeSpends(database), Counter[int]()
        for number, nano in enumerate(rounds):
            with database.write() as connection:
                spends.add(f"{number:064}", cast(spends, nano), connection=connection)
            expected.update(nano)
        assert spends.spent(digests(*range(6))).spent.tolist() == [expected[number] for number in range(6)]


def test_a_round_that_is_undone_has_spent_nothing(database: Database) -> None:
    spends = LifetimeSpends(database)
    votes = cast(spends, {1: 5})

    with undone(database) as connection:
        spends.add("a" * 64, votes, connection=connection)
    assert spends.spent(digests(1)).spent.tolist() == [0]
    assert spends.rounds() == 0


def test_a_round_spends_once_and_no_other_key_spends(database: Database) -> None:
    spends = LifetimeSpends(database)
    first = cast(spends, {1: 5})
    with database.write() as connection:
        spends.add("a" * 64, first, connection=connection)
    for round_digest, votes, said in (
        ("a" * 64, first, "another round has spent"),
        ("b" * 64, cast(spends, {1: 5}, key="other"), OTHER_KEY),
    ):
        with pytest.raises(PrivacyRefusal, match=said), database.write() as connection:
            spends.add(round_digest, votes, connection=connection)
    with pytest.raises(PrivacyRefusal, match=NO_DIGESTS):
        spends.check(None)
    assert spends.spent(digests(1)).spent.tolist() == [5]


def test_the_database_itself_takes_nothing_back(database: Database, ledger: Ledger) -> None:
    spends = LifetimeSpends(database)
    ledger.open_account("agent:a", "instance", 100)
    set_aside(ledger, "agent:a", 60)
    with database.write() as connection:
        spends.add("a" * 64, cast(spends, {1: 5}), connection=connection)
    close_lifetimes(database, "lost")
    less = (update(life_spends).values(spent=4), update(life_aside).values(nano=1), update(life_rounds).values(seq=9))
    gone = [delete(table) for table in (life_spends, life_rounds, life_aside, life_closed)]
    for statement in (*less, *gone):
        with pytest.raises((DBAPIError, LabelerError)), database.write() as connection:
            connection.execute(statement)
    with pytest.raises(PrivacyRefusal, match=CLOSED):
        spends.check("site")


@pytest.mark.process
def test_what_is_set_aside_is_charged_once_or_not_at_all(database: Database, ledger: Ledger) -> None:
    ledger.open_account("agent:a", "instance", 100)
    for nano, expected in ((60, 60), (60, 60), (90, 90), (10, 90)):
        set_aside(ledger, "agent:a", nano)
        assert ledger.balance("agent:a", "instance").posted == expected
    with pytest.raises(BudgetExceeded):
        set_aside(ledger, "agent:a", 101)
    with pytest.raises(InvalidSetting, match="at least 1"):
        set_aside(ledger, "agent:a", 0)
    assert all_set_aside(database) == {"agent:a": 90}
    assert ledger.balance("agent:a", "instance").posted == 90
