"""The post office: the coordinator's signed messages to parties, and the keys they are enrolled with."""

from __future__ import annotations

from feature_store.journal.sequences import Sequences
from feature_store.keys import PartyKeys
from feature_store.mailbox import Letter
from labeler.messages import COORDINATOR, Kind, Message, frame


class PostOffice:
    """Signs what the coordinator says."""

    def __init__(self, *, keys: PartyKeys, sequences: Sequences) -> None:
        self._keys = keys
        self._sequences = sequences

    def letter(self, kind: Kind, recipient: str, body: bytes, *, task_digest: str, round_digest: str = "") -> Letter:
        """One message, ready for its recipient's mail."""
        return letter_of(self.sign(kind, recipient, body, task_digest=task_digest, round_digest=round_digest))

    def sign(
        self, kind: Kind, recipient: str, body: bytes, *, task_digest: str = "", round_digest: str = ""
    ) -> Message:
        """A message of the coordinator, with the next sequence number for its recipient."""
        return self._keys.message(
            kind,
            sender=COORDINATOR,
            recipient=recipient,
            task_digest=task_digest,
            round_digest=round_digest,
            sequence=self._sequences.next(recipient),
            body=body,
        )


def letter_of(message: Message) -> Letter:
    """A signed message as the mailbox takes it."""
    return Letter(message.header.recipient, frame([message]), message.message_id)
