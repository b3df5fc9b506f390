"""A copy of a journal as of one moment, while its owner goes on writing.

Copying the file byte by byte could take half of a transaction; SQLite's own backup reads one consistent state. Beside
the copy lies an anchor of its own, so that a restored pair opens, while a journal that is put back without it, or
beside the newer anchor of the home it came from, is refused: charges are missing from it. Where such a copy is all that
is left (`accept_restored`), what the lost entries charged is not known, so the only safe belief is that they spent
everything.

A backup holds no erasable keys (labeler.system.erasable), so what is restored from it cannot open what rounds had
stored, and may have forgotten charges of which nobody who is asked now knows. Therefore the keys have one among them
that is none of any round, the journal keeps a value that only this key gives, and where the two do not belong together
nothing is served. The way on is `labeler journal accept-restored`: all that is left counts as spent, nothing is kept of
any round, and the home gets a new key.
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


HOME_KEY = "home"
"""The name of the key that is none of any round."""

DIGEST_LENGTH: Final = 64
"""Of a round's SHA-256, in hexadecimal."""


def check_home(database: Database, keys: ErasableKeys, *, has_entries: bool) -> None:
    """Refuse a journal that does not belong to these keys; to be called before anything is written.

    Args:
        has_entries: whether its ledger holds anything.

    Raises:
        JournalBehind: the keys are there and the journal is new, or the journal is there and its keys are not.
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
    """Tie a journal to these keys, once; to be called when its ledger holds something.

    Where the process dies between the key and the row, the next start takes the key that is there.
    """
    key = keys.draw(HOME_KEY)
    with database.write() as connection:
        if _value(connection) is None:
            connection.execute(insert(erasable_home), {"check_value": check_value(key)})


def _value(connection: Connection) -> str | None:
    return connection.execute(select(erasable_home.c.check_value)).scalar()


def renew_home(database: Database, keys: ErasableKeys) -> None:
    """Tie a journal to a new key and erase every other one; the journal was accepted as it is."""
    keys.erase_all(keys.names())
    with database.write() as connection:
        connection.execute(delete(erasable_home))
    mark_home(database, keys)


class UnusedKeys:
    """Erasable keys that open nothing: drawn for something that was never kept, or of something that is erased already.

    A key is durable before the row that needs it, and a row says that it is erased before its key is. So whatever ends
    a transaction too early (a full disk, a refusal, a process that dies, a key that could not be overwritten) leaves a
    key too many and never one too few. Nothing that left was ever made with such a key: an agent draws noise and masks
    after the commit of the charge only, and what a tallier encrypted within the transaction was undone with it. It is
    erased all the same, at the start of a process, and while it runs at its first rest after something was undone
    (`Database.undone`).

    Used by the one thread that draws these keys, outside of its transactions.

    Args:
        endings: what may stand behind a round's digest in the name of its key; keys of other names are left alone.
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
            Unavailable: the journal cannot be used now; whatever is left is erased by the next call.
        """
        undone = self._database.undone
        with self._database.read() as connection:
            unused = self._unused(connection)
        if unused:
            # Behind whatever may still be under way (a commit whose answer was lost), so that no row comes after it.
            with self._database.write() as connection:
                self._keys.erase_all(self._unused(connection))
        self._seen_undone = undone

    def erase_what_was_undone(self) -> None:
        """The same where something was undone since the last time; else nothing is asked."""
        if self._seen_undone != self._database.undone:
            self.erase()

    def _unused(self, connection: Connection) -> list[str]:
        needed = set(self._needed(connection))
        return [name for name in self._keys.names() if self._is_of_round(name) and name not in needed]

    def _is_of_round(self, name: str) -> bool:
        return any(name.endswith(ending) and len(name) == length for ending, length in self._lengths.items())
