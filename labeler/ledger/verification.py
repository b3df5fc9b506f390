"""Verification of a ledger from its first entry, trusting nothing but the entries.

Each entry must be the next one, hold the hash of the one before, hash to its own, and be a step that the rules allow
after the steps before it. The sums of the entries must match the other tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sqlalchemy import ColumnElement, Connection, Table, bindparam, func, literal_column, select

from labeler.errors import JournalBroken
from labeler.ledger.chain import EMPTY, Head, entry_hash, time_of
from labeler.ledger.schema import ledger_accounts, ledger_entries, ledger_reservations, ledger_sums

RECENT = 20_000
"""Entries that a start reads again at least, if there are as many."""

_BATCH = 1000
_LOWEST = -(2**63)
"""Reading starts below every possible number, so that an entry with an invalid one is found, not skipped."""

Row = Mapping[str, Any]


@dataclass
class _Account:
    cap: int | None
    spent: int = 0
    posted: int = 0


@dataclass
class _Reservation:
    first_seq: int
    charges: dict[tuple[str, str], int]
    state: str = "reserved"
    settled_seq: int | None = None
    settled: set[tuple[str, str]] = field(default_factory=set)
    is_answered: bool = False


def verify_ledger(connection: Connection) -> Head:
    """Read all entries and compare their sums with the tables.

    Args:
        connection: one moment of the journal (`Database.read`).

    Returns:
        The head that was reached.

    Raises:
        JournalBroken: names the first entry that does not hold, or the balance that is not the sum of its entries.
    """
    replay = _Replay()
    replay.take_all(_rows(connection, _LOWEST))
    _compare(connection, ledger_accounts, "balance of account", replay.account_rows())
    _compare(connection, ledger_reservations, "state of reservation", replay.reservation_rows())
    return replay.head


def verify_recent(connection: Connection) -> Head:
    """Read the last entries, beginning with sums that were kept, and compare them with the tables.

    The balance of every account and every reservation that these entries name must hold. Entries before them are
    trusted: this process or an earlier one wrote each under the same rules. `verify_ledger` reads those too.

    Raises:
        JournalBroken: see `verify_ledger`.
    """
    kept, seq = ledger_sums.c, ledger_entries.c.seq
    end = connection.execute(select(func.coalesce(func.max(seq), 0))).scalar_one()
    since = connection.execute(select(func.max(kept.seq)).where(kept.seq <= end - RECENT)).scalar()
    if since is None:
        return verify_ledger(connection)
    last = dict(connection.execute(select(ledger_entries).where(seq == since)).mappings().one())
    if last["hash"] != entry_hash(last):
        _broken(last, "was changed: its content does not have its hash")
    replay = _Replay(Head(since, last["hash"]), last["at"], connection)
    replay.take_all(_rows(connection, since + 1))
    _compare(connection, ledger_accounts, "balance of account", replay.account_rows())
    # Those that are open now are few, and an index has them.
    is_open = (ledger_reservations.c.state == literal_column("'reserved'"), ledger_reservations.c.first_seq > since)
    opened = connection.execute(select(ledger_reservations.c.reservation_id).where(*is_open)).scalars()
    derived = replay.reservation_rows()
    names = sorted({name for (name,) in derived}.union(opened))
    for start in range(0, len(names), _BATCH):
        some = names[start : start + _BATCH]
        within = ledger_reservations.c.reservation_id.in_(some)
        rows = {(name,): derived[name,] for name in some if (name,) in derived}
        _compare(connection, ledger_reservations, "state of reservation", rows, within)
    return replay.head


class _Replay:
    """The state after the entries read so far.

    Args:
        since: the entry after which it begins, at which sums were kept.
        at: the time of that entry.
        before: reads what was true then; None at the first entry.
    """

    def __init__(self, since: Head = EMPTY, at: str = "", before: Connection | None = None) -> None:
        self.head = self._since = since
        self._at = at
        self._before = before
        self._accounts: dict[tuple[str, str], _Account] = {}
        if before is not None:
            for row in before.execute(select(ledger_sums).where(ledger_sums.c.seq == since.seq)):
                self._accounts[row.account, row.level] = _Account(row.cap, row.spent, row.posted)
        self._reservations: dict[str, _Reservation] = {}
        self._open: tuple[str, str] | None = None  # (reservation, kind) whose entries are being read

    def take_all(self, rows: Iterator[Row]) -> None:
        for row in rows:
            self.take(row)
        self._follow("", "", self.head.seq + 1)

    def take(self, row: Row) -> None:
        self._check_chain(row)
        self._follow(row["reservation_id"], row["kind"], row["seq"])
        steps: dict[str, Callable[[Row, tuple[str, str]], None]] = {
            "open": self._open_account, "cap": self._change_cap, "reserve": self._reserve,
            "post": self._settle, "void": self._settle, "answer": self._answer,
        }  # fmt: skip
        step = steps.get(row["kind"])
        if step is None:
            _broken(row, f"is of the unknown kind {row['kind']!r}")
        step(row, (row["account"], row["level"]))
        self.head, self._at = Head(row["seq"], row["hash"]), row["at"]

    def account_rows(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        return {key: (of.cap, of.spent, of.posted) for key, of in self._accounts.items()}

    def reservation_rows(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        return {
            (name,): (of.state, of.first_seq, len(of.charges), of.settled_seq)
            for name, of in self._reservations.items()
        }

    def _check_chain(self, row: Row) -> None:
        expected = self.head.seq + 1
        if row["seq"] != expected:
            raise JournalBroken(f"entry {expected} is missing: entry {row['seq']} comes after {self.head.seq}. {_DO}")
        if row["previous_hash"] != self.head.hash:
            _broken(row, "does not follow from the entry before it")
        if row["hash"] != entry_hash(row):
            _broken(row, "was changed: its content does not have its hash")
        try:
            time_of(row["at"])
        except ValueError:
            _broken(row, "has no readable time")
        if row["at"] < self._at:
            _broken(row, "is earlier than the entry before it")

    def _follow(self, reservation_id: str, kind: str, seq: int) -> None:
        """Check that a reservation is settled whole, in neighboring entries."""
        if self._open is None or self._open == (reservation_id, kind):
            return
        before = self._reservations[self._open[0]]
        if before.state != "reserved" and len(before.settled) != len(before.charges):
            raise JournalBroken(f"entry {seq} comes before reservation {self._open[0]!r} was settled whole. {_DO}")
        self._open = None

    def _open_account(self, row: Row, key: tuple[str, str]) -> None:
        if key in self._accounts:
            _broken(row, "opens an account a second time")
        self._accounts[key] = _Account(_cap_of(row))

    def _change_cap(self, row: Row, key: tuple[str, str]) -> None:
        account = self._account(row, key)
        account.cap = _cap_of(row)
        _check_cap(row, account)

    def _reserve(self, row: Row, key: tuple[str, str]) -> None:
        account, name = self._account(row, key), row["reservation_id"]
        known = self._known(name)
        if known is None:
            known = self._reservations[name] = _Reservation(row["seq"], {})
        elif self._open != (name, "reserve") or key in known.charges:
            _broken(row, f"reserves {name!r} a second time")
        self._open = (name, "reserve")
        known.charges[key] = row["amount"]
        account.spent += row["amount"]
        _check_cap(row, account)

    def _settle(self, row: Row, key: tuple[str, str]) -> None:
        account, name, kind = self._account(row, key), row["reservation_id"], row["kind"]
        known = self._known(name)
        if known is None or known.charges.get(key) != row["amount"] or key in known.settled:
            _broken(row, f"settles what reservation {name!r} does not hold")
        state = "posted" if kind == "post" else "void"
        if known.state == "reserved":
            known.state, known.settled_seq = state, row["seq"]
        elif known.state != state or self._open != (name, kind):
            _broken(row, f"settles reservation {name!r} a second time")
        self._open = (name, kind)
        known.settled.add(key)
        if kind == "post":
            account.posted += row["amount"]
        else:
            account.spent -= row["amount"]

    def _answer(self, row: Row, key: tuple[str, str]) -> None:
        known = self._known(row["reservation_id"])
        if known is None or known.state != "posted" or key not in known.charges or known.is_answered or row["amount"]:
            _broken(row, f"answers for {row['reservation_id']!r}, which does not pay for it")
        known.is_answered = True

    def _known(self, name: str) -> _Reservation | None:
        """Return a reservation; one that was made before this began is read from its entries."""
        known = self._reservations.get(name)
        if known is not None or self._before is None:
            return known
        table, seq = ledger_reservations.c, ledger_entries.c.seq
        of_name = (table.reservation_id == name, table.first_seq <= self._since.seq)
        row = self._before.execute(select(ledger_reservations).where(*of_name)).first()
        if row is None:
            return None
        known = self._reservations[name] = _Reservation(row.first_seq, {})
        made_by = select(ledger_entries).where(seq.between(row.first_seq, row.first_seq + row.charges - 1))
        for entry in map(dict, self._before.execute(made_by).mappings()):
            if (entry["kind"], entry["reservation_id"]) != ("reserve", name) or entry["hash"] != entry_hash(entry):
                _broken(entry, f"is not what reservation {name!r} was made of")
            known.charges[entry["account"], entry["level"]] = entry["amount"]
        if row.settled_seq is not None and row.settled_seq <= self._since.seq:
            known.state, known.settled_seq, known.settled = row.state, row.settled_seq, set(known.charges)
        return known

    def _account(self, row: Row, key: tuple[str, str]) -> _Account:
        account = self._accounts.get(key)
        if account is None:
            _broken(row, "is about an account that was never opened")
        return account


def _rows(connection: Connection, start: int) -> Iterator[Row]:
    seq = ledger_entries.c.seq
    page = select(ledger_entries).where(seq >= bindparam("start")).order_by(seq).limit(_BATCH)
    while True:
        rows = connection.execute(page, {"start": start}).mappings().all()
        yield from map(dict, rows)
        if len(rows) < _BATCH:
            return
        start = rows[-1]["seq"] + 1


def _compare(
    connection: Connection,
    table: Table,
    what: str,
    derived: dict[tuple[Any, ...], tuple[Any, ...]],
    *within: ColumnElement[bool],
) -> None:
    """Refuse a table whose rows, keyed by its primary key (its first columns), differ from what was derived.

    Columns after those that are derived are compared elsewhere.
    """
    key, width = len(table.primary_key), _DERIVED[table]
    query = select(*list(table.columns)[: key + width]).where(*within)
    found = {tuple(row[:key]): tuple(row[key:]) for row in connection.execute(query)}
    for name in sorted(found.keys() | derived.keys()):
        if found.get(name) != derived.get(name):
            raise JournalBroken(
                f"the {what} {'/'.join(map(repr, name))} is stored as {found.get(name)}, and the entries add up to "
                f"{derived.get(name)}. {_DO}"
            )


_DERIVED = {ledger_accounts: 3, ledger_reservations: 4}
"""How many columns after the key the entries give: cap, spent, posted; state, first_seq, charges, settled_seq."""


def _cap_of(row: Row) -> int | None:
    try:
        cap = json.loads(row["detail"])["cap"]
    except (ValueError, KeyError, TypeError):
        _broken(row, "sets no readable cap")
    if (cap is not None and type(cap) is not int) or row["amount"] != (cap or 0):
        _broken(row, "sets two different caps")
    return cap


def _check_cap(row: Row, account: _Account) -> None:
    if account.cap is not None and account.spent > account.cap:
        _broken(row, f"leaves {account.spent} spent of a cap of {account.cap}")


def _broken(row: Row, what: str) -> NoReturn:
    raise JournalBroken(f"entry {row['seq']} {what}. {_DO}")


_DO = "Keep the file as evidence, restore the newest backup, and find out who wrote to the journal"
