"""One suite for both databases: the rules of `labeler.budget.Account`, kept for many accounts and across restarts."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from labeler.budget import NothingLeft
from labeler.errors import (
    BudgetExceeded,
    InvalidSetting,
    JournalBroken,
    NotFound,
    PrivacyRefusal,
    ProtocolViolation,
    TooLarge,
)
from labeler.ledger.database import Database
from labeler.ledger.ledger import MAX_AMOUNT, Balance, Charge, Ledger
from tests.labeler.ledger.conftest import Clock, Place, at_once, refuses, undone


def charge(amount: Any, account: str = "federation") -> Charge:
    return Charge(account, "instance", amount)


def left(ledger: Ledger, account: str = "federation") -> int | None:
    return ledger.balance(account, "instance").left


def test_a_charge_is_reserved_then_posted_and_each_step_twice_equals_once(ledger: Ledger) -> None:
    assert ledger.state("job") is None
    first = ledger.reserve("job", [charge(40)])
    assert ledger.reserve("job", [charge(40)]) == first
    assert (ledger.state("job"), left(ledger)) == ("reserved", 60)
    posted = ledger.post("job")
    assert ledger.post("job") == posted > first
    assert ledger.reserve("job", [charge(40)]) == first
    assert ledger.state("job") == "posted"
    assert ledger.balance("federation", "instance") == Balance("federation", "instance", 100, 0, 40)
    assert ledger.verify().seq == 3


def test_a_charge_comes_back_only_with_a_proof_that_nothing_left(ledger: Ledger) -> None:
    ledger.reserve("job", [charge(40)])
    for proof in (None, True, "never-asked", NothingLeft("other", "never-asked")):
        with pytest.raises(PrivacyRefusal, match="needs a NothingLeft about it"):
            ledger.void("job", proof)  # type: ignore[arg-type]  # the point of the test
    seq = ledger.void("job", NothingLeft("job", "below-quorum"))
    assert ledger.void("job", NothingLeft("job", "below-quorum")) == seq
    assert (ledger.state("job"), left(ledger)) == ("void", 100)
    assert ledger.entries()[-1].detail == {"because": "below-quorum"}
    with pytest.raises(PrivacyRefusal, match="voided and pays for nothing"):
        ledger.reserve("job", [charge(40)])
    with pytest.raises(PrivacyRefusal, match="voided with a proof"):
        ledger.post("job")
    ledger.verify()


def test_what_was_posted_stays_charged_for_ever(ledger: Ledger) -> None:
    ledger.reserve("job", [charge(40)])
    ledger.post("job")
    with pytest.raises(PrivacyRefusal, match="for ever"):
        ledger.void("job", NothingLeft("job", "refused"))
    assert left(ledger) == 60


def test_a_step_on_an_unknown_reservation_breaks_the_protocol(ledger: Ledger) -> None:
    with pytest.raises(ProtocolViolation, match="reserve it first"):
        ledger.post("job")
    with pytest.raises(ProtocolViolation, match="reserve it first"):
        ledger.void("job", NothingLeft("job", "never-asked"))


def test_an_id_is_for_one_set_of_charges_in_any_order(ledger: Ledger) -> None:
    ledger.open_account("agent-1", "instance", 100)
    both = [charge(5), charge(7, "agent-1")]
    first = ledger.reserve("job", both)
    assert ledger.reserve("job", both[::-1]) == first
    for others in ([charge(6)], [charge(5)], [charge(5), charge(8, "agent-1")]):
        with pytest.raises(ProtocolViolation, match="a different request needs a different id"):
            ledger.reserve("job", others)
    assert (left(ledger), left(ledger, "agent-1")) == (95, 93)


def test_all_accounts_are_charged_or_none(ledger: Ledger) -> None:
    ledger.open_account("agent-1", "instance", 10)
    head = ledger.head()
    with pytest.raises(BudgetExceeded) as refusal:
        ledger.reserve("job", [charge(5), charge(11, "agent-1")])
    assert refusal.value.account == "agent-1"
    with pytest.raises(NotFound, match="open it first"):
        ledger.reserve("job", [charge(5), charge(5, "agent-2")])
    assert (ledger.state("job"), left(ledger), ledger.head()) == (None, 100, head)
    ledger.reserve("job", [charge(5), charge(10, "agent-1")])
    assert [entry.account for entry in ledger.entries()[-2:]] == ["federation", "agent-1"]
    ledger.post("job")
    assert (left(ledger), left(ledger, "agent-1")) == (95, 0)
    ledger.verify()


def test_a_refusal_names_account_level_left_asked_and_the_last_spenders(ledger: Ledger) -> None:
    for name in ("monday", "tuesday", "wednesday", "thursday"):
        ledger.reserve(name, [charge(20)])
    ledger.void("tuesday", NothingLeft("tuesday", "never-asked"))
    ledger.open_account("other", "instance", 100)
    ledger.open_account("federation", "agent", 100)
    ledger.reserve("elsewhere", [charge(4, "other"), Charge("federation", "agent", 3)])
    with pytest.raises(BudgetExceeded) as refusal:
        ledger.reserve("friday", [charge(41)])
    found = refusal.value
    assert (found.account, found.level, found.asked, found.left, found.cap) == ("federation", "instance", 41, 40, 100)
    assert found.last_spenders == (("monday", 20), ("wednesday", 20), ("thursday", 20))
    for part in ("'federation'", "instance level", "41 nano-units", "40 of 100", "thursday (20)", "raise its budget"):
        assert part in str(found)
    ledger.reserve("friday", [charge(40)])
    assert left(ledger) == 0


@pytest.mark.parametrize(
    "bad",
    [0, -1, 1.0, math.nan, math.inf, -math.inf, True, None, "5", Fraction(1), np.int64(5), MAX_AMOUNT + 1],
)
def test_nothing_but_a_positive_int_that_fits_is_an_amount(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="positive whole number"):
        charge(bad)


@pytest.mark.parametrize("bad", [-1, 1.0, math.nan, True, "5", MAX_AMOUNT + 1])
def test_nothing_but_an_int_that_fits_is_a_cap(sqlite_place: Place, clock: Clock, bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="a cap is"):
        Ledger(sqlite_place.open(), clock=clock).open_account("a", "instance", bad)


@pytest.mark.parametrize("bad", ["", None, 7, "x" * 257, "a\nb", "a\0b", "\ud800"])
def test_names_are_short_printable_texts(sqlite_place: Place, clock: Clock, bad: Any) -> None:
    ledger = Ledger(sqlite_place.open(), clock=clock)
    with pytest.raises(InvalidSetting):
        charge(1, bad)
    for step in (
        lambda: ledger.reserve(bad, [charge(1)]),
        lambda: ledger.post(bad),
        lambda: ledger.state(bad),
        lambda: ledger.open_account(bad, "instance", 1),
    ):
        with pytest.raises(InvalidSetting):
            step()


def test_charges_are_a_list_of_distinct_accounts(ledger: Ledger) -> None:
    too_many = [charge(1, f"agent-{number}") for number in range(10_001)]
    for bad in ([], charge(1), [charge(1), charge(2)], [("federation", "instance", 1)], too_many):
        with pytest.raises(InvalidSetting):
            ledger.reserve("job", bad)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(InvalidSetting, match="level"):
        Charge("federation", "person", 1)  # type: ignore[arg-type]  # the point of the test


def test_the_detail_is_kept_and_of_a_bounded_size(ledger: Ledger) -> None:
    with pytest.raises(TooLarge, match="detail"):
        ledger.reserve("job", [charge(1)], detail={"x": "y" * 20_000})
    detail = {"task": "a" * 64, "queries": [1, 2], "note": "ünï\u0000code"}
    ledger.reserve("job", [charge(1)], detail=detail)
    assert ledger.entries()[-1].detail == detail


def test_the_largest_amounts_neither_overflow_nor_pass_an_unlimited_account(ledger: Ledger) -> None:
    ledger.open_account("recorded", "instance", None)
    ledger.open_account("rich", "instance", MAX_AMOUNT)
    ledger.reserve("large", [charge(MAX_AMOUNT, "recorded"), charge(MAX_AMOUNT, "rich")])
    for account in ("recorded", "rich"):
        with pytest.raises(BudgetExceeded, match="0 of 9223372036854775807 are left"):
            ledger.reserve("one more", [charge(1, account)])
    assert left(ledger, "recorded") is None
    ledger.post("large")
    assert ledger.balance("rich", "instance").posted == MAX_AMOUNT
    ledger.verify()


def test_an_account_opens_once_and_its_cap_never_falls_below_what_is_spent(ledger: Ledger) -> None:
    ledger.open_account("federation", "instance", 100)
    assert ledger.head().seq == 1
    ledger.reserve("job", [charge(60)])
    with pytest.raises(BudgetExceeded, match="stays spent") as refusal:
        ledger.open_account("federation", "instance", 59)
    found = refusal.value
    assert (found.asked, found.left, found.cap, found.last_spenders) == (60, 0, 59, (("job", 60),))
    for cap in (60, None, 200):
        ledger.open_account("federation", "instance", cap)
    assert [(entry.kind, entry.amount, entry.detail) for entry in ledger.entries(after=2)] == [
        ("cap", 60, {"cap": 60}),
        ("cap", 0, {"cap": None}),
        ("cap", 200, {"cap": 200}),
    ]
    ledger.open_account("federation", "agent", 7)
    assert [(found.level, found.left) for found in ledger.balances()] == [("agent", 7), ("instance", 140)]
    ledger.verify()


def test_a_write_off_spends_all_that_is_left_for_ever(ledger: Ledger) -> None:
    ledger.reserve("job", [charge(60)])
    assert ledger.write_off("federation", "instance", "restored from Monday's copy") == 40
    assert ledger.write_off("federation", "instance", "again") == 0
    assert ledger.balance("federation", "instance") == Balance("federation", "instance", 100, 60, 40)
    assert [(entry.kind, entry.detail) for entry in ledger.entries()[-2:]] == [
        (kind, {"written_off": "restored from Monday's copy"}) for kind in ("reserve", "post")
    ]
    ledger.open_account("recorded", "instance", None)
    with pytest.raises(InvalidSetting, match="not limited"):
        ledger.write_off("recorded", "instance", "why not")
    with pytest.raises(NotFound):
        ledger.write_off("nobody", "instance", "why not")


def test_a_clock_that_is_set_back_does_not_change_the_order(ledger: Ledger, clock: Clock) -> None:
    ledger.reserve("first", [charge(1)])
    before = clock.now
    clock.turn(days=-2)
    ledger.reserve("second", [charge(1)])
    clock.turn(days=2, seconds=1)
    ledger.reserve("third", [charge(1)])
    assert [entry.at for entry in ledger.entries(after=1)] == [before, before, before + timedelta(seconds=1)]
    ledger.verify()


def test_a_clock_without_a_time_zone_is_refused_and_another_zone_is_written_as_utc(place: Place) -> None:
    database = place.open()
    naive = Ledger(database, clock=lambda: datetime(2026, 3, 1))  # noqa: DTZ001  # what is refused
    with pytest.raises(InvalidSetting, match="time zone"):
        naive.open_account("a", "instance", 1)
    east = datetime.fromisoformat("2026-03-01T01:00:00+02:00")
    Ledger(database, clock=lambda: east).open_account("a", "instance", 1)
    assert naive.entries()[0].at == datetime(2026, 2, 28, 23, tzinfo=UTC)


def test_entries_come_in_pages_and_can_be_searched(ledger: Ledger) -> None:
    ledger.open_account("agent-1", "instance", 100)
    for number in range(5):
        ledger.reserve(f"job-{number}", [charge(1), charge(2, "agent-1")], detail={"requester": f"50%_{number}"})
    page = ledger.entries(limit=7)
    assert [entry.seq for entry in page] == [1, 2, 3, 4, 5, 6, 7]
    assert [entry.seq for entry in ledger.entries(after=7)] == [8, 9, 10, 11, 12]
    assert [entry.seq for entry in ledger.entries(account="agent-1", after=2, limit=2)] == [4, 6]
    assert {entry.reservation_id for entry in ledger.entries(search="JOB-3")} == {"job-3"}
    assert {entry.reservation_id for entry in ledger.entries(search="50%_4")} == {"job-4"}
    assert ledger.entries(search="%") == ledger.entries(search="50%")
    for bad in ({"limit": 0}, {"limit": 1001}, {"limit": True}, {"after": -1}, {"search": "a\0"}):
        with pytest.raises(InvalidSetting):
            ledger.entries(**bad)  # type: ignore[arg-type]  # the point of the test


def test_the_ledger_is_the_same_after_it_was_opened_again(place: Place, clock: Clock) -> None:
    ledger = Ledger(place.open(), clock=clock)
    ledger.open_account("federation", "instance", 100)
    ledger.reserve("job", [charge(40)])
    before = (ledger.head(), ledger.balances(), ledger.entries())
    place.close()
    again = Ledger(place.open(), clock=clock)
    assert (again.head(), again.balances(), again.entries()) == before
    assert again.verify() == before[0]
    assert again.reserve("job", [charge(40)]) == 2


def test_a_reader_beside_the_owner_sees_the_ledger_and_cannot_write(place: Place, clock: Clock) -> None:
    ledger = Ledger(place.open(), clock=clock)
    ledger.open_account("federation", "instance", 100)
    reader = Ledger(place.open(read_only=True), clock=clock)
    ledger.reserve("job", [charge(40)])
    assert left(reader) == 60
    assert reader.verify() == ledger.head()
    with pytest.raises(InvalidSetting, match="reading only"):
        reader.post("job")


def test_the_database_itself_refuses_overspending(ledger: Ledger, database: Database) -> None:
    ledger.reserve("job", [charge(60)])
    changes = ("spent = 101", "spent = -1", "cap = 59", "posted = 61", "posted = -1")
    refuses(database, *(f"UPDATE ledger_accounts SET {change}" for change in changes))
    assert left(ledger) == 40


def test_the_database_itself_refuses_to_change_or_drop_an_entry(ledger: Ledger, database: Database) -> None:
    ledger.reserve("job", [charge(60)])
    columns = "at, kind, account, level, reservation_id, amount, detail, previous_hash, hash"
    replaced = f"REPLACE INTO ledger_entries SELECT 2, {columns} FROM ledger_entries WHERE seq = 1"
    refuses(
        database,
        "UPDATE ledger_entries SET amount = 1",
        "DELETE FROM ledger_entries",
        "DELETE FROM ledger_entries WHERE seq = 2",
        f"INSERT INTO ledger_entries SELECT 9, {columns} FROM ledger_entries WHERE seq = 2",
        replaced if database.dialect == "sqlite" else "TRUNCATE ledger_entries CASCADE",
    )
    assert ledger.verify().seq == 2


@pytest.mark.parametrize(
    "step",
    [
        lambda of, held: of.open_account("new", "instance", 5, connection=held),
        lambda of, held: of.open_account("federation", "instance", 500, connection=held),
        lambda of, held: of.reserve("new", [charge(10)], connection=held),
        lambda of, held: of.post("reserved", connection=held),
        lambda of, held: of.void("reserved", NothingLeft("reserved", "refused"), connection=held),
    ],
)
def test_every_step_is_undone_with_the_transaction_that_it_is_a_part_of(
    ledger: Ledger, database: Database, step: Callable[[Ledger, object], object]
) -> None:
    ledger.reserve("reserved", [charge(10)])
    before = (ledger.head(), ledger.balances(), ledger.entries())
    with undone(database) as connection:
        step(ledger, connection)
        assert ledger.head(connection=connection).seq == before[0].seq + 1
    assert (ledger.head(), ledger.balances(), ledger.entries()) == before


def test_several_steps_of_one_transaction_see_each_other(ledger: Ledger, database: Database) -> None:
    with database.write() as connection:
        ledger.reserve("job", [charge(5)], connection=connection)
        ledger.post("job", connection=connection)
        with pytest.raises(BudgetExceeded):
            ledger.reserve("other", [charge(96)], connection=connection)
        assert ledger.balance("federation", "instance", connection=connection).posted == 5
    assert (ledger.state("job"), ledger.state("other"), left(ledger)) == ("posted", None, 95)
    ledger.verify()


def test_an_entry_that_cannot_be_read_is_told_without_its_content(sqlite_place: Place, clock: Clock) -> None:
    database = sqlite_place.open()
    ledger = Ledger(database, clock=clock)
    ledger.open_account("federation", "instance", 100)
    with database.write() as connection:
        connection.execute(text("DROP TRIGGER ledger_entries_stay"))
        connection.execute(text("UPDATE ledger_entries SET detail = 'secret'"))
    with pytest.raises(JournalBroken) as broken:
        ledger.entries()
    assert str(broken.value) == "an entry cannot be read; verify the journal to learn which"


def test_of_two_hundred_threads_that_want_the_last_unit_one_gets_it(ledger: Ledger) -> None:
    ledger.reserve("all but one", [charge(99)])
    won = at_once(200, lambda number: ledger.reserve(f"rival-{number}", [charge(1)]), BudgetExceeded)
    assert won.count(None) == 199
    assert (left(ledger), ledger.verify().seq) == (0, 3)


def test_two_hundred_threads_that_ask_for_the_same_reservation_make_one(ledger: Ledger) -> None:
    assert set(at_once(200, lambda _: ledger.reserve("job", [charge(60)]))) == {2}
    assert ledger.verify().seq == 2
