"""The messages of one party: opened and signed with its keys, numbered and taken once. No network.

What a turn has opened is noted when everything of it had its effect and the answers were accepted; it is written down
with the next transaction of the party, or when nothing else is to be written. Until then it is remembered here, and a
crash in between repeats the messages, which changes nothing: every effect may happen twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labeler.errors import ProtocolViolation, Replayed
from labeler.ledger.database import Connection, Database
from labeler.ledger.sequences import Sequences
from labeler.messages import Kind, Message
from labeler.system.keys import PartyKeys, verify

_Numbers = dict[tuple[str, str], int]


@dataclass(frozen=True, repr=False)
class Draft:
    """A message before it has a number and a signature.

    Attributes:
        body: in clear, or sealed before (labeler.system.keys.seal_body).
        seal_to: the recipient's seal key; None sends the body as it is.
        is_sealed: True where the body was sealed before.
    """

    kind: Kind
    recipient: str
    body: bytes
    task_digest: str = ""
    round_digest: str = ""
    seal_to: str | None = None
    is_sealed: bool = False

    def __repr__(self) -> str:
        return f"Draft(kind={self.kind!r}, recipient={self.recipient!r})"


class PartyMail:
    """See the module. Used by one thread."""

    def __init__(self, party_id: str, keys: PartyKeys, *, database: Database, sequences: Sequences) -> None:
        self.party_id = party_id
        self._keys = keys
        self._database = database
        self._sequences = sequences
        self._opened: _Numbers = {}
        self._taken: _Numbers = {}
        """The highest of each sender that had its effect, once it was looked for: this process alone takes any."""
        self._unwritten: set[tuple[str, str]] = set()
        self._keys_of: dict[Message, str] = {}

    def open(self, message: Message, verify_key: str) -> bytes:
        """Check who signed a message and that it is new, and open its body.

        Args:
            verify_key: the pinned or enrolled key of the sender it names.

        Raises:
            ProtocolViolation: it is for somebody else.
            Forged: signature, digest or seal do not hold.
            Replayed: this or a later message of the sender was taken before.
        """
        self.check_envelope(message, verify_key)
        signed = (message.header.sender, verify_key)
        sequence = message.header.sequence
        if signed not in self._taken:
            self._taken[signed] = self._sequences.last(*signed)
        if sequence <= max(self._opened.get(signed, 0), self._taken[signed]):
            raise Replayed(f"message {sequence} of {message.header.sender!r} is not new: it or a later one was taken")
        self._keys_of[message] = verify_key
        body = self._keys.open(message)
        self._opened[signed] = sequence
        return body

    def check_envelope(self, message: Message, verify_key: str) -> None:
        """Check for whom a message is and who signed it."""
        if message.header.recipient != self.party_id:
            raise ProtocolViolation(f"a message for {message.header.recipient!r} came to {self.party_id!r}")
        verify(message, verify_key)

    def open_sealed(self, message: Message) -> bytes:
        """The body in clear of a message whose envelope was checked and whose number somebody else keeps."""
        return self._keys.open(message)

    def drop(self) -> None:
        """What was opened since the last turn had no effect: it may come again."""
        self._opened.clear()
        self._keys_of.clear()

    def note(self) -> None:
        """Everything opened had its effect, and its answers were taken."""
        self._note(self._opened)
        self.drop()

    def write_noted(self, connection: Connection) -> None:
        """Write down what was noted, in a transaction of the party's journal."""
        for sender, key in self._unwritten:
            self._sequences.taken(sender, self._taken[sender, key], verify_key=key, connection=connection)
        if self._unwritten:
            self._database.after_commit(self._unwritten.clear)

    def settle(self) -> None:
        """Write down what was noted, if anything was, in a transaction of its own."""
        if self._unwritten:
            with self._database.write() as connection:
                self.write_noted(connection)

    def taken(self, messages: Sequence[Message]) -> None:
        """Never take these again; only of messages that `open` has opened. Durable when it returns."""
        for message in messages:
            self._note({(message.header.sender, self._keys_of[message]): message.header.sequence})
        self.settle()

    def _note(self, numbers: _Numbers) -> None:
        for signed, sequence in numbers.items():
            if sequence > self._taken[signed]:
                self._taken[signed] = sequence
                self._unwritten.add(signed)

    def sign(self, draft: Draft) -> Message:
        """A draft with the next number for its recipient, signed."""
        return self._keys.message(
            draft.kind,
            sender=self.party_id,
            recipient=draft.recipient,
            task_digest=draft.task_digest,
            round_digest=draft.round_digest,
            sequence=self._sequences.next(draft.recipient),
            body=draft.body,
            seal_to=draft.seal_to,
            is_sealed=draft.is_sealed,
        )
