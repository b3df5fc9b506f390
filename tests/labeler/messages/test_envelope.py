"""Headers have one spelling, frames are read whole or refused, and a message never shows its body."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from labeler.errors import LabelerError, ProtocolViolation, TooLarge
from labeler.messages import (
    COORDINATOR,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    VERSION,
    Header,
    Message,
    frame,
    read_frames,
)

BODY = b"the body"
HEADER = Header(
    kind="answered",
    sender="site-1",
    recipient=COORDINATOR,
    task_digest="a" * 64,
    round_digest="",
    sequence=7,
    body_digest=hashlib.sha256(BODY).hexdigest(),
    is_sealed=False,
)
MESSAGE = Message(HEADER, bytes(range(64)), BODY)

WRONG: list[tuple[str, Any]] = [
    ("kind", "gossip"),
    ("kind", ["ask"]),
    ("sender", ""),
    ("sender", "a" * 201),
    ("sender", "a\nb"),
    ("recipient", "a\x7f"),
    ("recipient", 5),
    ("task_digest", "A" * 64),
    ("task_digest", None),
    ("round_digest", "a" * 63),
    ("body_digest", ""),
    ("sequence", 0),
    ("sequence", 2**62 + 1),
    ("sequence", True),
    ("sequence", 1.0),
    ("sequence", "1"),
    ("is_sealed", 1),
    ("is_sealed", None),
]


def spelled(**changes: object) -> bytes:
    content = asdict(HEADER) | {"version": VERSION} | changes
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def shares(frames: list[Message]) -> list[tuple[Header, bytes, bytes]]:
    return [(message.header, message.signature, message.body) for message in frames]


@given(
    sender=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=200).filter(str.isprintable),
    sequence=st.integers(1, 2**62),
)
@example(sender="\U0010fffd".replace("\U0010fffd", "\U0001f600") * 200, sequence=2**62)
def test_every_header_fits_and_reads_back(sender: str, sequence: int) -> None:
    header = replace(HEADER, sender=sender, recipient=sender, sequence=sequence)
    assert len(header.to_bytes()) <= MAX_HEADER_BYTES
    assert Header.parse(header.to_bytes()) == header


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_field_outside_its_bounds_is_refused_on_both_ways(name: str, value: object) -> None:
    with pytest.raises(ProtocolViolation):
        replace(HEADER, **{name: value})  # type: ignore[arg-type]  # that is the test
    with pytest.raises(ProtocolViolation):
        Header.parse(spelled(**{name: value}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        spelled() + b"\n",
        b" " + spelled(),
        spelled(version="labeler-message/2"),
        spelled(extra=1),
        spelled(sequence=float("nan")),
        spelled().replace(b'"sequence":7,', b""),
        spelled().replace(b'"sequence":7,', b'"sequence":7,"sequence":7,'),
        spelled().replace(b'"sequence":7,', b'"sequence": 7,'),
        spelled().replace(b'"sequence":7,', b'"sequence":07,'),
        spelled().replace(b'"sequence":7,', b'"sequence":7e0,'),
        spelled().replace(b"site-1", b"\\u0073ite-1"),
        spelled().replace(b"site-1", "s\u00eete".encode()),
        json.dumps(asdict(HEADER) | {"version": VERSION}).encode(),
    ],
)
def test_another_spelling_of_a_header_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        Header.parse(data)


def test_a_header_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(TooLarge, match="8192"):
        Header.parse(b"[" * (MAX_HEADER_BYTES + 1))


@pytest.mark.parametrize("kind", ["input-share", "aggregate-share"])
def test_a_secret_share_that_is_not_sealed_is_refused(kind: str) -> None:
    with pytest.raises(ProtocolViolation, match="sealed"):
        Header.parse(spelled(kind=kind))
    assert Header.parse(spelled(kind=kind, is_sealed=True)).is_sealed


def test_a_message_does_not_show_its_body_or_signature() -> None:
    message = Message(HEADER, b"S" * 64, b"secret ballots")
    shown = repr(message) + str(message)
    assert shown.startswith("Message(kind='answered', sender='site-1', recipient='coordinator', sequence=7, header_b")
    assert "body_bytes=14" in shown
    assert not {"secret", "SSS", HEADER.body_digest} & set(shown.split("'"))
    assert "secret" not in shown
    assert message.message_id == "site-1:7"


@pytest.mark.parametrize("signature", [b"", bytes(63), bytes(65), "a" * 64])
def test_a_signature_has_64_bytes(signature: Any) -> None:
    with pytest.raises(ProtocolViolation, match="64"):
        Message(HEADER, signature, BODY)


def test_a_message_larger_than_the_limit_is_never_made() -> None:
    room = MAX_MESSAGE_BYTES - len(frame([Message(HEADER, bytes(64), b"")]))
    assert len(frame([Message(HEADER, bytes(64), bytes(room))])) == MAX_MESSAGE_BYTES
    with pytest.raises(TooLarge, match="fewer queries"):
        Message(HEADER, bytes(64), bytes(room + 1))


def test_frames_are_read_in_order() -> None:
    messages = [replace(MESSAGE, header=replace(HEADER, sequence=number), body=bytes(number)) for number in range(1, 5)]
    assert shares(read_frames(frame(messages), max_messages=4)) == shares(messages)
    assert read_frames(b"", max_messages=0) == []


def test_more_messages_than_taken_are_refused() -> None:
    with pytest.raises(TooLarge, match="at most 2"):
        read_frames(frame([MESSAGE] * 3), max_messages=2)


@given(st.integers(0, 2 * len(frame([MESSAGE])) - 1))
def test_a_transmission_that_is_cut_off_is_refused(length: int) -> None:
    whole = frame([MESSAGE, MESSAGE])
    if length in (0, len(whole) // 2):
        assert len(read_frames(whole[:length], max_messages=2)) == (length > 0)
        return
    with pytest.raises(ProtocolViolation, match="cut off"):
        read_frames(whole[:length], max_messages=2)


@pytest.mark.parametrize(
    "lengths", [(2**32 - 1, 0), (MAX_HEADER_BYTES + 1, 0), (0, 2**64 - 1), (200, MAX_MESSAGE_BYTES)]
)
def test_a_stated_length_is_never_allocated(lengths: tuple[int, int]) -> None:
    data = lengths[0].to_bytes(4, "big") + lengths[1].to_bytes(8, "big") + bytes(1000)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            read_frames(data, max_messages=5)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    if data:
        with pytest.raises(LabelerError):
            read_frames(data, max_messages=10)


@given(st.data())
def test_a_changed_byte_is_refused_or_lies_outside_the_header(data: st.DataObject) -> None:
    whole = bytearray(frame([MESSAGE]))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    try:
        (found,) = read_frames(bytes(whole), max_messages=1)
    except LabelerError:
        return
    # What still reads says something else, and says it in the one spelling; the signature then does not hold.
    assert shares([found]) != shares([MESSAGE])
    assert frame([found]) == bytes(whole)
