"""What the chain alone says of every charge, as of one head: whose, how much, for which job, and what became of it.

The entries are the one part of a journal that nobody can change unseen, so evidence begins with them; other tables
are then held against it (`labeler.evidence.derive`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, select

from feature_store.journal.chain import EMPTY, Head, time_text
from feature_store.journal.ledger_tables import ledger_entries
from feature_store.journal.unpriced import WRITTEN_OFF
from feature_store.journal.verification import hash_at, verify_if_there
from labeler.errors import JournalBehind, JournalBroken
from labeler.evidence.derive import contradictions
from labeler.evidence.document import AccountFacts, Charge, Facts, Journal
from labeler.setting import LEVELS
from labeler.task import Level


@dataclass
class Charged:
    """One reservation as the chain has it.

    Attributes:
        charges: by account and level.
        reserved: detail of its first entry.
        settled_seq, settled_at, settled: entry, time and detail of its settlement.
    """

    charges: tuple[Charge, ...]
    reserved: Mapping[str, Any]
    state: Literal["reserved", "posted", "void"] = "reserved"
    settled_seq: int | None = None
    settled_at: str = ""
    settled: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """A verified chain, read up to one entry.

    Attributes:
        journal: how far it was read.
        reservations: by their ids, in order.
        accounts: what they add up to.
    """

    journal: Journal
    reservations: Mapping[str, Charged]
    accounts: tuple[AccountFacts, ...]


_Key = tuple[str, Level]


@dataclass
class _Sums:
    cap: int | None = None
    reserved: int = 0
    posted: int = 0


def read_chain(connection: Connection, *, read_at: datetime, head: Head | None = None) -> Chain:
    """Verify a ledger from its first entry to its last, and read it up to a head.

    Args:
        connection: one moment of the journal.
        read_at: the time now.
        head: up to where; None for all there is.

    Raises:
        JournalBroken: the chain does not hold, or a balance is not what the entries add up to.
        JournalBehind: the journal ends before `head`, or has another entry there.
    """
    end = verify_if_there(connection)
    until = end if head is None else head
    if until.seq > end.seq or hash_at(connection, until.seq) != until.hash:
        raise JournalBehind(
            f"this journal does not hold entry {until.seq} as the evidence names it: it ends with entry {end.seq}, is "
            "an older copy, or is another party's. Compare with the journal that the evidence was made from"
        )
    reservations: dict[str, Charged] = {}
    accounts: dict[_Key, _Sums] = {}
    last_at = ""
    if end != EMPTY:
        query = select(ledger_entries).where(ledger_entries.c.seq <= until.seq).order_by(ledger_entries.c.seq)
        for row in connection.execute(query).mappings():
            _take(dict(row), reservations, accounts)
            last_at = row["at"]
    journal = Journal(
        entries=until.seq, head=until.hash, read_at=max(time_text(read_at), last_at), last_entry_at=last_at
    )
    unpriced = _unpriced(reservations)
    found = tuple(
        AccountFacts(
            account=name,
            level=level,
            cap_nano=sums.cap,
            reserved_nano=sums.reserved,
            posted_nano=sums.posted,
            is_unpriced=(name, level) in unpriced,
        )
        for (name, level), sums in sorted(accounts.items())
    )
    return Chain(journal, reservations, found)


def _unpriced(reservations: Mapping[str, Charged]) -> set[_Key]:
    """Accounts that paid for something which names another level and not this one: see feature_store.journal.unpriced.

    Nothing bounds what was told there, whatever the entries of this level add up to.
    """
    named: dict[tuple[str, str], set[Level]] = {}
    for name, charged in reservations.items():
        if charged.state != "void":
            what = WRITTEN_OFF if name.startswith(WRITTEN_OFF) else name
            for charge in charged.charges:
                named.setdefault((charge.account, what), set()).add(charge.level)
    return {(account, level) for (account, _), levels in named.items() for level in LEVELS if level not in levels}


def _take(row: Mapping[str, Any], reservations: dict[str, Charged], accounts: dict[_Key, _Sums]) -> None:
    detail = _detail(row)
    sums = accounts.setdefault((row["account"], row["level"]), _Sums())
    if row["kind"] in ("open", "cap"):
        sums.cap = detail["cap"]
        return
    name = row["reservation_id"]
    if row["kind"] == "reserve":
        charge = Charge(account=row["account"], level=row["level"], nano=row["amount"])
        known = reservations.setdefault(name, Charged((), detail))
        known.charges = (*known.charges, charge)
        sums.reserved += row["amount"]
        return
    if row["kind"] == "answer":
        return
    known = reservations[name]
    is_posted = row["kind"] == "post"
    if known.state == "reserved":
        known.state, known.settled = ("posted" if is_posted else "void"), detail
        known.settled_seq, known.settled_at = row["seq"], row["at"]
    sums.reserved -= row["amount"]
    sums.posted += row["amount"] * is_posted


def _detail(row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(row["detail"])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise JournalBroken(f"entry {row['seq']} has no readable detail. Restore the newest backup")
    return found


def without_contradiction(facts: Facts) -> Facts:
    """The same facts, where nothing in them contradicts the chain or another of them.

    Raises:
        JournalBroken: something does.
    """
    wrong = contradictions(facts)
    if wrong:
        raise JournalBroken(
            f"the journal contradicts itself in {len(wrong)} places, the first: {wrong[0]}. No evidence is made of it; "
            "restore the newest backup, and find out who wrote to the journal"
        )
    return facts
