"""A signed envelope, how bodies are written into it, and how mail is polled.

More than 400 lines: one format, from bytes to polls, and its refusals.

Messages between parties: a signed header, a signature, a body, and frames to carry several of them.

    frame     4 bytes header length | 8 bytes body length | header | 64 bytes signature | body     (big-endian)
    header    one canonical JSON object: who to whom, of which task and round, which number, SHA-256 of the body
    signature Ed25519 by the sender over "labeler-message/1\\n" and the header (labeler.system.keys)

The header binds the body by its digest, so the signature covers all of a message while a relay can route,
count and refuse by the header alone. A header has exactly one spelling: one that would be written differently
is refused, so two parties can never read different things out of the same signed bytes.

Nothing here is believed yet. `read_frames` says that bytes have the form of messages; who sent them is
checked with `labeler.system.keys.verify`, and whether the number was seen before by the receiver's journal.

How the body of a message is written: one JSON object, or one JSON object, a line feed and safetensors arrays.

    body = {"version":"labeler-share/1", ...}                       words and numbers
    body = {"version":"labeler-share/1", ...} | line feed | arrays  where arrays belong to them

Sizes are bounded before anything is read: parsed JSON takes many times the memory of its text. Arrays are
taken only if they are those that were expected, of exactly their types. Nothing here can run code (no pickle).

How a party fetches its mail: it says where it stands, and is told where the coordinator stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SkipValidation
from safetensors import SafetensorError
from safetensors.numpy import load, save

from labeler.errors import ProtocolViolation, TooLarge
from labeler.untrusted import (
    Digest,
    DigestIfAny,
    Flag,
    PartyId,
    Printable,
    canonical_json,
    check_mapping,
    names_of,
    read_object,
    spelt,
    strict,
    text,
    tuples_of,
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
"""Kinds whose body is a secret share, or an answer that the coordinator alone opens: a message of one of them that
is not sealed is refused."""

VERSION = "labeler-message/1"

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest frame of one message, header and signature included."""

MAX_HEADER_BYTES = 8192
"""Two ids of 200 characters take at most 2 * 200 * 12 bytes of JSON; the other fields a few hundred."""

SIGNATURE_BYTES = 64
MAX_SEQUENCE = 2**62

_LENGTHS = (4, 8)
FRAME_HEAD_BYTES = sum(_LENGTHS)
"""The two lengths that a frame begins with."""


@strict("a message")
class Header:
    """What a message says about itself; its canonical bytes are what the sender signs.

    Attributes:
        sender: party id, 1 to 200 printable characters.
        recipient: party id.
        task_digest: SHA-256 of the task in hexadecimal, or empty where the message is of no task.
        round_digest: SHA-256 of the round, or empty.
        sequence: number of the message among all of its sender, 1 to 2^62; a receiver takes each once.
        body_digest: SHA-256 of the body as sent, that is of the sealed body where it is sealed.
        is_sealed: True where the body is sealed to the recipient.

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
        """The one spelling of this header: JSON, keys sorted, no spaces, ASCII, at most 8192 bytes."""
        return self._spelling

    @cached_property
    def _spelling(self) -> bytes:
        # Wanted by who signs, who checks, who measures and who frames it.
        return canonical_json({name: getattr(self, name) for name in names_of(Header)} | {"version": VERSION})

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Read a header, refusing anything that `to_bytes` would not have written.

        The same bytes are read where they arrive and where they are taken; those read lately are not read again.

        Raises:
            TooLarge: more than 8192 bytes.
            ProtocolViolation: not canonical JSON of exactly the fields above, of exactly their types.
        """
        if len(data) > MAX_HEADER_BYTES:
            raise TooLarge(f"a header has at most {MAX_HEADER_BYTES} bytes, found {len(data)}")
        return _read_header(data)


@lru_cache(maxsize=128)
def _read_header(data: bytes) -> Header:
    content = read_object(data, "a header", fields=names_of(Header), version=VERSION)
    header = Header(**content)
    if header.to_bytes() != data:
        raise ProtocolViolation("a header must be in canonical form (keys sorted, no spaces, ASCII, no key twice)")
    return header


@dataclass(frozen=True, eq=False, repr=False)
class Message:
    """One message as it travels: nothing about it is checked but its form.

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
        """Whether the body is the one whose digest the header names; looked at once, wherever it is asked."""
        return hashlib.sha256(self.body).hexdigest() == self.header.body_digest

    @property
    def message_id(self) -> str:
        """SENDER:SEQUENCE, the same for a message sent twice and different for any other."""
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
    """What the first `FRAME_HEAD_BYTES` of a frame state: bytes of its header and of its body.

    Raises:
        ProtocolViolation: fewer bytes.
        TooLarge: a header or a frame beyond what is taken.
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

    A stated length is compared with what is there before anything is copied, so no input makes this
    take more memory than a few times the input itself.

    Args:
        data: frames, one after the other; empty for no message.
        max_messages: most messages taken.

    Raises:
        TooLarge: more messages than taken, or one that is larger than `MAX_MESSAGE_BYTES`.
        ProtocolViolation: the bytes are cut off or are no messages.
    """
    messages: list[Message] = []
    start = 0
    while start < len(data):
        if len(messages) == max_messages:
            raise TooLarge(f"one transmission holds at most {max_messages} messages; send the rest in another")
        header_start = start + FRAME_HEAD_BYTES
        header_length = int.from_bytes(data[start : start + _LENGTHS[0]], "big")
        body_length = int.from_bytes(data[start + _LENGTHS[0] : header_start], "big")
        signature_start = header_start + header_length
        body_start = signature_start + SIGNATURE_BYTES
        end = body_start + body_length
        if header_length > MAX_HEADER_BYTES or end - start > MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"message {len(messages)} of a transmission states a header of {header_length} and a body of "
                f"{body_length} bytes; the limits are {MAX_HEADER_BYTES} and {MAX_MESSAGE_BYTES} for all of it"
            )
        if header_start > len(data) or end > len(data):
            raise ProtocolViolation(
                f"message {len(messages)} of a transmission is cut off: {len(data) - start} bytes are left of it"
            )
        header = Header.parse(data[header_start:signature_start])
        messages.append(Message(header, data[signature_start:body_start], data[body_start:end]))
        start = end
    return messages


MAX_JSON_BYTES = 8 * 1024 * 1024
"""Largest JSON part of a body."""


def write_json(content: Mapping[str, Any]) -> bytes:
    """A body without an array.

    Raises:
        TooLarge: more than 8 MiB.
    """
    data = canonical_json(content)
    if len(data) > MAX_JSON_BYTES:
        raise TooLarge(
            f"the JSON of a body has at most {MAX_JSON_BYTES} bytes, found {len(data)}; ask for less at once"
        )
    return data


def write_with_array(content: Mapping[str, Any], name: str, array: NDArray[Any]) -> bytes:
    """A body with one array."""
    return write_with_arrays(content, {name: array})


def write_with_arrays(content: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """A body with arrays, each under its name."""
    return write_json(content) + b"\n" + save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def read_json(
    data: bytes, what: str, names: Collection[str], version: str, *, optional: Collection[str] = ()
) -> dict[str, Any]:
    """Read a body without an array.

    Args:
        data: the body.
        what: what it is, for the error: "a share".
        names: the fields it must have, no more and no fewer.
        version: what its field "version" must say.
        optional: fields it may have besides.

    Raises:
        TooLarge: more than 8 MiB.
        ProtocolViolation: not such JSON.
    """
    if len(data) > MAX_JSON_BYTES:
        raise TooLarge(f"the JSON of {what} has at most {MAX_JSON_BYTES} bytes, found {len(data)}")
    return read_object(data, what, fields=names, version=version, optional=optional)


def read_with_array(
    data: bytes,
    what: str,
    names: Collection[str],
    version: str,
    dtypes: Mapping[str, type[np.generic]],
    *,
    most_bytes: int = MAX_MESSAGE_BYTES,
) -> tuple[dict[str, Any], str, NDArray[Any]]:
    """Read a body with one array.

    Args:
        data, what, names, version: as for `read_json`.
        dtypes: the arrays that are expected, with their types; exactly one of them must be there.
        most_bytes: see `read_with_arrays`.

    Returns:
        The fields, the name of the array, and the array. Its shape is for the caller to check.

    Raises:
        TooLarge: larger than a message may be.
        ProtocolViolation: malformed, or another array.
    """
    choices = [{name: dtype} for name, dtype in dtypes.items()]
    content, arrays = read_with_arrays(data, what, names, version, choices, most_bytes=most_bytes)
    ((name, array),) = arrays.items()
    return content, name, array


def read_with_arrays(
    data: bytes,
    what: str,
    names: Collection[str],
    version: str,
    choices: Sequence[Mapping[str, type[np.generic]]],
    *,
    most_bytes: int = MAX_MESSAGE_BYTES,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read a body with arrays.

    Args:
        data, what, names, version: as for `read_json`.
        choices: sets of arrays, with their types; exactly those of one set must be there.
        most_bytes: largest body taken; more than a message may have only for one that never travelled.

    Returns:
        The fields, and the arrays by name. Their shapes are for the caller to check.

    Raises:
        TooLarge: larger than a message may be.
        ProtocolViolation: malformed, or other arrays.
    """
    if len(data) > most_bytes:
        raise TooLarge(f"{what} has at most {most_bytes} bytes, found {len(data)}")
    end = data.find(b"\n", 0, MAX_JSON_BYTES + 1)
    if end < 0:
        raise ProtocolViolation(f"{what} must begin with one line of JSON, at most {MAX_JSON_BYTES} bytes long")
    content = read_json(data[:end], what, names, version)
    try:
        arrays = load(data[end + 1 :])
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError):
        raise ProtocolViolation(f"the array of {what} is not in safetensors format, or of an unknown type") from None
    expected = next((choice for choice in choices if choice.keys() == arrays.keys()), None)
    if expected is None:
        named = " or ".join(" and ".join(map(repr, choice)) for choice in choices)
        many = "exactly one array" if all(len(choice) == 1 for choice in choices) else "exactly the arrays"
        raise ProtocolViolation(f"{what} must hold {many}, {named}; found {len(arrays)}, or another")
    for name, array in arrays.items():
        if array.dtype != expected[name]:
            raise ProtocolViolation(f"{name} of {what} must be {np.dtype(expected[name])}, found {array.dtype}")
    return content, arrays


class Body:
    """A model that travels as one JSON object; `version` says how it is written."""

    version: ClassVar[str]
    what: ClassVar[str]

    def content(self) -> dict[str, Any]:
        """Its fields, as JSON knows them."""
        return {name: getattr(self, name) for name in names_of(type(self))}

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        return write_json(self.content() | {"version": self.version})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read such a body.

        Raises:
            ProtocolViolation: malformed, or see the class.
            TooLarge: larger than is taken.
        """
        return cls(**as_fields(cls, read_json(data, cls.what, names_of(cls), cls.version)))


def as_fields(model: type[Any], content: dict[str, Any]) -> dict[str, Any]:
    """Content of JSON as a model takes it: a list where it has a tuple."""
    for name in tuples_of(model):
        if isinstance(content[name], list):
            content[name] = tuple(content[name])
    return content


MAX_WAIT_S = 30.0

Position = Annotated[str, spelt("|[0-9]{1,20}(-[0-9]{1,20})?", "empty or a position that came with a message")]


@strict("a poll")
class Poll:
    """Body of "poll": a party asks for its mail and says where it stands.

    Attributes:
        after: position of the last message it took, empty for none.
        wait_s: how long the coordinator may hold the request while there is no mail, 0 to 30.
        journal_seq: the head of the party's own journal; 0 and an empty hash while it has none.
        journal_hash: as above.
        coordinator_seq: the highest head of the coordinator's journal this party has seen, so that a
            coordinator restored from an old copy is found out; 0 and an empty hash for none.
        coordinator_hash: as above.
        version: of the program, for people.
        facts: what the coordinator needs to know of it (an agent: backbone_fingerprint, dimension, classes). Never a
            number of records.
    """

    format: ClassVar[str] = "labeler-poll/1"
    what: ClassVar[str]

    after: Position
    wait_s: Annotated[float | int, Field(ge=0, le=MAX_WAIT_S, description=f"between 0 and {MAX_WAIT_S:g} seconds")]
    journal_seq: Annotated[int, whole(0)]
    journal_hash: DigestIfAny
    coordinator_seq: Annotated[int, whole(0)]
    coordinator_hash: DigestIfAny
    version: Annotated[str, text(100), Printable]
    facts: SkipValidation[Mapping[str, Any]]

    def __post_init__(self) -> None:
        _check_head(self.journal_seq, self.journal_hash, "journal", "a poll")
        _check_head(self.coordinator_seq, self.coordinator_hash, "coordinator", "a poll")
        try:
            canonical_json(check_mapping(self.facts, "facts of a poll"))
        except (ValueError, TypeError, RecursionError):
            raise ProtocolViolation("facts of a poll must be JSON with finite numbers") from None
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))

    def encode(self) -> bytes:
        """The body; `decode` gives it back."""
        content = {name: getattr(self, name) for name in names_of(Poll)}
        return write_json(content | {"facts": dict(self.facts), "program": self.version, "version": self.format})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a body of "poll"."""
        content = read_json(data, cls.what, _POLL_NAMES, cls.format)
        return cls(version=content.pop("program"), **content)


_POLL_NAMES = ("program", *(name for name in names_of(Poll) if name != "version"))


@strict("an answer to a poll")
class Mail(Body):
    """Body of the coordinator's own "poll", the first message of every answer to a poll.

    Attributes:
        after: position to send as `Poll.after` once everything in the answer was handled.
        coordinator_seq: head of the coordinator's journal; a party that has seen a higher one knows that the
            coordinator lost entries.
        coordinator_hash: as above; empty for 0.
        journal_seq: the head of the party's own journal that came with its last answer: a journal that does not hold it
            is an older copy, and takes no part. 0 and an empty hash for none.
        journal_hash: as above.
    """

    version: ClassVar[str] = "labeler-mail/1"

    after: Position
    coordinator_seq: Annotated[int, whole(0)]
    coordinator_hash: DigestIfAny
    journal_seq: Annotated[int, whole(0)] = 0
    journal_hash: DigestIfAny = ""

    def __post_init__(self) -> None:
        _check_head(self.coordinator_seq, self.coordinator_hash, "coordinator", "an answer")
        _check_head(self.journal_seq, self.journal_hash, "journal", "an answer")


def _check_head(seq: int, digest: str, journal: str, what: str) -> None:
    """An empty hash belongs to an empty journal, and to no other."""
    if seq and not digest:
        raise ProtocolViolation(f"{journal}_hash of {what} must be a SHA-256, 64 lower-case hexadecimal digits")
