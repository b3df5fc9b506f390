"""A copy of a journal as of one moment, while its owner goes on writing.

Copying the file byte by byte could take half of a transaction; SQLite's own backup reads one consistent state. Beside
the copy lies an anchor of its own, so that a restored pair opens, while a journal that is put back without it, or
beside the newer anchor of the home it came from, is refused: charges are missing from it. Where such a copy is all that
is left (`accept_restored`), what the lost entries charged is not known, so the only safe belief is that they spent
everything.
"""

from __future__ import annotations

import contextlib
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from labeler.errors import InvalidSetting, Unavailable
from labeler.ledger.anchor import Anchor
from labeler.ledger.chain import Head
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import close_lifetimes
from labeler.ledger.storage import check_private, create_private
from labeler.ledger.verification import verify_ledger
from labeler.system.clock import Clock
from labeler.system.files import sync_folder


def backup(source: Path, out: Path, *, anchor: Path) -> Head:
    """Copy a SQLite journal, verify the copy from its first entry to its last, and write an anchor for it.

    Args:
        source: the journal; its owner may be running.
        out: the copy; must not exist.
        anchor: the copy's anchor; must not exist.

    Returns:
        The end of the copy's ledger.

    Raises:
        InvalidSetting: a file is there already, or the journal is not.
        JournalBroken: the copy does not hold, so neither does the journal.
        Unavailable: it cannot be read or written now, for example because the disk is full.
    """
    if not source.is_file():
        raise InvalidSetting(f"there is no journal {source.name} in {source.parent}")
    check_private(source)
    if out.exists() or anchor.exists():
        raise InvalidSetting(f"{out.name} or {anchor.name} is in {out.parent} already; a backup never replaces another")
    create_private(out)
    try:
        _copy(source, out)
        head = _verified(out)
        Anchor(anchor).replace(head)
        sync_folder(out.parent)
    except BaseException:
        out.unlink(missing_ok=True)
        anchor.unlink(missing_ok=True)
        raise
    return head


def _copy(source: Path, out: Path) -> None:
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(source.resolve()))}?mode=ro", uri=True)) as reader,
            closing(sqlite3.connect(out, isolation_level=None)) as writer,
        ):
            writer.execute("PRAGMA synchronous = FULL")
            # All pages in one step: a copy in several would begin again whenever the owner writes.
            reader.backup(writer, pages=-1)
    except sqlite3.Error as error:
        raise Unavailable(f"the journal {source.name} cannot be copied now: {error}") from None


def _verified(path: Path) -> Head:
    try:
        with closing(open_database(path, read_only=True)) as database, database.read() as connection:
            return verify_ledger(connection)
    finally:
        for ending in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + ending).unlink()


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
