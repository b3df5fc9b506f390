"""A head is sent in clear. An observer may know all of an entry but a number, and must not find that by trying."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import select

from labeler.budget import NothingLeft, budget_for
from labeler.ledger.chain import Head, canonical, entry_hash
from labeler.ledger.database import Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.lifetimes import set_aside
from labeler.ledger.schema import ledger_entries
from tests.labeler.ledger.conftest import Clock, Place

ACCOUNT = "agent:hospital-1"
EPSILONS = [tenths / 10 for tenths in range(1, 300)]
"""Caps that a site would write into its policy."""


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    with place.open() as database:
        yield database


def rows(database: Database) -> list[dict[str, Any]]:
    with database.read() as connection:
        return [dict(row) for row in connection.execute(select(ledger_entries).order_by("seq")).mappings()]


def test_the_cap_of_a_site_is_not_found_by_trying_caps(database: Database) -> None:
    clock = Clock()
    ledger = Ledger(database, clock=clock)
    ledger.open_account(ACCOUNT, "instance", budget_for(3.7, 1e-5))
    head = ledger.head()
    at = rows(database)[0]["at"]  # a coordinator that saw the first poll knows it to a second, and tries the rest

    def head_if(cap: int) -> Head:
        row = {
            "seq": 1, "at": at, "kind": "open", "account": ACCOUNT, "level": "instance", "reservation_id": "",
            "amount": cap, "detail": canonical({"cap": cap}), "previous_hash": "0" * 64,
        }  # fmt: skip
        return Head(1, entry_hash(row))

    found = [epsilon for epsilon in EPSILONS if head_if(budget_for(epsilon, 1e-5)) == head]
    assert found == [], f"the head of the journal tells that the cap is epsilon {found}"


def test_no_kind_of_entry_can_be_computed_from_what_it_says(database: Database) -> None:
    """Of each entry the attacker knows every field, the hash before it and all that people are shown of it."""
    ledger = Ledger(database, clock=Clock())
    ledger.open_account(ACCOUNT, "instance", 10**9)
    ledger.open_account(ACCOUNT, "instance", 2 * 10**9)
    ledger.reserve("job", [Charge(ACCOUNT, "instance", 5)])
    ledger.post("job")
    ledger.reserve("other", [Charge(ACCOUNT, "instance", 5)])
    ledger.void("other", NothingLeft("other", "never-asked"))
    set_aside(ledger, ACCOUNT, 10**6)
    ledger.write_off(ACCOUNT, "instance", "an older copy was restored")
    found = []
    for row, entry in zip(rows(database), ledger.entries(), strict=True):
        known = row | {"detail": canonical(dict(entry.detail))}
        if entry_hash({name: known[name] for name in row if name != "hash"}) == row["hash"]:
            found.append(f"{entry.seq} {entry.kind}")
    assert found == []
    ledger.verify()
    assert [entry.kind for entry in ledger.entries(search="cap")] == ["open", "cap"]
    assert not any(ledger.entries(search=text) for text in ("salt", json.loads(rows(database)[0]["detail"])["salt"]))


def test_two_ledgers_of_one_history_have_no_hash_and_no_salt_in_common(tmp_path: Any) -> None:
    seen: list[set[str]] = []
    for name in ("one", "two"):
        with Place("sqlite", str(tmp_path / name), tmp_path / f"{name}.head").open() as database:
            ledger = Ledger(database, clock=Clock())
            ledger.open_account(ACCOUNT, "instance", 10**9)
            ledger.reserve("job", [Charge(ACCOUNT, "instance", 5)])
            ledger.post("job")
            stored = rows(database)
            salts = [json.loads(row["detail"])["salt"] for row in stored]
            assert len(set(salts)) == len(salts)
            assert {len(bytes.fromhex(salt)) for salt in salts} == {16}
            seen.append({row["hash"] for row in stored} | set(salts))
    assert seen[0].isdisjoint(seen[1])
