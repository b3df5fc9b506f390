"""How much one agent may put into a tallier's mail: shares of the size of their round, and a few of each.

A share is sealed, so the coordinator cannot look into it; its size and number it can bound. An honest agent sends the
same share again when it is asked again, so a few are taken; more are refused until the tallier's mail has run empty,
which it does once the tallier took them, and also when Redis lost them.
"""

from __future__ import annotations

import threading
from collections import Counter

from labeler.errors import ProtocolViolation, TooLarge
from labeler.messages import Message

BYTES_PER_ENTRY = 8
SHARE_OVERHEAD_BYTES = 8 * 1024
"""What the seal and the head of a share add to its numbers, at most."""

MAX_SHARES_WAITING = 4


class Relays:
    """Counts the shares that lie in the mail of each tallier, by round and sender."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Counter[tuple[str, str]]] = {}

    def check(self, message: Message, num_queries: int, num_classes: int) -> None:
        """Refuse a share that is larger than one of its round, or one too many.

        Raises:
            TooLarge: more bytes than the votes of the round take.
            ProtocolViolation: several shares of this agent for this round lie in the tallier's mail already.
        """
        header = message.header
        most = BYTES_PER_ENTRY * num_queries * num_classes + SHARE_OVERHEAD_BYTES
        if len(message.body) > most:
            raise TooLarge(
                f"a share of {num_queries} queries and {num_classes} classes has at most {most} bytes, found "
                f"{len(message.body)}"
            )
        with self._lock:
            count = self._waiting.get(header.recipient, Counter())[header.sender, header.round_digest]
        if count >= MAX_SHARES_WAITING:
            raise ProtocolViolation(
                f"{count} shares of {header.sender!r} for one round lie in the mail of {header.recipient!r} already; "
                "no more are taken until it has read them"
            )

    def sent(self, message: Message) -> None:
        """Count a share that was put into its tallier's mail."""
        header = message.header
        with self._lock:
            self._waiting.setdefault(header.recipient, Counter())[header.sender, header.round_digest] += 1

    def emptied(self, recipient: str) -> None:
        """A party asked for its mail, and there was none: whatever was counted has been read, or is lost."""
        with self._lock:
            self._waiting.pop(recipient, None)
