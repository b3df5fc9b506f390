"""Charges that name one level and not the other: what an answer without a finite price left in earlier journals.

An answer is charged at both levels by one reservation. Where it had no finite price at one of them, earlier versions
wrote no entry there; since then an amount stands for it that no cap can cover (labeler.budget.UNBOUNDED_NANO). Sums
cannot tell: an answer of an ensemble, or of the one nearest record, costs less at agent level than at instance level.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, case, func, select

from feature_store.journal.ledger_tables import ledger_entries, ledger_reservations
from labeler.task import Level

WRITTEN_OFF: Final = "written-off-"
"""What the reservations begin with by which all that is left of an account is spent."""


def accounts_charged_without(level: Level, connection: Connection) -> set[str]:
    """Accounts that paid for something, not given back, which names the other level and not this one.

    All that was written off counts as one: where charges may have been forgotten and this level was not written off
    (it is not limited), nobody knows what was spent at it.
    """
    entry, reservation = ledger_entries.c, ledger_reservations.c
    written_off = entry.reservation_id.like(f"{WRITTEN_OFF}%")
    together = case((written_off, "written-off"), else_=entry.reservation_id)
    here = func.sum(case((entry.level == level, 1), else_=0))
    query = (
        select(entry.account)
        .join(ledger_reservations, reservation.reservation_id == entry.reservation_id)
        .where(entry.kind == "reserve", reservation.state != "void")
        .group_by(entry.account, together)
        .having(here == 0)
    )
    return {row.account for row in connection.execute(query)}
