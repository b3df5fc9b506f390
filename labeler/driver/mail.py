"""What a mailbox is: messages in transit, work with leases, and progress for people.

**Nothing in it is the truth.** A mailbox may lose all it holds at any time: the journal (SQL) says what is missing, and
whoever misses something asks again. In return nothing here waits for a disk. So every call works on an empty mailbox,
a message or a piece of work may come twice, and each may be lost; never is one changed or made up.

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
class Work:
    """A piece of work this consumer holds until its lease runs out.

    Attributes:
        work_id: what to do; the rest is in the journal.
        entry: its place in the queue.
        consumer: who holds it.
        attempt: how often it was handed out, from 1. A high number says that it kills its workers.
    """

    queue: str
    work_id: str
    entry: str
    consumer: str
    attempt: int


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

    Calls that wait for people and parties are coroutines of one event loop; all others may be called from any thread,
    and all but `claim` return at once. A call that cannot reach the mailbox raises `Unavailable` within seconds, and
    the next one tries anew.
    """

    def check(self) -> None:
        """Make sure that the mailbox answers and throws nothing away by itself.

        Raises:
            Unavailable: it does not answer.
            UnsafeStorage: it is of a kind that drops what it holds without a word.
        """

    def send(self, recipient: str, data: bytes, *, message_id: str) -> None:
        """Put a message into a party's mail, once: the same id again soon changes nothing.

        Soon is a day in Redis; memory knows the last few thousand messages of it.

        Args:
            data: frames (labeler.messages).
            message_id: `Message.message_id`, SENDER:SEQUENCE.

        Raises:
            TooLarge: more bytes than a message may have.
            Unavailable: it does not answer, or is full.
        """

    def send_all(self, letters: Sequence[Letter], *, tell: Collection[str] = (), ended: Collection[str] = ()) -> None:
        """Put messages into the mail of parties, in order, and tell whoever watches some jobs that they have changed.

        As many calls of `send` and `publish`, at the cost of about one.

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

    def pending(self, recipient: str) -> int:
        """How many messages lie in a party's mail, those included that it took and has not confirmed."""

    def all_pending(self, recipients: Collection[str]) -> dict[str, int]:
        """`pending` of several parties at once, by party."""

    def add_work(self, queue: str, work_id: str) -> None:
        """Ask for a piece of work; while it is not done, asking again changes nothing."""

    def claim(self, queue: str, consumer: str, *, lease_s: float, wait_s: float) -> Work | None:
        """Take a piece of work, at first one whose lease has run out; wait for one if there is none.

        Args:
            consumer: a name no other process has.
            lease_s: a piece of work nobody gave a sign of life for this long is taken over. All consumers of a
                queue state the same, several times as long as they take between two heartbeats.
            wait_s: how long to wait.

        Returns:
            The work, or None if none came. It may have been done before, once or in part.

        Raises:
            Unavailable: it does not answer.
        """

    def heartbeat(self, work: Work) -> None:
        """Say that the work goes on; its lease begins anew.

        Raises:
            NotReady: it is no longer held: taken over, done by another, or forgotten. The result is welcome all the
                same, for the same work has the same result.
            Unavailable: it does not answer.
        """

    def done(self, work: Work) -> None:
        """Take work off the queue, after its result is durable."""

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


def check_work(queue: str, work_id: str) -> None:
    """Refuse work that no twin takes.

    Raises:
        ProtocolViolation: no such queue or work.
    """
    check_text(queue, "name of a queue", most=100)
    check_text(work_id, "work_id", most=300)


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
