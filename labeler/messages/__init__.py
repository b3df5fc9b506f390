"""Messages between parties: a signed envelope, and a strict model for each body in it.

    envelope      header, signature, frames: sender, recipient, round, number      (names re-exported here)
    bodies        a strict model for each body, and the one format in which all are written

tests/golden/test_message_bytes.py holds the digests of their bytes.
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
