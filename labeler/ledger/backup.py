"""A copy of a journal as of one moment, while its owner goes on writing.

Copying the file byte by byte could take half of a transaction; SQLite's own backup reads one consistent state. The
copy gets its own anchor, so a restored pair opens. A copy without an anchor, or with the newer anchor of the home it
came from, is refused: charges are missing from it. If only such a copy is left (`accept_restored`), the lost charges
are unknown, so the only safe assumption is that they spent everything.

A backup holds no erasable keys (labeler.system.erasable). So what is restored from it cannot open what rounds had
stored, and it may have forgotten charges that no reachable party knows of. Therefore one of the keys belongs to no
round, and the journal keeps a value that only this key gives. If the two do not match, nothing is served. The remedy
is `labeler journal accept-restored`: everything left counts as spent, no round is kept, and the home gets a new key.
"""

from __future__ import annotations

import contextlib
import hmac
import sqlite3
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

from sqlalchemy import Connection, delete, insert, select

from labeler.errors import InvalidSetting, JournalBehind, Unavailable
from labeler.ledger.chain import Anchor, Head
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import close_lifetimes
from labeler.ledger.schema import erasable_home
from labeler.ledger.verification import verify_ledger
from labeler.system.clock import Clock
from labeler.system.erasable import ErasableKeys, check_value
from labeler.system.files import check_private, create_private, sync_folder


def backup(source: Path, out: Path, *, anchor: Path) -> Head:
    """Copy a SQLite journal, verify the copy from its first entry to its last, and write an anchor for it.

    Args:
        source: the journal; its owner may be running.
        out: the copy; must not exist.
        anchor: the copy's anchor; must not exist.

    Returns:
        The end of the copy's ledger.

    Raises:
        InvalidSetting: a target file exists already, or the journal does not.
        JournalBroken: the copy does not verify, so neither does the journal.
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
            # All pages in one step: a copy in several steps would restart whenever the owner writes.
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
    """Continue with an older journal, and treat everything left in every limited account as spent.

    Nothing can be charged to these accounts until a person raises a cap and so states what may still be spent.
    Accounts that are not limited stay as they are. No record casts votes for life from this journal any more.

    Args:
        reason: kept in the ledger.

    Returns:
        The new head, which the anchor now remembers.

    Raises:
        JournalBroken: the copy itself does not verify; only another backup helps.
        InvalidSetting: the journal has no anchor, so there is nothing to accept.
    """
    if database.anchor is None:
        raise InvalidSetting(f"{database.what} is opened without an anchor, so there is nothing to accept")
    ledger = Ledger(database, clock=clock, anchored=False)
    ledger.verify()
    for balance in ledger.balances():
        if balance.cap is not None:
            ledger.write_off(balance.account, balance.level, reason)
    # Votes for life cast since then are unknown too, and no cap that is raised later gives them back.
    close_lifetimes(database, reason)
    head = ledger.head()
    Anchor(database.anchor).replace(head)
    return head


HOME_KEY = "home"
"""The name of the one key that belongs to no round."""

DIGEST_LENGTH: Final = 64
"""Length of a round's SHA-256 digest in hexadecimal."""


def check_home(database: Database, keys: ErasableKeys, *, has_entries: bool) -> None:
    """Refuse a journal that does not belong to these keys. Call it before anything is written.

    Args:
        has_entries: whether its ledger holds anything.

    Raises:
        JournalBehind: the keys exist and the journal is new, or the journal exists and its keys do not.
    """
    with database.read() as connection:
        wanted = _value(connection)
    key = keys.read(HOME_KEY)
    if wanted is None and key is not None and not has_entries:
        raise JournalBehind(
            "this home has a folder of erasable keys, and the journal beside it is empty: journal.db was lost, and "
            "with it what this party has spent and answered. Restore journal.db and journal.head from the newest "
            "backup of this home. If they are lost for good, retire this party: enrol a new one with a new home, whose "
            "policy allows only what the old one had left, and no votes for life (life_epsilon): nobody knows what its "
            "images have spent on them"
        )
    if wanted is not None and (key is None or not hmac.compare_digest(check_value(key), wanted)):
        raise JournalBehind(
            "the folder of erasable keys is missing or belongs to another journal, so this home was restored from a "
            "backup, which holds none: rounds since then may be missing, and what was kept of the others cannot be "
            "opened. If this is a move to another machine, copy the folder from the old one. Else `labeler journal "
            "accept-restored` goes on: all that is left counts as spent until a person raises a cap, and no round from "
            "before is answered or summed any more"
        )


def mark_home(database: Database, keys: ErasableKeys) -> None:
    """Tie a journal to these keys, once. Call it when its ledger holds something.

    If the process dies between the key and the row, the next start takes the key that exists.
    """
    key = keys.draw(HOME_KEY)
    with database.write() as connection:
        if _value(connection) is None:
            connection.execute(insert(erasable_home), {"check_value": check_value(key)})


def _value(connection: Connection) -> str | None:
    return connection.execute(select(erasable_home.c.check_value)).scalar()


def renew_home(database: Database, keys: ErasableKeys) -> None:
    """Tie an accepted journal to a new key and erase every other key."""
    keys.erase_all(keys.names())
    with database.write() as connection:
        connection.execute(delete(erasable_home))
    mark_home(database, keys)


class UnusedKeys:
    """Erasable keys that open nothing: drawn for something that was never kept, or left from something erased.

    A key is durable before the row that needs it, and a row says that it is erased before its key is. So an aborted
    transaction (a full disk, a refusal, a process that dies, a key that could not be overwritten) leaves a key too
    many and never one too few. Nothing that left was ever made with such a key. An agent draws noise and masks only
    after the charge is committed, and what a tallier encrypted within the transaction was undone with it. Unused keys
    are still erased: when a process starts, and in its first pause after something was undone (`Database.undone`).

    Only the one thread that draws these keys uses this, outside of its transactions.

    Args:
        endings: suffixes that may follow a round's digest in the name of its key; other names are left alone.
        needed: the names that rows need now.
    """

    def __init__(
        self,
        database: Database,
        keys: ErasableKeys,
        *,
        endings: tuple[str, ...],
        needed: Callable[[Connection], Collection[str]],
    ) -> None:
        self._database: Final = database
        self._keys: Final = keys
        self._lengths: Final = {ending: DIGEST_LENGTH + len(ending) for ending in endings}
        self._needed: Final = needed
        self._seen_undone = database.undone

    def erase(self) -> None:
        """Erase every key that no row needs.

        Raises:
            Unavailable: the journal cannot be used now; the next call erases what is left.
        """
        undone = self._database.undone
        with self._database.read() as connection:
            unused = self._unused(connection)
        if unused:
            # Wait for any pending write (a commit whose reply was lost), so that no row appears after this check.
            with self._database.write() as connection:
                self._keys.erase_all(self._unused(connection))
        self._seen_undone = undone

    def erase_what_was_undone(self) -> None:
        """Call `erase` if a write was undone since the last call; else look up nothing."""
        if self._seen_undone != self._database.undone:
            self.erase()

    def _unused(self, connection: Connection) -> list[str]:
        needed = set(self._needed(connection))
        return [name for name in self._keys.names() if self._is_of_round(name) and name not in needed]

    def _is_of_round(self, name: str) -> bool:
        return any(name.endswith(ending) and len(name) == length for ending, length in self._lengths.items())
