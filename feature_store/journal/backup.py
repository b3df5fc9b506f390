"""A copy of a journal as of one moment, while its owner goes on writing.

Copying the file byte by byte could take half of a transaction; SQLite's own backup reads one consistent state. Beside
the copy lies an anchor of its own, so that a restored pair opens, while a journal that is put back without it, or
beside the newer anchor of the home it came from, is refused: charges are missing from it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from feature_store.durable import sync_folder
from feature_store.journal.anchor import Anchor
from feature_store.journal.chain import Head
from feature_store.journal.database import open_database
from feature_store.journal.storage import check_private, create_private
from feature_store.journal.verification import verify_if_there
from labeler.errors import InvalidSetting, Unavailable


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
        # Not by way of the ledger's store, which opens only journals of this program's version: a journal is copied
        # before it is upgraded, and its entries are the same in all versions.
        with closing(open_database(path, read_only=True)) as database, database.read() as connection:
            return verify_if_there(connection)
    finally:
        for ending in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + ending).unlink()
