"""How a ledger is read and written inside one transaction; what may be written is decided in `ledger`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from sqlalchemy import Connection

from feature_store.clock import Clock
from feature_store.journal import ledger_statements as sql
from feature_store.journal.chain import EMPTY, Head, Kind, entry_hash, salted, time_text
from feature_store.journal.charges import Balance
from feature_store.journal.prepared import Parameter
from labeler.task import Level

State = Literal["reserved", "posted", "void"]

Row = tuple[str, str, int]
"""Account, level and amount of one entry."""


@dataclass(frozen=True)
class KnownReservation:
    """How far a reservation has come, and where its entries are.

    Attributes:
        first_seq: of its first "reserve" entry; the others follow it.
        charges: how many entries it has.
        settled_seq: of its first "post" or "void" entry.
    """

    state: State
    first_seq: int
    charges: int
    settled_seq: int | None

    @property
    def settled_at(self) -> int:
        """The sequence number of its first "post" or "void" entry."""
        return cast(int, self.settled_seq)  # a CHECK of the table: a settled reservation has one


class Book:
    """The ledger's rows, through connections that others opened."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock

    def tail(self, held: Connection) -> tuple[Head, str]:
        """The head, and the stored time of the last entry."""
        last = sql.TAIL.first(held)
        if last is None:
            return EMPTY, ""
        seq, at, entry = last
        return Head(seq, entry), at

    def hash_at(self, held: Connection, seq: int) -> str:
        """The hash of an entry; empty where there is none, all zeros before the first."""
        if seq == 0:
            return EMPTY.hash
        found = sql.HASH_AT.first(held, seq=seq)
        return "" if found is None else str(found[0])

    def balance(self, held: Connection, account: str, level: str) -> Balance | None:
        """What an account may spend and has spent; None where it was never opened."""
        row = sql.ACCOUNT.first(held, account=account, level=level)
        return None if row is None else _balance(*row)

    def balances(self, held: Connection) -> list[Balance]:
        """Every account."""
        return [_balance(*row) for row in sql.ACCOUNTS.all(held)]

    def reservation(self, held: Connection, reservation_id: str) -> KnownReservation | None:
        """A reservation; None where there is none."""
        row = sql.RESERVATION.first(held, reservation_id=reservation_id)
        return None if row is None else KnownReservation(*row)

    def charged(self, held: Connection, known: KnownReservation) -> list[Row]:
        """What a reservation charged, read from its entries."""
        last = known.first_seq + known.charges - 1
        found = sql.CHARGED.all(held, first=known.first_seq, last=last)
        return [(account, level, amount) for account, level, amount in found]

    def last_spenders(self, held: Connection, account: str, level: str) -> tuple[tuple[str, int], ...]:
        """The last few charges of an account that were not voided, oldest first."""
        found = sql.LAST_SPENDERS.all(held, account=account, level=level)
        return tuple((reservation_id, amount) for reservation_id, amount in reversed(found))

    def append(
        self, held: Connection, kind: Kind, reservation_id: str, rows: Sequence[Row], detail: str
    ) -> tuple[int, Head]:
        """Add one entry per row; the sequence number of the first, and the new head."""
        head, last_at = self.tail(held)
        detail = salted(detail)
        first = head.seq + 1
        at = max(time_text(self._clock()), last_at)  # a clock that was set back must not make the order wrong
        entries = []
        for account, level, amount in rows:
            entry: dict[str, Parameter] = {
                "seq": head.seq + 1, "at": at, "kind": kind, "account": account, "level": level,
                "reservation_id": reservation_id, "amount": amount, "detail": detail, "previous_hash": head.hash,
            }  # fmt: skip
            head = Head(head.seq + 1, entry_hash(entry))
            entries.append(entry | {"hash": head.hash})
        sql.ADD_ENTRY.run_many(held, entries)
        return first, head

    def set_cap(self, held: Connection, account: str, level: str, cap: int | None, *, is_new: bool) -> None:
        """Open an account, or change its cap."""
        change = sql.OPEN_ACCOUNT if is_new else sql.CHANGE_CAP
        change.run(held, account=account, level=level, cap=cap)

    def add_reservation(self, held: Connection, reservation_id: str, *, first_seq: int, rows: Sequence[Row]) -> None:
        """Note a new reservation, and charge its accounts."""
        sql.ADD_RESERVATION.run(held, reservation_id=reservation_id, first_seq=first_seq, charges=len(rows))
        self._move(held, rows, spent=1, posted=0)

    def settle(self, held: Connection, reservation_id: str, state: State, *, seq: int, rows: Sequence[Row]) -> None:
        """Note that a reservation is final ("posted"), or give its charges back ("void")."""
        sql.SETTLE.run(held, reservation_id=reservation_id, state=state, seq=seq)
        if state == "posted":
            self._move(held, rows, spent=0, posted=1)
        else:
            self._move(held, rows, spent=-1, posted=0)

    def _move(self, held: Connection, rows: Sequence[Row], *, spent: int, posted: int) -> None:
        moves: list[dict[str, Parameter]] = [
            {"account": account, "level": level, "spent": spent * amount, "posted": posted * amount}
            for account, level, amount in rows
        ]
        sql.MOVE.run_many(held, moves)


def _balance(account: str, level: Level, cap: int | None, spent: int, posted: int) -> Balance:
    return Balance(account, level, cap, spent - posted, posted)
