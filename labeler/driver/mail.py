"""The mailbox protocol: messages in transit, liveness of processes, and progress for people.

**Nothing in it is the truth.** A mailbox may lose all it holds at any time: the journal (SQL) says what is missing, and
a party that misses something asks again. In return nothing here waits for a disk. So every call works on an empty
mailbox. A message may come twice or be lost; it is never changed or made up.

Positions are "TIME-NUMBER", milliseconds and a count, and grow with every entry. A reader with a position later than
anything in its mail has read an earlier mailbox (it was emptied, or its clock was set back) and gets everything there
is.

Two implementations follow this: `labeler.driver.mail_redis` between processes, `labeler.driver.mail_memory` inside one.
One suite (tests/labeler/driver/test_conformance.py) tests both. Users of a mailbox import `Mailbox` from this module;
only code that wires a process names an implementation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from labeler.errors import InvalidSetting, TooLarge
from labeler.messages import MAX_MESSAGE_BYTES
from labeler.untrusted import check_party_id, check_text

MAX_MAIL = 10_000
"""Approximate limit of messages in one party's mail; older ones are dropped."""

MAX_EVENTS = 1_000
"""Approximate limit of stored changes of a job."""

EVENTS_AT_ONCE = 100
"""Most changes that one call returns."""

MAIL_UNUSED_S = 7 * 86_400
MAIL_SEEN_S = 86_400
PROGRESS_UNUSED_S = 86_400
MAX_WAIT_S = 30.0

CHANGED, ENDED = b"changed", b"ended"
"""The entries of a job that has changed, and of one that has changed for the last time."""

MAX_MAIL_BYTES = MAX_MESSAGE_BYTES
"""Most bytes of messages that one call returns, unless the first alone is larger."""

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
    """A process's access to the mail; see the module.

    Calls that wait for people and parties are coroutines of one event loop. All others may be called from any thread
    and return at once. A call that cannot reach the mailbox raises `Unavailable` within seconds, and the next call
    tries again.
    """

    def check(self) -> None:
        """Make sure that the mailbox answers and never drops entries on its own.

        Raises:
            Unavailable: it does not answer.
            UnsafeStorage: its configuration drops entries silently.
        """

    def send_all(self, letters: Sequence[Letter], *, tell: Collection[str] = (), ended: Collection[str] = ()) -> None:
        """Put messages into the mail of parties, in order, and notify watchers of some jobs that they have changed.

        A message is put in once: the same id again soon changes nothing. Soon is a day in Redis; memory knows the last
        few thousand messages.

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
        """Return the mail after a position, oldest first; wait for it. Drop what lies at or before the position.

        Args:
            after: position of the last message the reader took, empty for none.
            wait_s: how long to wait while there is none, 0 to 30.
            max_messages: most that are returned.
            max_bytes: of all messages together; a larger message comes alone. So this process never holds more for one
                reader.

        Returns:
            (position, data) of each message; empty if none came.

        Raises:
            Unavailable: it does not answer.
        """

    def all_pending(self, recipients: Collection[str]) -> dict[str, int]:
        """Return the number of messages in the mail, by party, including those taken and not yet confirmed."""

    def show_life(self, role: str, *, for_s: float) -> None:
        """Report that a process of a role is running; valid for this many seconds."""

    def is_alive(self, role: str) -> bool:
        """Return whether any process of a role was running lately."""

    async def watch(self, job_id: str, after: str, wait_s: float) -> list[tuple[str, bool]]:
        """Return the changes of a job after a position, oldest first; wait for them, 0 to 30 seconds.

        Returns:
            (position, whether the job has ended with it) of each; watchers look up what changed.
        """

    def close(self) -> None:
        """Close what the non-waiting calls have opened."""

    async def aclose(self) -> None:
        """Close everything; await it in the event loop in which mail was received."""


def check_mail(recipient: str, data: bytes, message_id: str) -> None:
    """Refuse mail that no implementation accepts.

    Raises:
        ProtocolViolation: invalid recipient or message id.
        TooLarge: more bytes than a message may have.
    """
    check_party_id(recipient, "recipient of mail")
    check_text(message_id, "message_id of mail", most=300)
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"mail has at most {MAX_MESSAGE_BYTES} bytes, found {len(data)}")


def check_wait(wait_s: float) -> None:
    """Refuse an unlimited wait.

    Raises:
        InvalidSetting: a negative time, or longer than `MAX_WAIT_S`.
    """
    if math.isnan(wait_s) or not 0 <= wait_s <= MAX_WAIT_S:
        raise InvalidSetting(f"wait_s must lie between 0 and {MAX_WAIT_S:g} seconds, found {wait_s:g}")


def parse_position(position: str) -> tuple[int, int]:
    """Return (milliseconds, number) of a position; empty is before everything.

    Raises:
        InvalidSetting: it is not a position.
    """
    milliseconds, _, number = (position or "0-0").partition("-")
    if not (
        milliseconds.isascii() and milliseconds.isdigit() and (not number or (number.isascii() and number.isdigit()))
    ):
        raise InvalidSetting("a position must be empty or one that came with a message, TIME-NUMBER")
    return min(int(milliseconds), _LARGEST_POSITION), min(int(number or 0), _LARGEST_POSITION)


def format_position(position: tuple[int, int]) -> str:
    """Return the text of a position."""
    return f"{position[0]}-{position[1]}"
