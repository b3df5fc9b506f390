"""What to do when the newest journal is gone and an older copy is all there is.

What the lost entries charged is not known, so the only safe belief is that they spent everything.
"""

from __future__ import annotations

from feature_store.clock import Clock
from feature_store.journal.anchor import Anchor
from feature_store.journal.chain import Head
from feature_store.journal.database import Database
from feature_store.journal.ledger import Ledger
from feature_store.journal.lifetimes import close_lifetimes
from labeler.errors import InvalidSetting


def accept_restored(database: Database, *, clock: Clock, reason: str) -> Head:
    """Go on with an older journal, and treat all that is left of every limited account as spent.

    Nothing can be charged to these accounts until a person raises a cap, who thereby says what may still be spent.
    Accounts that are not limited stay as they are. No record casts votes for life from this journal any more.

    Args:
        reason: why, kept in the ledger.

    Returns:
        The new head, which the anchor now remembers.

    Raises:
        JournalBroken: the copy does not hold by itself; then nothing helps but another backup.
        InvalidSetting: the journal has no anchor, so there is nothing to accept.
    """
    if database.anchor is None:
        raise InvalidSetting(f"{database.what} is opened without an anchor, so there is nothing to accept")
    ledger = Ledger(database, clock=clock, anchored=False)
    ledger.verify()
    for balance in ledger.balances():
        if balance.cap is not None:
            ledger.write_off(balance.account, balance.level, reason)
    # What records have voted for life since is not known either, and no cap that is raised later gives it back.
    close_lifetimes(database, reason)
    head = ledger.head()
    Anchor(database.anchor).replace(head)
    return head
