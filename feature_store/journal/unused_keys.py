"""Erasable keys that open nothing: drawn for something that was never kept, or of something that is erased already.

A key is durable before the row that needs it, and a row says that it is erased before its key is. So whatever ends a
transaction too early (a full disk, a refusal, a process that dies, a key that could not be overwritten) leaves a key
too many and never one too few. Nothing that left was ever made with such a key: an agent draws noise and masks after
the commit of the charge only, and what a tallier encrypted within the transaction was undone with it (pages of it may
lie in the write-ahead log, to be read with that key alone). It is erased all the same, so that a key is there as long
as something of its round is and no longer: at the start of a process, and while it runs at its first rest after
something was undone (`Database.undone`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from sqlalchemy import Connection

from feature_store.erasable import ErasableKeys
from feature_store.journal.database import Database

DIGEST_LENGTH: Final = 64
"""Of a round's SHA-256, in hexadecimal."""


class UnusedKeys:
    """See the module. Used by the one thread that draws these keys, outside of its transactions.

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
