"""Every statement the ledger runs, in one place."""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import ColumnElement, Dialect, Select, bindparam, insert, literal_column, or_, select, update

from feature_store.journal.ledger_tables import ledger_accounts, ledger_entries, ledger_reservations
from feature_store.journal.prepared import Prepared

_ENTRY = ledger_entries.c
_ACCOUNT = ledger_accounts.c
_RESERVATION = ledger_reservations.c

_ZERO: ColumnElement[int] = literal_column("0")
_ONE: ColumnElement[int] = literal_column("1")
_THREE: ColumnElement[int] = literal_column("3")


@lru_cache(maxsize=8)
def ledger_statements(dialect: Dialect) -> LedgerStatements:
    """The ledger's statements for a dialect, compiled once: all SQLite journals of a process share one (engines)."""
    return LedgerStatements(dialect)


class LedgerStatements:
    """The ledger's statements, compiled for one database."""

    def __init__(self, dialect: Dialect) -> None:
        of_account = (_ACCOUNT.account == bindparam("of"), _ACCOUNT.level == bindparam("at_level"))
        of_reservation = _RESERVATION.reservation_id == bindparam("wanted")
        last = select(_ENTRY.seq, _ENTRY.at, _ENTRY.hash).order_by(_ENTRY.seq.desc()).limit(_ONE).offset(_ZERO)
        self.tail = Prepared(last, dialect)
        self.hash_at = Prepared(select(_ENTRY.hash).where(_ENTRY.seq == bindparam("wanted")), dialect)
        self.add_entry = Prepared(insert(ledger_entries), dialect)
        self.charged = Prepared(
            select(_ENTRY.account, _ENTRY.level, _ENTRY.amount)
            .where(_ENTRY.seq >= bindparam("first"), _ENTRY.seq <= bindparam("last"))
            .order_by(_ENTRY.seq),
            dialect,
        )
        account = select(_ACCOUNT.account, _ACCOUNT.level, _ACCOUNT.cap, _ACCOUNT.spent, _ACCOUNT.posted)
        self.account = Prepared(account.where(*of_account), dialect)
        self.accounts = Prepared(account, dialect)
        self.open_account = Prepared(
            insert(ledger_accounts).values(
                account=bindparam("of"),
                level=bindparam("at_level"),
                cap=bindparam("new_cap"),
                spent=_ZERO,
                posted=_ZERO,
            ),
            dialect,
        )
        self.change_cap = Prepared(update(ledger_accounts).where(*of_account).values(cap=bindparam("new_cap")), dialect)
        self.move = Prepared(
            update(ledger_accounts)
            .where(*of_account)
            .values(spent=_ACCOUNT.spent + bindparam("spent_more"), posted=_ACCOUNT.posted + bindparam("posted_more")),
            dialect,
        )
        self.reservation = Prepared(
            select(_RESERVATION.state, _RESERVATION.first_seq, _RESERVATION.charges, _RESERVATION.settled_seq).where(
                of_reservation
            ),
            dialect,
        )
        self.add_reservation = Prepared(
            insert(ledger_reservations).values(
                reservation_id=bindparam("wanted"), state=literal_column("'reserved'"), first_seq=bindparam("first"),
                charges=bindparam("count"),
            ),
            dialect,
        )  # fmt: skip
        self.settle = Prepared(
            update(ledger_reservations)
            .where(of_reservation)
            .values(state=bindparam("new_state"), settled_seq=bindparam("new_seq")),
            dialect,
        )
        self.last_spenders = Prepared(
            select(_ENTRY.reservation_id, _ENTRY.amount)
            .join(ledger_reservations, _RESERVATION.reservation_id == _ENTRY.reservation_id)
            .where(
                _ENTRY.account == bindparam("of"),
                _ENTRY.level == bindparam("at_level"),
                _ENTRY.kind == literal_column("'reserve'"),
                _RESERVATION.state != literal_column("'void'"),
            )
            .order_by(_ENTRY.seq.desc())
            .limit(_THREE)
            .offset(_ZERO),
            dialect,
        )


def entries_query(
    *, after: int, limit: int, account: str | None, level: str | None, search: str | None
) -> Select[tuple[object, ...]]:
    """A page of entries in order of sequence numbers."""
    query = select(ledger_entries).where(_ENTRY.seq > after).order_by(_ENTRY.seq).limit(limit)
    if account is not None:
        query = query.where(_ENTRY.account == account)
    if level is not None:
        query = query.where(_ENTRY.level == level)
    if search:
        columns = (_ENTRY.account, _ENTRY.reservation_id, _ENTRY.kind, _ENTRY.detail)
        query = query.where(or_(*(column.icontains(search, autoescape=True) for column in columns)))
    return query
