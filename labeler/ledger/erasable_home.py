"""Erasable keys and the journal that they belong to: found out where they do not, erased where nothing needs them.

A backup holds no erasable keys (labeler.system.erasable), so what is restored from it cannot open what rounds had
stored, and may have forgotten charges of which nobody who is asked now knows. Therefore the keys have one among them
that is none of any round, the journal keeps a value that only this key gives, and where the two do not belong together
nothing is served. The way on is `labeler journal accept-restored`: all that is left counts as spent, nothing is kept of
any round, and the home gets a new key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection
from typing import Final

from sqlalchemy import Connection, delete, insert, select

from labeler.errors import JournalBehind
from labeler.ledger.database import Database
from labeler.ledger.schema import erasable_home
from labeler.system.erasable import ErasableKeys, check_value

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
