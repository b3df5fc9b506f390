"""What every account has spent, in memory: a price is asked for far more often than a budget changes.

It is read once, together with the number of the ledger's last entry, and then follows each commit in order: the journal
has one writer, and what it appended is told here before the next transaction begins. A commit can be read before it is
told, and one whose outcome was never heard is never told, so entries are taken by their numbers: those that were read
already change nothing, and after a gap everything is read again. Only answers to people rest on it; what may be spent
is read and checked in the transaction that spends it.

Where another process writes the journal nobody tells of its commits: then what was read is remembered for a second
(`fresh_s`), and read again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from feature_store.journal.book import Row
from feature_store.journal.chain import Kind
from feature_store.journal.charges import Balance
from labeler.task import Level

_MOVES: dict[str, tuple[int, int]] = {"reserve": (1, 0), "post": (-1, 1), "void": (-1, 0), "answer": (0, 0)}
"""How an entry moves what is reserved, and what is posted, of its account."""


class KnownBalances:
    """Shared by all threads.

    Args:
        read: the number of the last entry and every account, in one moment of the journal.
        fresh_s: for how long it is remembered; None where this process writes the journal and is told of every commit.
    """

    def __init__(self, read: Callable[[], tuple[int, Iterable[Balance]]], *, fresh_s: float | None = None) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._until_s = 0.0
        self._lock = threading.Lock()
        self._told = 0
        """The last entry of which this was told."""
        self._seq = 0
        """The last entry that is in `_known`."""
        self._known: dict[tuple[str, Level], Balance] | None = None

    def at_once(self) -> dict[tuple[str, Level], Balance] | None:
        """Every account, where it is known without a look into the journal."""
        with self._lock:
            return None if self._known is None or self._is_old() else dict(self._known)

    def all(self) -> dict[tuple[str, Level], Balance]:
        """Every account; read where it is not known."""
        with self._lock:
            if self._known is not None and not self._is_old():
                return dict(self._known)
        until_s = 0.0 if self._fresh_s is None else time.monotonic() + self._fresh_s
        seq, balances = self._read()
        found = {(one.account, one.level): one for one in balances}
        with self._lock:
            if seq >= self._told and (self._known is None or self._is_old() or seq > self._seq):
                # Else somebody wrote since.
                self._known, self._seq, self._until_s = dict(found), seq, until_s
        return found

    def _is_old(self) -> bool:
        return self._fresh_s is not None and time.monotonic() >= self._until_s

    def appended(self, kind: Kind, rows: Sequence[Row], first_seq: int) -> None:
        """Entries are durable, numbered from `first_seq` on; called for each commit in order, before the next one."""
        with self._lock:
            self._told = first_seq + len(rows) - 1
            if self._known is None or self._told <= self._seq:
                return
            if first_seq != self._seq + 1:
                self._known = None  # something was written of which nobody heard: a commit whose answer was lost
                return
            self._seq = self._told
            if kind not in _MOVES:
                self._known = None  # an account was opened, or has another cap: read again when somebody asks
                return
            reserved, posted = _MOVES[kind]
            for account, level, amount in rows:
                before = self._known.get((account, level))  # type: ignore[arg-type]  # a level out of a row
                if before is None:
                    self._known = None
                    return
                self._known[before.account, before.level] = Balance(
                    before.account,
                    before.level,
                    before.cap,
                    before.reserved + reserved * amount,
                    before.posted + posted * amount,
                )
