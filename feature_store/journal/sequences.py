"""Numbers of messages: what is sent gets a new one for life, and what was taken is not taken twice.

A sender takes numbers in blocks of 1000, so that most messages cost no write; what is left of a block when a process
ends is skipped. A block begins no lower than the time in milliseconds, so that numbers also go up over the copy of a
journal that was restored from a backup: with the counter alone it would use again what was sent since, and everything
it sends would be dropped as a replay. A receiver keeps the highest number of each sender and key: a message must be
above it. The key is part of it, so that somebody who signs under another's name with a key of its own cannot use up
that one's numbers.

What was taken is read from the journal once per sender and kept in memory: one process writes a journal.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    Text,
    insert,
)

from feature_store.clock import Clock, now_utc
from feature_store.journal.columns import WHOLE
from feature_store.journal.database import Database, strict_table
from feature_store.journal.joining import writing
from feature_store.journal.prepared import Prepared
from feature_store.journal.rules import forbid, remain
from labeler.errors import ProtocolViolation, Replayed
from labeler.messages import MAX_SEQUENCE

BLOCK = 1000

sequences_sent = strict_table(
    "sequences_sent",
    Column("recipient", Text, primary_key=True),
    Column("reserved", WHOLE, nullable=False),
    CheckConstraint("reserved >= 0", name="reserved"),
)
sequences_taken = strict_table(
    "sequences_taken",
    Column("sender", Text, primary_key=True),
    Column("verify_key", Text, primary_key=True),
    Column("last", WHOLE, nullable=False),
    CheckConstraint("last >= 1", name="last"),
)
for _table, _column in ((sequences_sent, "reserved"), (sequences_taken, "last")):
    remain(_table)
    forbid(_table, "rise", on="UPDATE", when=f"NEW.{_column} <= OLD.{_column}", because="sequence numbers only go up")


# A number without a key was taken when keys were not kept (version 1 of the tables); it counts for every key.
_HIGHEST = Prepared("SELECT max(last) FROM sequences_taken WHERE sender = :sender AND verify_key IN (:verify_key, '')")
_RISE = Prepared(
    "UPDATE sequences_taken SET last = :last WHERE sender = :sender AND verify_key = :verify_key AND last < :last"
)
_ADD = Prepared(insert(sequences_taken))
_SENT = Prepared("SELECT reserved FROM sequences_sent WHERE recipient = :recipient")
_FIRST_BLOCK = Prepared(insert(sequences_sent))
_NEXT_BLOCK = Prepared("UPDATE sequences_sent SET reserved = :reserved WHERE recipient = :recipient")


class Sequences:
    """Numbers sent and numbers taken; shared by all threads of a process.

    Args:
        clock: times with a time zone; the system's where absent. Set back, it costs nothing: the counter goes on.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: dict[str, deque[int]] = {}
        self._last: dict[str, int] = {}
        self._taken: dict[tuple[str, str], int] = {}
        database.create(sequences_sent, sequences_taken)

    def next(self, recipient: str, *, connection: Connection | None = None) -> int:
        """A number for the next message to a recipient: above all before it, also after a crash.

        Args:
            connection: the write transaction that is open in this thread, where there is one. A number from a
                transaction that is undone must not be used.
        """
        while True:
            number = self._from_block(recipient)
            if number is not None:
                return number
            # Not under our own lock: a thread that holds the database's pen may be waiting for it.
            first = self._reserve(recipient, connection)
            if connection is not None:
                self._skip_to(recipient, first)
                self._database.after_commit(partial(self._install, recipient, first + 1))
                return first
            self._install(recipient, first)

    def check(self, sender: str, sequence: int, *, verify_key: str, connection: Connection | None = None) -> None:
        """Refuse a message that is not new.

        Args:
            sender: who it says it is from.
            verify_key: the key that its signature was checked with.

        Raises:
            Replayed: its number is not above the highest taken.
            ProtocolViolation: it is no sequence number.
        """
        _check_number(sequence)
        if connection is not None:
            # Its own transaction may have taken some already, and may be undone.
            _check_new(sender, sequence, self._highest_taken(sender, verify_key, connection))
            return
        last = self._taken.get((sender, verify_key))
        if last is None:
            with self._database.read() as reader:
                last = self._highest_taken(sender, verify_key, reader)
            with self._lock:
                last = max(last, self._taken.get((sender, verify_key), 0))
                self._taken[sender, verify_key] = last
        _check_new(sender, sequence, last)

    def last(self, sender: str, verify_key: str) -> int:
        """The highest number taken of a sender under a key; 0 where none was."""
        with self._database.read() as connection:
            return self._highest_taken(sender, verify_key, connection)

    def taken(self, sender: str, sequence: int, *, verify_key: str, connection: Connection | None = None) -> None:
        """Note that a message was taken, in the transaction that keeps its effect.

        Raises:
            Replayed: this or a later one was taken at the same time; nothing is to be kept of this one.
        """
        _check_number(sequence)
        with writing(self._database, connection) as joined:
            if _RISE.run(joined, sender=sender, verify_key=verify_key, last=sequence) != 1:
                _check_new(sender, sequence, self._highest_taken(sender, verify_key, joined))
                _ADD.run(joined, sender=sender, verify_key=verify_key, last=sequence)
            self._database.after_commit(partial(self._remember, sender, verify_key, sequence))

    def _highest_taken(self, sender: str, verify_key: str, connection: Connection) -> int:
        found = _HIGHEST.first(connection, sender=sender, verify_key=verify_key)
        return 0 if found is None or found[0] is None else int(found[0])

    def _remember(self, sender: str, verify_key: str, sequence: int) -> None:
        with self._lock:
            self._taken[sender, verify_key] = max(sequence, self._taken.get((sender, verify_key), 0))

    def _from_block(self, recipient: str) -> int | None:
        with self._lock:
            block = self._blocks.get(recipient)
            if not block:
                return None
            number = block.popleft()
            self._last[recipient] = number
            return number

    def _reserve(self, recipient: str, connection: Connection | None) -> int:
        """Take a block durably; its first number."""
        with writing(self._database, connection) as joined:
            row = _SENT.first(joined, recipient=recipient)
            begin = max(0 if row is None else int(row[0]), self._block_of_now())
            end = begin + BLOCK
            keep = _FIRST_BLOCK if row is None else _NEXT_BLOCK
            keep.run(joined, recipient=recipient, reserved=end)
        return begin + 1

    def _block_of_now(self) -> int:
        milliseconds = int(self._clock().timestamp() * 1000)
        return -(-milliseconds // BLOCK) * BLOCK

    def _skip_to(self, recipient: str, number: int) -> None:
        """Hand out nothing below a number any more."""
        with self._lock:
            self._last[recipient] = max(number, self._last.get(recipient, 0))
            block = self._blocks.get(recipient)
            if block and block[0] < number:
                block.clear()

    def _install(self, recipient: str, first: int) -> None:
        """Hand out from a block, unless a higher one was begun in the meantime: numbers only go up."""
        end = (first - 1) // BLOCK * BLOCK + BLOCK
        with self._lock:
            block = self._blocks.get(recipient)
            begun = max(self._last.get(recipient, 0), block[0] if block else 0)
            if first > begun:
                self._blocks[recipient] = deque(range(first, end + 1))


def _check_new(sender: str, sequence: int, last: int) -> None:
    if sequence <= last:
        raise Replayed(
            f"message {sequence} of {sender!r} is not new: message {last} was taken. If it was sent again because "
            "the answer was lost, it has arrived"
        )


def _check_number(sequence: int) -> None:
    if type(sequence) is not int or not 1 <= sequence <= MAX_SEQUENCE:
        raise ProtocolViolation("sequence of a message must be a whole number between 1 and 2^62")
