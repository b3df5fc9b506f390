"""Chains whose hashes all hold, and whose steps the rules do not allow: who can edit can compute the hashes again."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import insert

from labeler.errors import JournalBroken
from labeler.ledger import verification
from labeler.ledger.chain import EMPTY, GENESIS, Head, entry_hash
from labeler.ledger.database import Database
from labeler.ledger.schema import ledger_accounts, ledger_entries, ledger_reservations
from labeler.ledger.verification import verify_ledger
from tests.labeler.ledger.conftest import Place

DO = "Keep the file as evidence, restore the newest backup"

Step = tuple[Any, ...]


def opened(account: str = "a", cap: int | None = 100, *, kind: str = "open", amount: int | None = None) -> Step:
    return kind, account, "", (cap or 0) if amount is None else amount, json.dumps({"cap": cap}, separators=(",", ":"))


def step(kind: str, reservation: str = "r", amount: int = 10, account: str = "a") -> Step:
    return kind, account, reservation, amount, "{}"


def chain(steps: list[Step], **changes: Any) -> list[dict[str, Any]]:
    """Entries with hashes that hold; `changes` are made to the last one before its hash is computed."""
    rows: list[dict[str, Any]] = []
    for number, (kind, account, reservation, amount, detail) in enumerate(steps, start=1):
        row = {
            "seq": number, "at": f"2026-03-01T12:00:{number:02d}.000000Z", "kind": kind, "account": account,
            "level": "instance", "reservation_id": reservation, "amount": amount, "detail": detail,
            "previous_hash": rows[-1]["hash"] if rows else GENESIS,
        }  # fmt: skip
        if number == len(steps):
            row |= changes
        rows.append(row | {"hash": entry_hash(row)})
    return rows


def verified(place: Place, rows: list[dict[str, Any]], *derived: tuple[Any, dict[str, Any]]) -> Head:
    """Return what verification says of these entries, and of rows of the tables that are sums over them."""
    with closing(place.open()) as database:
        fill(database, rows, derived)
        with database.read() as connection:
            return verify_ledger(connection)


def fill(database: Database, rows: list[dict[str, Any]], derived: tuple[tuple[Any, dict[str, Any]], ...]) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        connection.exec_driver_sql("DROP TRIGGER ledger_entries_follow")
        for row in rows:
            connection.execute(insert(ledger_entries), row)
        for table, row in derived:
            connection.execute(insert(table), row)


def account(spent: int, posted: int, cap: int | None = 100, name: str = "a") -> tuple[Any, dict[str, Any]]:
    return ledger_accounts, {"account": name, "level": "instance", "cap": cap, "spent": spent, "posted": posted}


def reservation(name: str, state: str, first: int, charges: int, settled: int | None) -> tuple[Any, dict[str, Any]]:
    return ledger_reservations, {
        "reservation_id": name, "state": state, "first_seq": first, "charges": charges, "settled_seq": settled
    }  # fmt: skip


OPEN, BOTH = [opened()], [opened(), opened("b")]
TWO = [*BOTH, step("reserve"), step("reserve", account="b")]


@pytest.mark.parametrize(
    ("steps", "seq"),
    [
        ([*OPEN, opened()], 2),
        ([*OPEN, step("reserve"), opened(cap=9, kind="cap")], 3),
        ([opened(kind="cap")], 1),
        ([*OPEN, step("reserve", account="b")], 2),
        ([*OPEN, step("reserve"), step("post", account="b")], 3),
        ([*OPEN, step("reserve", amount=101)], 2),
        ([*OPEN, step("reserve"), step("reserve")], 3),
        ([*BOTH, step("reserve"), step("reserve", "s"), step("reserve", account="b")], 5),
        ([*TWO, step("post"), step("post", account="b"), step("reserve", account="c")], 7),
        ([*OPEN, step("post")], 2),
        ([*OPEN, step("reserve"), step("post", amount=9)], 3),
        ([*BOTH, step("reserve"), step("post", account="b")], 4),
        ([*OPEN, step("reserve"), step("void"), step("void")], 4),
        ([*OPEN, step("reserve"), step("post"), step("void")], 4),
        ([opened(cap=100, amount=99)], 1),
        ([opened(cap=None, amount=1)], 1),
        ([("open", "a", "", 1, '{"cap":true}')], 1),
        ([("open", "a", "", 0, "{}")], 1),
        ([("open", "a", "", 0, "no JSON")], 1),
        ([("open", "a", "", 0, "[]")], 1),
        ([*OPEN, step("give back")], 2),
        ([*TWO, step("post"), step("reserve", "s")], 6),
        ([*TWO, step("post"), step("void", account="b")], 6),
        ([*TWO, step("void"), opened("c")], 6),
        ([*TWO, step("void")], 6),
        ([*TWO, step("post")], 6),
    ],
)
def test_a_step_that_the_rules_do_not_allow_is_named(sqlite_place: Place, steps: list[Step], seq: int) -> None:
    with pytest.raises(JournalBroken, match=rf"^entry {seq} .*{DO}"):
        verified(sqlite_place, chain(steps))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"at": "yesterday"}, "entry 2 has no readable time"),
        ({"at": "2026-03-01T12:00:00.999999Z"}, "entry 2 is earlier than the entry before it"),
        ({"previous_hash": "a" * 64}, "entry 2 does not follow from the entry before it"),
        ({"seq": 3}, "entry 2 is missing: entry 3 comes after 1"),
        ({"amount": 9}, "entry 2 was changed: its content does not have its hash"),
    ],
)
def test_an_entry_out_of_its_place_is_named(sqlite_place: Place, changes: dict[str, Any], said: str) -> None:
    rows = chain([*OPEN, step("reserve")], **changes)
    if "amount" in changes:
        rows[1]["hash"] = chain([*OPEN, step("reserve")])[1]["hash"]
    with pytest.raises(JournalBroken, match=f"^{said}.*{DO}"):
        verified(sqlite_place, rows)


def test_entries_at_the_same_time_and_all_steps_that_the_rules_allow_hold(sqlite_place: Place) -> None:
    rows = chain(
        [
            opened(cap=None), opened("b"), opened(cap=50, kind="cap"), step("reserve"), step("reserve", account="b"),
            step("reserve", "s", 40), step("post"), step("post", account="b"), step("void", "s", 40),
            step("reserve", "t", 40),
        ],
        at="2026-03-01T12:00:09.000000Z",
    )  # fmt: skip
    derived = (
        account(50, 10, 50), account(10, 10, 100, "b"),
        reservation("r", "posted", 4, 2, 7), reservation("s", "void", 6, 1, 9),
        reservation("t", "reserved", 10, 1, None),
    )  # fmt: skip
    assert verified(sqlite_place, rows, *derived) == Head(10, rows[-1]["hash"])


def test_no_entries_at_all_are_an_empty_ledger_whose_sums_are_nothing(sqlite_place: Place) -> None:
    assert verified(sqlite_place, []) == EMPTY


@pytest.mark.parametrize(
    ("entries", "derived", "said"),
    [
        ([], (account(0, 0),), "balance of account 'a'/'instance'"),
        (
            [*OPEN, step("reserve")],
            (account(11, 0), reservation("r", "reserved", 2, 1, None)),
            "balance of account 'a'",
        ),
        ([*OPEN, step("reserve")], (account(10, 0), reservation("r", "posted", 2, 1, 3)), "state of reservation 'r'"),
    ],
)
def test_a_sum_that_the_entries_do_not_add_up_to_is_named(
    sqlite_place: Place, entries: list[Step], derived: tuple[tuple[Any, dict[str, Any]], ...], said: str
) -> None:
    with pytest.raises(JournalBroken, match=f"{said}.* is stored as .*{DO}"):
        verified(sqlite_place, chain(entries), *derived)


def test_more_entries_than_are_read_at_once_are_all_read(sqlite_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = chain([opened(cap=None), *(step("reserve", f"r-{number}", 1) for number in range(58))])
    monkeypatch.setattr(verification, "_BATCH", 20)
    derived = [reservation(f"r-{number}", "reserved", number + 2, 1, None) for number in range(58)]
    assert verified(sqlite_place, rows, account(58, 0, None), *derived).seq == 59
