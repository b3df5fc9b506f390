"""What parties say to each other: a signed envelope, and a strict model for each body in it.

    envelope      header, signature, frames: who to whom, of which round, which number      (named here, too)
    strict        how a model refuses: exactly its fields, of exactly their types
    body_format   how a body is written: one JSON object, and arrays after it
    proposals     before anything is charged: proposal, willing, declined, withdrawn
    rounds        a round: ask, open-round, sum, refused, answered
    polls         how mail is fetched
    shares        what is sealed: input shares, sums, winners; and what is held

Bytes of a message never change between versions: tests/golden/test_message_bytes.py holds their digests.
"""

from labeler.messages.envelope import (
    COORDINATOR,
    FRAME_HEAD_BYTES,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SEQUENCE,
    SEALED_KINDS,
    SIGNATURE_BYTES,
    VERSION,
    Header,
    Kind,
    Message,
    frame,
    frame_sizes,
    read_frames,
)

__all__ = [
    "COORDINATOR",
    "FRAME_HEAD_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_SEQUENCE",
    "SEALED_KINDS",
    "SIGNATURE_BYTES",
    "VERSION",
    "Header",
    "Kind",
    "Message",
    "frame",
    "frame_sizes",
    "read_frames",
]
