"""Numbers of messages go up for life, and what was taken is not taken twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from labeler.errors import ProtocolViolation, Replayed
from labeler.ledger.database import Database, open_database
from labeler.ledger.sequences import BLOCK, Sequences
from tests.labeler.ledger.conftest import Place, at_once, refuses, undone

KEY = "a" * 64
START = datetime(1970, 1, 1, tzinfo=UTC)


def long_ago() -> datetime:
    """A clock by which no time has passed, so that the counter alone decides."""
    return START


@pytest.fixture
def sequences(database: Database) -> Sequences:
    return Sequences(database, clock=long_ago)


@pytest.mark.process
def test_numbers_begin_at_one_and_go_up_for_each_recipient(sequences: Sequences) -> None:
    assert [sequences.next("a") for _ in range(3)] == [1, 2, 3]
    assert sequences.next("b") == 1


def test_numbers_cross_blocks_without_a_gap_or_a_repeat(sequences: Sequences) -> None:
    assert [sequences.next("a") for _ in range(2 * BLOCK + 5)] == list(range(1, 2 * BLOCK + 6))


def test_after_a_restart_numbers_continue_above_the_block(place: Place) -> None:
    Sequences(place.open(), clock=long_ago).next("a")
    place.close()
    database = place.open()
    assert Sequences(database, clock=long_ago).next("a") == BLOCK + 1
    assert Sequences(database, clock=long_ago).next("a") == 2 * BLOCK + 1


def test_numbers_of_a_journal_that_forgot_what_it_sent_are_above_those_all_the_same(
    place: Place, tmp_path: Path
) -> None:
    backup = Sequences(place.open(), clock=long_ago)
    sent = [backup.next("a") for _ in range(5 * BLOCK)]
    with open_database(tmp_path / "forgetful.db") as forgetful:
        later = Sequences(forgetful, clock=lambda: START + timedelta(seconds=6))
        assert later.next("a") > sent[-1]


def test_a_clock_set_back_does_not_make_numbers_go_down(database: Database) -> None:
    first = Sequences(database, clock=lambda: START + timedelta(days=1)).next("a")
    assert Sequences(database, clock=long_ago).next("a") > first


def test_most_numbers_cost_no_write(place: Place) -> None:
    database = place.open()
    sequences = Sequences(database)
    sequences.next("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Database, "write")
        for _ in range(BLOCK - 1):
            sequences.next("a")
        with pytest.raises(AttributeError, match="write"):
            sequences.next("a")


@pytest.mark.process
def test_threads_never_share_a_number_and_each_sees_its_own_go_up(sequences: Sequences) -> None:
    taken = at_once(6, lambda _: [sequences.next("a") for _ in range(700)])
    assert all(numbers == sorted(numbers) for numbers in taken)
    assert len({number for numbers in taken for number in numbers}) == 6 * 700


def test_a_message_is_taken_once_and_older_ones_not_after_it(sequences: Sequences) -> None:
    sequences.taken("agent", 5, verify_key=KEY)
    for number in (5, 4, 1):
        with pytest.raises(Replayed, match="has arrived"):
            sequences.taken("agent", number, verify_key=KEY)
    sequences.taken("agent", 6, verify_key=KEY)
    sequences.taken("other", 1, verify_key=KEY)
    sequences.taken("agent", 2**62, verify_key=KEY)


def test_numbers_signed_with_another_key_use_up_nobody_elses(sequences: Sequences) -> None:
    sequences.taken("agent", 2**62, verify_key="b" * 64)
    sequences.taken("agent", 1, verify_key=KEY)
    with pytest.raises(Replayed):
        sequences.taken("agent", 2**62, verify_key="b" * 64)


@pytest.mark.parametrize("number", [0, -1, 2**62 + 1, True, 1.5])
def test_what_is_no_number_is_refused(sequences: Sequences, number: int) -> None:
    with pytest.raises(ProtocolViolation):
        sequences.taken("agent", number, verify_key=KEY)


def test_taking_is_undone_with_the_effect_it_stands_for(sequences: Sequences, database: Database) -> None:
    with undone(database) as connection:
        sequences.taken("agent", 5, verify_key=KEY, connection=connection)
        with pytest.raises(Replayed):
            sequences.taken("agent", 5, verify_key=KEY, connection=connection)
    sequences.taken("agent", 5, verify_key=KEY)


@pytest.mark.process
def test_one_message_taken_by_many_threads_has_one_effect(sequences: Sequences) -> None:
    def take(number: int) -> int:
        sequences.taken("agent", 7, verify_key=KEY)
        return number

    assert at_once(16, take, Replayed).count(None) == 15


@pytest.mark.process
def test_the_database_itself_lets_numbers_only_go_up(sequences: Sequences, database: Database) -> None:
    sequences.next("a")
    sequences.taken("a", 7, verify_key=KEY)
    refuses(
        database,
        "UPDATE sequences_sent SET reserved = 1",
        "UPDATE sequences_taken SET last = 1",
        "DELETE FROM sequences_sent",
        "DELETE FROM sequences_taken",
    )
