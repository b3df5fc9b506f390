"""Numbers of messages: each one sent gets a new number, and no number is accepted twice.

A sender takes numbers in blocks of 1000, so that most messages cost no write. The rest of a block is skipped when a
process ends. A block begins no lower than the time in milliseconds, so numbers also go up after a journal is restored
from a backup. The counter alone would repeat numbers sent since, and every message would be dropped as a replay. A
receiver keeps the highest number of each sender and key: a message must be above it. The key is included so that
somebody who signs in another's name with a different key cannot use up the other's numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial

from sqlalchemy import Connection

from labeler.errors import ProtocolViolation, Replayed
from labeler.ledger.database import Database, insert_rows, now_utc, select_rows, update_rows
from labeler.ledger.schema import sequences_sent, sequences_taken
from labeler.messages import MAX_SEQUENCE
from labeler.system.clock import Clock

BLOCK = 1000


class Sequences:
    """Numbers sent and numbers accepted; shared by all threads of a process.

    Args:
        clock: times with a time zone; by default the system's. Setting it back is harmless: the counter goes on.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: dict[str, deque[int]] = {}
        self._last: dict[str, int] = {}

    def next(self, recipient: str, *, connection: Connection | None = None) -> int:
        """Return a number for the next message to a recipient, above all earlier ones, also after a crash.

        Args:
            connection: this thread's open write transaction, if there is one. A number from a
                transaction that is undone must not be used.
        """
        while True:
            number = self._from_block(recipient)
            if number is not None:
                return number
            # Not under this object's lock: a thread that holds the database's write lock may be waiting for it.
            first = self._reserve(recipient, connection)
            if connection is not None:
                self._skip_to(recipient, first)
                self._database.after_commit(partial(self._install, recipient, first + 1))
                return first
            self._install(recipient, first)

    def check(self, sender: str, sequence: int, *, verify_key: str, connection: Connection | None = None) -> None:
        """Refuse a message that is not new.

        Args:
            sender: the party named in the message.
            verify_key: the key that its signature was checked with.

        Raises:
            Replayed: its number is not above the highest accepted.
            ProtocolViolation: it is not a sequence number.
        """
        _check_number(sequence)
        with self._database.reading(connection) as joined:
            _check_new(sender, sequence, self._highest_taken(sender, verify_key, joined))

    def last(self, sender: str, verify_key: str) -> int:
        """Return the highest number accepted of a sender under a key; 0 if there is none."""
        with self._database.read() as connection:
            return self._highest_taken(sender, verify_key, connection)

    def taken(self, sender: str, sequence: int, *, verify_key: str, connection: Connection | None = None) -> None:
        """Record that a message was accepted, in the transaction that keeps its effect.

        Raises:
            Replayed: this or a later one was accepted at the same time; discard the transaction.
        """
        _check_number(sequence)
        with self._database.writing(connection) as joined:
            before = self._highest_taken(sender, verify_key, joined)
            _check_new(sender, sequence, before)
            this = {"sender": sender, "verify_key": verify_key}
            if before:
                update_rows(joined, sequences_taken, {"last": sequence}, **this)
            else:
                insert_rows(joined, sequences_taken, this | {"last": sequence})

    def _highest_taken(self, sender: str, verify_key: str, connection: Connection) -> int:
        found = select_rows(connection, sequences_taken, sender=sender, verify_key=verify_key).first()
        return 0 if found is None else int(found.last)

    def _from_block(self, recipient: str) -> int | None:
        with self._lock:
            block = self._blocks.get(recipient)
            if not block:
                return None
            number = block.popleft()
            self._last[recipient] = number
            return number

    def _reserve(self, recipient: str, connection: Connection | None) -> int:
        """Reserve a block durably; return its first number."""
        with self._database.writing(connection) as joined:
            known = select_rows(joined, sequences_sent, recipient=recipient).first()
            begin = max(0 if known is None else known.reserved, self._block_of_now())
            if known is None:
                insert_rows(joined, sequences_sent, {"recipient": recipient, "reserved": begin + BLOCK})
            else:
                update_rows(joined, sequences_sent, {"reserved": begin + BLOCK}, recipient=recipient)
        return begin + 1

    def _block_of_now(self) -> int:
        milliseconds = int(self._clock().timestamp() * 1000)
        return -(-milliseconds // BLOCK) * BLOCK

    def _skip_to(self, recipient: str, number: int) -> None:
        """Hand out no number below this one any more."""
        with self._lock:
            self._last[recipient] = max(number, self._last.get(recipient, 0))
            block = self._blocks.get(recipient)
            if block and block[0] < number:
                block.clear()

    def _install(self, recipient: str, first: int) -> None:
        """Hand out from a block, unless a higher one was started in the meantime: numbers only go up."""
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
