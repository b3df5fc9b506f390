"""Forged, foreign and re-wrapped messages are refused, and secret keys stay where they are."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.public import PublicKey, SealedBox

from labeler.errors import BadData, Forged, InvalidSetting, LabelerError, PrivacyRefusal, ProtocolViolation, TooLarge
from labeler.messages import MAX_MESSAGE_BYTES, Message, frame, read_frames
from labeler.system.keys import PartyKeys, PublicKeys, verify

AGENT, TALLIER, RELAY = PartyKeys.generate(), PartyKeys.generate(), PartyKeys.generate()

LOW_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "ec" + "ff" * 30 + "7f",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
]
"""Points of low order on Curve25519, from Bernstein's list (cr.yp.to/ecdh.html#validate)."""


def share_message(**changes: Any) -> Message:
    content: dict[str, Any] = {
        "sender": "agent-1",
        "recipient": "tallier-1",
        "task_digest": "a" * 64,
        "round_digest": "b" * 64,
        "sequence": 3,
        "body": b"a share",
        "seal_to": TALLIER.public.seal_key,
    }
    return AGENT.message("input-share", **(content | changes))


def test_a_sealed_message_travels_and_opens_at_its_recipient_only() -> None:
    (message,) = read_frames(frame([share_message()]), max_messages=1)
    verify(message, AGENT.public.verify_key)
    assert TALLIER.open(message) == b"a share"
    assert b"a share" not in frame([message])
    assert len(message.body) == len(b"a share") + 48 + 32, "the key and tag of a box, and the digest it begins with"
    for other in (AGENT, RELAY):
        with pytest.raises(Forged, match="cannot be opened"):
            other.open(message)


def test_a_plain_message_is_signed_and_readable() -> None:
    message = AGENT.message("poll", sender="agent-1", recipient="coordinator", sequence=1, body=b"hello")
    verify(message, AGENT.public.verify_key)
    assert RELAY.open(message) == message.body == b"hello"


def test_sealing_twice_gives_different_bytes_with_the_same_content() -> None:
    first, second = share_message(), share_message()
    assert first.body != second.body
    assert TALLIER.open(first) == TALLIER.open(second)


def test_a_message_of_another_sender_is_forged() -> None:
    with pytest.raises(Forged, match="does not hold"):
        verify(share_message(), RELAY.public.verify_key)


@pytest.mark.parametrize(
    "change",
    [
        {"sender": "agent-2"},
        {"recipient": "tallier-2"},
        {"kind": "aggregate-share"},
        {"task_digest": "c" * 64},
        {"round_digest": ""},
        {"sequence": 4},
        {"body_digest": "d" * 64},
    ],
)
def test_a_message_under_another_header_is_forged(change: dict[str, Any]) -> None:
    """Also where a relay signs the header around a box that it cannot open: the box fits its own parties and round."""
    message = share_message()
    header = replace(message.header, **change)
    with pytest.raises(Forged):
        verify(Message(header, message.signature, message.body), AGENT.public.verify_key)
    signature = RELAY._signing.sign(b"labeler-message/1\n" + header.to_bytes()).signature
    wrapped = Message(header, signature, message.body)
    if "sequence" in change or "body_digest" in change:
        return
    verify(wrapped, RELAY.public.verify_key)
    with pytest.raises(Forged, match="somebody else's message"):
        TALLIER.open(wrapped)


def test_a_changed_body_is_forged() -> None:
    message = share_message()
    forged = Message(message.header, message.signature, message.body[:-1] + bytes([message.body[-1] ^ 1]))
    with pytest.raises(Forged, match="not the one that was signed"):
        verify(forged, AGENT.public.verify_key)
    with pytest.raises(Forged, match="not the one that was signed"):
        TALLIER.open(forged)


def test_parties_whose_ids_join_to_the_same_text_are_not_confused() -> None:
    message = share_message(sender="a", recipient="btallier-1")
    header = replace(message.header, sender="ab", recipient="tallier-1")
    with pytest.raises(Forged, match="somebody else's message"):
        TALLIER.open(Message(header, message.signature, message.body))


@pytest.mark.parametrize("body", [b"", bytes(31), bytes(47), bytes(200)])
def test_a_sealed_body_that_is_no_box_is_forged(body: bytes) -> None:
    message = share_message()
    header = replace(message.header, body_digest=hashlib.sha256(body).hexdigest())
    with pytest.raises(Forged, match="cannot be opened"):
        TALLIER.open(Message(header, message.signature, body))


def test_a_box_without_its_beginning_is_forged() -> None:
    body = SealedBox(PublicKey(bytes.fromhex(TALLIER.public.seal_key))).encrypt(b"short")
    header = replace(share_message().header, body_digest=hashlib.sha256(body).hexdigest())
    with pytest.raises(Forged, match="somebody else's message"):
        TALLIER.open(Message(header, bytes(64), body))


def test_a_secret_share_is_never_sent_in_clear() -> None:
    with pytest.raises(ProtocolViolation, match="sealed"):
        share_message(seal_to=None)


def test_a_body_that_fits_no_message_is_refused() -> None:
    with pytest.raises(TooLarge):
        share_message(body=bytes(MAX_MESSAGE_BYTES))


@pytest.mark.parametrize("key", [*LOW_ORDER, "", "ab" * 31, "AB" * 32, "xy" * 32, None])
def test_a_weak_or_malformed_seal_key_is_refused(key: Any) -> None:
    with pytest.raises(InvalidSetting, match="seal_key"):
        PublicKeys(AGENT.public.verify_key, key)
    if key is not None:
        with pytest.raises(InvalidSetting, match="seal_key"):
            share_message(seal_to=key)


@pytest.mark.parametrize("key", ["00" * 32, "01" + "00" * 31, "ff" * 32, "", "ab" * 31, None])
def test_a_weak_or_malformed_verify_key_is_refused(key: Any) -> None:
    with pytest.raises(InvalidSetting, match="verify_key"):
        PublicKeys(key, AGENT.public.seal_key)
    with pytest.raises(InvalidSetting, match="verify_key"):
        verify(share_message(), key)


def test_a_fingerprint_tells_key_pairs_apart() -> None:
    assert len(AGENT.public.fingerprint) == 16
    mixed = PublicKeys(AGENT.public.verify_key, TALLIER.public.seal_key)
    assert len({AGENT.public.fingerprint, TALLIER.public.fingerprint, mixed.fingerprint}) == 3


def test_keys_are_kept_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    previous = os.umask(0)
    try:
        AGENT.save(path)
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = PartyKeys.load(path)
    assert loaded.public == AGENT.public
    message = loaded.message("poll", sender="a", recipient="coordinator", sequence=1, body=b"")
    verify(message, AGENT.public.verify_key)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o666])
def test_a_key_file_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    AGENT.save(path)
    path.chmod(mode)
    with pytest.raises(InvalidSetting, match="chmod 600"):
        PartyKeys.load(path)


def test_a_missing_key_file_is_named_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"^key file 'none.json' cannot be read \(No such file or directory\)"):
        PartyKeys.load(tmp_path / "none.json")


def test_a_damaged_key_file_is_refused_without_being_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    AGENT.save(path)
    good = json.loads(path.read_text())
    secret = good["signing_key"]
    bad: list[bytes] = [
        b"",
        b"x" * 5000,
        json.dumps(good | {"surplus": 1}).encode(),
        json.dumps(good | {"version": "labeler-keys/2"}).encode(),
        json.dumps(good | {"signing_key": secret[:-1]}).encode(),
        json.dumps(good | {"signing_key": TALLIER.public.seal_key}).encode(),
        json.dumps(good | {"verify_key": TALLIER.public.verify_key}).encode(),
        json.dumps(good | {"seal_key": LOW_ORDER[0]}).encode(),
    ]
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(BadData, match="damaged") as refused:
            PartyKeys.load(path)
        assert secret[:16] not in str(refused.value)


def test_secret_keys_do_not_print_and_cannot_be_copied() -> None:
    secrets = [bytes(AGENT._signing).hex(), bytes(AGENT._sealing).hex()]
    assert "redacted" in repr(AGENT)
    assert not any(secret in repr(AGENT) + str(AGENT) for secret in secrets)
    for steal in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(PrivacyRefusal):
            steal(AGENT)


@given(st.data())
def test_a_message_with_any_changed_byte_is_refused(data: st.DataObject) -> None:
    whole = bytearray(frame([share_message()]))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))

    def read() -> None:
        (message,) = read_frames(bytes(whole), max_messages=1)
        verify(message, AGENT.public.verify_key)

    with pytest.raises(LabelerError):
        read()
