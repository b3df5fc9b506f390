"""Sequence numbers of messages: every message sent gets a new number, and no number is accepted twice.

A sender takes numbers in blocks of 1000, so that most messages cost no write. The rest of a block is skipped when a
process ends. A block begins no lower than the time in milliseconds, so numbers also go up after a journal is restored
from a backup. The counter alone would repeat numbers that were sent after the backup, and receivers would drop those
messages as replays.

A receiver keeps the highest number of each sender and key, and accepts only higher ones. It keeps them by key so that
somebody who signs in another party's name with a different key cannot use up that party's numbers.
"""

from __future__ import annotations

import threading

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
        clock: gives times with a time zone; by default the system's. Setting it back is harmless: numbers still go up.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: dict[str, tuple[int, int]] = {}
        """Recipient -> the next number and the last one of its block."""

    def next(self, recipient: str) -> int:
        """Return a number for the next message to a recipient. It is above all earlier ones, even after a crash."""
        while True:
            with self._lock:
                number, last = self._blocks.get(recipient, (1, 0))
                if number <= last:
                    self._blocks[recipient] = (number + 1, last)
                    return number
            # Not under this object's lock: a thread that holds the database's write lock may be waiting for it.
            first = self._reserve(recipient)
            with self._lock:
                # Another thread may have begun a higher block meanwhile. Keep it, because numbers only go up.
                if first >= self._blocks.get(recipient, (1, 0))[0]:
                    self._blocks[recipient] = (first, first + BLOCK - 1)

    def last(self, sender: str, verify_key: str) -> int:
        """Return the highest number accepted from a sender under a key; 0 if there is none."""
        with self._database.read() as connection:
            return self._highest_taken(sender, verify_key, connection)

    def taken(self, sender: str, sequence: int, *, verify_key: str, connection: Connection | None = None) -> None:
        """Record that a message was accepted, in the transaction that keeps its effect.

        Args:
            sender: the party named in the message.
            verify_key: the key that its signature was checked with.

        Raises:
            Replayed: this message or a later one was accepted; discard the transaction.
            ProtocolViolation: it is not a sequence number.
        """
        if type(sequence) is not int or not 1 <= sequence <= MAX_SEQUENCE:
            raise ProtocolViolation("sequence of a message must be a whole number between 1 and 2^62")
        with self._database.writing(connection) as joined:
            before = self._highest_taken(sender, verify_key, joined)
            if sequence <= before:
                raise Replayed(
                    f"message {sequence} of {sender!r} is not new: message {before} was taken. If it was sent again "
                    "because the answer was lost, it has arrived"
                )
            this = {"sender": sender, "verify_key": verify_key}
            if before:
                update_rows(joined, sequences_taken, {"last": sequence}, **this)
            else:
                insert_rows(joined, sequences_taken, this | {"last": sequence})

    def _highest_taken(self, sender: str, verify_key: str, connection: Connection) -> int:
        found = select_rows(connection, sequences_taken, sender=sender, verify_key=verify_key).first()
        return 0 if found is None else int(found.last)

    def _reserve(self, recipient: str) -> int:
        """Reserve a block durably; return its first number."""
        with self._database.write() as joined:
            known = select_rows(joined, sequences_sent, recipient=recipient).first()
            milliseconds = int(self._clock().timestamp() * 1000)
            begin = max(0 if known is None else known.reserved, -(-milliseconds // BLOCK) * BLOCK)
            if known is None:
                insert_rows(joined, sequences_sent, {"recipient": recipient, "reserved": begin + BLOCK})
            else:
                update_rows(joined, sequences_sent, {"reserved": begin + BLOCK}, recipient=recipient)
        return begin + 1
