"""One letter at a time, for tests of mailboxes."""

from __future__ import annotations

from labeler.driver.mail import Letter, Mailbox


def send(mailbox: Mailbox, recipient: str, data: bytes, *, message_id: str) -> None:
    """Put one message into a party's mail."""
    mailbox.send_all([Letter(recipient, data, message_id)])


def pending(mailbox: Mailbox, recipient: str) -> int:
    """Return how many messages lie in a party's mail."""
    return mailbox.all_pending([recipient])[recipient]
