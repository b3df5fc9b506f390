"""Every statement the ledger runs, in one place."""

from __future__ import annotations

from sqlalchemy import Select, case, func, insert, or_, select

from feature_store.journal.chain import SALT_BYTES, SALTED
from feature_store.journal.ledger_tables import ledger_entries
from feature_store.journal.prepared import Prepared

TAIL = Prepared("SELECT seq, at, hash FROM ledger_entries ORDER BY seq DESC LIMIT 1")
HASH_AT = Prepared("SELECT hash FROM ledger_entries WHERE seq = :seq")
ADD_ENTRY = Prepared(insert(ledger_entries))
CHARGED = Prepared(
    "SELECT account, level, amount FROM ledger_entries WHERE seq >= :first AND seq <= :last ORDER BY seq"
)
ACCOUNTS = Prepared("SELECT account, level, cap, spent, posted FROM ledger_accounts")
ACCOUNT = Prepared(
    "SELECT account, level, cap, spent, posted FROM ledger_accounts WHERE account = :account AND level = :level"
)
OPEN_ACCOUNT = Prepared(
    "INSERT INTO ledger_accounts (account, level, cap, spent, posted) VALUES (:account, :level, :cap, 0, 0)"
)
CHANGE_CAP = Prepared("UPDATE ledger_accounts SET cap = :cap WHERE account = :account AND level = :level")
MOVE = Prepared(
    "UPDATE ledger_accounts SET spent = spent + :spent, posted = posted + :posted "
    "WHERE account = :account AND level = :level"
)
RESERVATION = Prepared(
    "SELECT state, first_seq, charges, settled_seq FROM ledger_reservations WHERE reservation_id = :reservation_id"
)
ADD_RESERVATION = Prepared(
    "INSERT INTO ledger_reservations (reservation_id, state, first_seq, charges) "
    "VALUES (:reservation_id, 'reserved', :first_seq, :charges)"
)
SETTLE = Prepared(
    "UPDATE ledger_reservations SET state = :state, settled_seq = :seq WHERE reservation_id = :reservation_id"
)
LAST_SPENDERS = Prepared(
    "SELECT entry.reservation_id, entry.amount FROM ledger_entries AS entry "
    "JOIN ledger_reservations AS reservation ON reservation.reservation_id = entry.reservation_id "
    "WHERE entry.account = :account AND entry.level = :level AND entry.kind = 'reserve' "
    "AND reservation.state != 'void' ORDER BY entry.seq DESC LIMIT 3"
)


def entries_query(
    *, after: int, limit: int, account: str | None, level: str | None, search: str | None
) -> Select[tuple[object, ...]]:
    """A page of entries in order of sequence numbers."""
    entry = ledger_entries.c
    query = select(ledger_entries).where(entry.seq > after).order_by(entry.seq).limit(limit)
    if account is not None:
        query = query.where(entry.account == account)
    if level is not None:
        query = query.where(entry.level == level)
    if search:
        # Not in the salt, whose digits would answer to any short number.
        said = func.substr(entry.detail, len(SALTED) + 2 * SALT_BYTES + 1)
        detail = case((entry.detail.startswith(SALTED), said), else_=entry.detail)
        columns = (entry.account, entry.reservation_id, entry.kind, detail)
        query = query.where(or_(*(column.icontains(search, autoescape=True) for column in columns)))
    return query
