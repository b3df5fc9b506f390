"""The signed envelope of messages between parties. A message has a header, a signature and a body, in one frame.

    frame     4 bytes header length | 8 bytes body length | header | 64 bytes signature | body     (big-endian)
    header    one canonical JSON object: sender, recipient, task, round, number, SHA-256 of the body
    signature Ed25519 by the sender over "labeler-message/1\\n" and the header (labeler.system.keys)

The header binds the body by its digest. So the signature covers the whole message, and a relay can still route,
count and refuse by the header alone. A header has exactly one spelling, and any other is refused. So two parties can
never read different things out of the same signed bytes.

Nothing here is trusted yet. `read_frames` checks that bytes have the form of messages. `labeler.system.keys.verify`
checks the sender, and the receiver's journal checks that the number is new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Literal, get_args

from pydantic import Field

from labeler.errors import ProtocolViolation, TooLarge
from labeler.untrusted import (
    Digest,
    DigestIfAny,
    Flag,
    PartyId,
    canonical_json,
    read_object,
    strict,
    whole,
)

Kind = Literal[
    "poll",
    "open-round",
    "ask",
    "input-share",
    "answered",
    "refused",
    "holdings",
    "sum",
    "aggregate-share",
    "winner",
    "proposal",
    "willing",
    "declined",
    "withdrawn",
]

COORDINATOR = "coordinator"
"""The party id of the coordinator."""

SEALED_KINDS: frozenset[Kind] = frozenset({"input-share", "aggregate-share", "winner"})
"""Kinds whose body is a secret share, or an answer that only the coordinator opens. An unsealed message of such a kind
is refused."""

VERSION = "labeler-message/1"

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest frame of one message, header and signature included."""

MAX_HEADER_BYTES = 8192
"""Largest header. Two ids of 200 characters take at most 2 * 200 * 12 bytes of JSON, and other fields a few hundred."""

SIGNATURE_BYTES = 64
MAX_SEQUENCE = 2**62

_LENGTHS = (4, 8)
FRAME_HEAD_BYTES = sum(_LENGTHS)
"""Size of the two lengths at the start of a frame."""


@strict("a message")
class Header:
    """The header of a message; the sender signs its canonical bytes.

    Attributes:
        sender: party id, 1 to 200 printable characters.
        recipient: party id.
        task_digest: SHA-256 of the task in hexadecimal, or empty if the message concerns no task.
        round_digest: SHA-256 of the round, or empty.
        sequence: number of the message among all from its sender, 1 to 2^62; a receiver accepts each number once.
        body_digest: SHA-256 of the body as sent, so of the sealed body if it is sealed.
        is_sealed: True if the body is sealed to the recipient.

    Raises:
        ProtocolViolation: a field is outside its bounds, or a secret share is not sealed.
    """

    kind: Annotated[Kind, Field(description=f"one of {', '.join(sorted(get_args(Kind)))}")]
    sender: PartyId
    recipient: PartyId
    task_digest: DigestIfAny
    round_digest: DigestIfAny
    sequence: Annotated[int, whole(1, MAX_SEQUENCE)]
    body_digest: Digest
    is_sealed: Flag

    def __post_init__(self) -> None:
        if self.kind in SEALED_KINDS and not self.is_sealed:
            raise ProtocolViolation(
                f"a message of kind {self.kind!r} is for its recipient's eyes only and must be sealed to it; "
                "seal it to the recipient's enrolled key"
            )

    def to_bytes(self) -> bytes:
        """Return the one spelling of this header: JSON, keys sorted, no spaces, ASCII, at most 8192 bytes."""
        return canonical_json({name: getattr(self, name) for name in _FIELDS} | {"version": VERSION})

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Read a header, refusing anything that `to_bytes` would not have written.

        Raises:
            TooLarge: more than 8192 bytes.
            ProtocolViolation: not canonical JSON of exactly the fields above, of exactly their types.
        """
        if len(data) > MAX_HEADER_BYTES:
            raise TooLarge(f"a header has at most {MAX_HEADER_BYTES} bytes, found {len(data)}")
        header = cls(**read_object(data, "a header", fields=_FIELDS, version=VERSION))
        if header.to_bytes() != data:
            raise ProtocolViolation("a header must be in canonical form (keys sorted, no spaces, ASCII, no key twice)")
        return header


_FIELDS = tuple(field.name for field in fields(Header))


@dataclass(frozen=True, eq=False, repr=False)
class Message:
    """One message in transit; only its form is checked.

    Attributes:
        signature: 64 bytes, Ed25519 over the header.
        body: the bytes whose SHA-256 the header names; sealed or plain.

    Raises:
        ProtocolViolation: the signature does not have 64 bytes.
        TooLarge: the message would not fit into a frame.
    """

    header: Header
    signature: bytes
    body: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.signature, bytes) or len(self.signature) != SIGNATURE_BYTES:
            raise ProtocolViolation(f"the signature of a message has {SIGNATURE_BYTES} bytes")
        if not isinstance(self.body, bytes):
            raise ProtocolViolation("the body of a message must be bytes")
        size = FRAME_HEAD_BYTES + len(self.header.to_bytes()) + SIGNATURE_BYTES + len(self.body)
        if size > MAX_MESSAGE_BYTES:
            raise TooLarge(f"a message has at most {MAX_MESSAGE_BYTES} bytes, found {size}; ask fewer queries at once")

    @cached_property
    def is_whole(self) -> bool:
        """Return whether the body has the digest in the header; computed once."""
        return hashlib.sha256(self.body).hexdigest() == self.header.body_digest

    @property
    def message_id(self) -> str:
        """Return SENDER:SEQUENCE, the same for a message sent twice and different for any other."""
        return f"{self.header.sender}:{self.header.sequence}"

    def __repr__(self) -> str:
        header = self.header
        return (
            f"Message(kind={header.kind!r}, sender={header.sender!r}, recipient={header.recipient!r}, "
            f"sequence={header.sequence}, header_bytes={len(header.to_bytes())}, body_bytes={len(self.body)})"
        )


def frame(messages: Iterable[Message]) -> bytes:
    """Write messages one after the other, as `read_frames` reads them."""
    parts = []
    for message in messages:
        header = message.header.to_bytes()
        lengths = [
            count.to_bytes(width, "big")
            for count, width in zip((len(header), len(message.body)), _LENGTHS, strict=True)
        ]
        parts += [*lengths, header, message.signature, message.body]
    return b"".join(parts)


def frame_sizes(head: bytes) -> tuple[int, int]:
    """Return the sizes stated by the first `FRAME_HEAD_BYTES` of a frame: bytes of its header and of its body.

    Raises:
        ProtocolViolation: there are fewer or more bytes.
        TooLarge: the header or the frame is beyond its limit.
    """
    if len(head) != FRAME_HEAD_BYTES:
        raise ProtocolViolation(f"a message begins with {FRAME_HEAD_BYTES} bytes of lengths, found {len(head)}")
    header_length = int.from_bytes(head[: _LENGTHS[0]], "big")
    body_length = int.from_bytes(head[_LENGTHS[0] :], "big")
    size = FRAME_HEAD_BYTES + header_length + SIGNATURE_BYTES + body_length
    if header_length > MAX_HEADER_BYTES or size > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"a message states a header of {header_length} and a body of {body_length} bytes; the limits are "
            f"{MAX_HEADER_BYTES} and {MAX_MESSAGE_BYTES} for all of it"
        )
    return header_length, body_length


def read_frames(data: bytes, *, max_messages: int) -> list[Message]:
    """Read the messages of one transmission: all of them well-formed, or none.

    A stated length is compared with the available bytes before anything is copied. So no input makes this
    take more memory than a few times the input itself.

    Args:
        data: frames, one after the other; empty for no message.
        max_messages: most messages accepted.

    Raises:
        TooLarge: there are more messages than accepted, or one is larger than `MAX_MESSAGE_BYTES`.
        ProtocolViolation: the bytes are cut off or are not messages.
    """
    messages: list[Message] = []
    start = 0
    while start < len(data):
        if len(messages) == max_messages:
            raise TooLarge(f"one transmission holds at most {max_messages} messages; send the rest in another")
        header_start = start + FRAME_HEAD_BYTES
        end = len(data) + 1
        if header_start <= len(data):
            header_length, body_length = frame_sizes(data[start:header_start])
            signature_start = header_start + header_length
            body_start = signature_start + SIGNATURE_BYTES
            end = body_start + body_length
        if end > len(data):
            raise ProtocolViolation(
                f"message {len(messages)} of a transmission is cut off: {len(data) - start} bytes are left of it"
            )
        header = Header.parse(data[header_start:signature_start])
        messages.append(Message(header, data[signature_start:body_start], data[body_start:end]))
        start = end
    return messages
