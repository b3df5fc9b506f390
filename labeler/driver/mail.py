"""What a mailbox is: messages in transit, signs of life, and progress for people.

**Nothing in it is the truth.** A mailbox may lose all it holds at any time: the journal (SQL) says what is missing, and
whoever misses something asks again. In return nothing here waits for a disk. So every call works on an empty mailbox,
a message may come twice, and each may be lost; never is one changed or made up.

Positions are "TIME-NUMBER", milliseconds and a count, and grow with every entry. A reader that comes with a position
later than anything in its mail has read an earlier mailbox (it was emptied, or its clock was set back) and gets all
there is.

Two twins keep this: `labeler.driver.mail_redis` among processes, `labeler.driver.mail_memory` inside one. One suite
(tests/labeler/driver/test_conformance.py) binds both. Whoever needs a mailbox names `Mailbox` of this
module, and only what wires a process names a twin.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from labeler.errors import InvalidSetting, TooLarge
from labeler.messages import MAX_MESSAGE_BYTES
from labeler.untrusted import check_party_id, check_text

MAX_MAIL = 10_000
"""About how many messages lie in one party's mail; older ones go."""

MAX_EVENTS = 1_000
"""About how many events of a job are kept."""

MAIL_UNUSED_S = 7 * 86_400
MAIL_SEEN_S = 86_400
PROGRESS_UNUSED_S = 86_400
MAX_WAIT_S = 30.0

CHANGED: Mapping[str, Any] = {"changed": True}
"""The event of a job that has changed: whoever watches looks for itself what."""

ENDED: Mapping[str, Any] = {"changed": True, "ended": True}
"""The event of a job that has changed and does not change any more: who watches looks at once."""

MAX_MAIL_BYTES = MAX_MESSAGE_BYTES
"""Of the messages that one call hands out, unless the first alone is larger."""

_LARGEST_POSITION = 2**64 - 2


@dataclass(frozen=True)
class Letter:
    """One message for one party's mail, as `Mailbox.send` takes it.

    Attributes:
        data: frames (labeler.messages).
        message_id: `Message.message_id`, SENDER:SEQUENCE.
    """

    recipient: str
    data: bytes
    message_id: str


class Mailbox(Protocol):
    """A process's way to the mail; see the module.

    Calls that wait for people and parties are coroutines of one event loop; all others may be called from any thread
    and return at once. A call that cannot reach the mailbox raises `Unavailable` within seconds, and
    the next one tries anew.
    """

    def check(self) -> None:
        """Make sure that the mailbox answers and throws nothing away by itself.

        Raises:
            Unavailable: it does not answer.
            UnsafeStorage: it is of a kind that drops what it holds without a word.
        """

    def send_all(self, letters: Sequence[Letter], *, tell: Collection[str] = (), ended: Collection[str] = ()) -> None:
        """Put messages into the mail of parties, in order, and tell whoever watches some jobs that they have changed.

        A message is put in once: the same id again soon changes nothing. Soon is a day in Redis; memory knows the last
        few thousand messages of it.

        Args:
            tell: jobs that have changed.
            ended: those of them that have ended.

        Raises:
            TooLarge: one has more bytes than a message may have; none was sent.
            Unavailable: it does not answer, or is full; some of them may have been sent.
        """

    async def receive(
        self,
        recipient: str,
        after: str,
        wait_s: float,
        max_messages: int = 16,
        *,
        max_bytes: int = MAX_MAIL_BYTES,
    ) -> list[tuple[str, bytes]]:
        """The mail after a position, oldest first; waits for it. What lies at or before the position is dropped.

        Args:
            after: position of the last message it took, empty for none.
            wait_s: how long to wait while there is none, 0 to 30.
            max_messages: most that are returned.
            max_bytes: of all messages together; one that is larger comes alone, so that no more than this is ever
                in this process on the way to one reader.

        Returns:
            (position, data) of each message; empty if none came.

        Raises:
            Unavailable: it does not answer.
        """

    def all_pending(self, recipients: Collection[str]) -> dict[str, int]:
        """How many messages lie in the mail of parties, by party, those included that they took and did not confirm."""

    def show_life(self, role: str, *, for_s: float) -> None:
        """Say that a process of a role is there; counts for so many seconds."""

    def is_alive(self, role: str) -> bool:
        """Whether any process of a role was there lately."""

    def publish(self, job_id: str, event: Mapping[str, Any]) -> None:
        """Tell whoever watches a job; nothing private may be in it."""

    async def watch(
        self, job_id: str, after: str, wait_s: float, max_events: int = 100
    ) -> list[tuple[str, dict[str, Any]]]:
        """The events of a job after a position, oldest first; waits for them, 0 to 30 seconds."""

    def close(self) -> None:
        """Close what the calls that return at once have opened."""

    async def aclose(self) -> None:
        """Close everything; to be awaited in the event loop in which mail was received."""


def check_mail(recipient: str, data: bytes, message_id: str) -> None:
    """Refuse mail that no twin takes.

    Raises:
        ProtocolViolation: no such recipient or message id.
        TooLarge: more bytes than a message may have.
    """
    check_party_id(recipient, "recipient of mail")
    check_text(message_id, "message_id of mail", most=300)
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"mail has at most {MAX_MESSAGE_BYTES} bytes, found {len(data)}")


def check_wait(wait_s: float) -> None:
    """Refuse to wait without end.

    Raises:
        InvalidSetting: less than no time, or longer than `MAX_WAIT_S`.
    """
    if math.isnan(wait_s) or not 0 <= wait_s <= MAX_WAIT_S:
        raise InvalidSetting(f"wait_s must lie between 0 and {MAX_WAIT_S:g} seconds, found {wait_s:g}")


def parse_position(position: str) -> tuple[int, int]:
    """(milliseconds, number) of a position; empty is before everything.

    Raises:
        InvalidSetting: it is none.
    """
    milliseconds, _, number = (position or "0-0").partition("-")
    if not (
        milliseconds.isascii() and milliseconds.isdigit() and (not number or (number.isascii() and number.isdigit()))
    ):
        raise InvalidSetting("a position must be empty or one that came with a message, TIME-NUMBER")
    return min(int(milliseconds), _LARGEST_POSITION), min(int(number or 0), _LARGEST_POSITION)


def format_position(position: tuple[int, int]) -> str:
    """The text of a position."""
    return f"{position[0]}-{position[1]}"
