"""Invitations: what is signed, the phrase people compare, and which files are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from labeler.errors import BadData
from labeler.invitation import (
    Invitation,
    RosterTallier,
    enrolment_statement,
    phrase_of,
    read_document,
    roster_digest,
    same_phrase,
    token_digest,
)

TALLIERS = tuple(
    RosterTallier(party_id=f"tallier-{number}", number=number, verify_key=f"{number}a" * 32, seal_key=f"{number}b" * 32)
    for number in range(3)
)


def invitation(**changes: Any) -> Invitation:
    fields: dict[str, Any] = {
        "url": "https://labels.example.org",
        "ca_certificates": "",
        "verify_key": "c1" * 32,
        "seal_key": "c2" * 32,
        "role": "agent",
        "party_id": "hospital-a",
        "tallier": None,
        "is_rotation": False,
        "talliers": TALLIERS,
        "talliers_needed": 3,
        "backbones": ("5d" * 32,),
        "issued_at": 1_800_000_000,
        "expires_at": 1_800_600_000,
        "token": "inv_" + "t" * 43,
    } | changes
    digest = roster_digest(fields["verify_key"], fields["seal_key"], fields["talliers"])
    return Invitation(**({"roster_digest": digest} | fields))


def test_a_file_reads_back_as_what_was_written() -> None:
    made = invitation()
    read, signature = read_document(json.dumps(made.document("5a" * 64)).encode())
    assert (read, signature) == (made, "5a" * 64)
    assert read.statement == made.statement


def test_the_token_does_not_print() -> None:
    assert "t" * 43 not in repr(invitation())


@pytest.mark.parametrize("field", Invitation.model_fields)
def test_every_field_is_signed_and_changes_the_phrase(field: str) -> None:
    other = {
        "url": "https://labels.example.com",
        "ca_certificates": "-----BEGIN CERTIFICATE-----",
        "verify_key": "d1" * 32,
        "seal_key": "d2" * 32,
        "role": "tallier",
        "party_id": "hospital-b",
        "tallier": 0,
        "is_rotation": True,
        "talliers": (*TALLIERS[:2], TALLIERS[2].model_copy(update={"seal_key": "ee" * 32})),
        "talliers_needed": 2,
        "roster_digest": None,
        "backbones": (),
        "issued_at": 1,
        "expires_at": 2,
        "token": "inv_" + "u" * 43,
    }
    changes: dict[str, Any] = {field: other[field]}
    if field in ("role", "tallier"):
        changes = {"role": "tallier", "tallier": 0}
    if field == "talliers_needed":
        changes["talliers"] = TALLIERS[:2]
    if field == "roster_digest":
        changes = {"talliers": other["talliers"]}
    changed = invitation(**changes)
    assert changed.statement != invitation().statement
    assert changed.phrase != invitation().phrase


def test_a_phrase_has_sixty_bits_in_letters_that_are_not_misread() -> None:
    phrases = {phrase_of(str(number).encode()) for number in range(8)}
    assert len(phrases) == 8
    letters = {letter for phrase in phrases for letter in phrase}
    assert letters.isdisjoint("ILOU")
    assert all([len(group) for group in phrase.split("-")] == [4, 4, 4] for phrase in phrases)
    # 32 letters for each of 12 places: 60 bits. Golden, so that both sides of a telephone have one version.
    assert invitation().phrase == GOLDEN_PHRASE


GOLDEN_PHRASE = "5T4W-HDHC-APKD"


@given(st.integers(0, 2**60 - 1))
def test_a_phrase_is_the_same_however_it_is_heard(number: int) -> None:
    phrase = "-".join(f"{number:012X}"[start : start + 4] for start in (0, 4, 8))[:14]
    misheard = phrase.lower().replace("0", "o").replace("1", "l").replace("-", " ")
    assert same_phrase(phrase, misheard)
    assert not same_phrase(phrase, phrase[:-1] + ("2" if phrase[-1] != "2" else "3"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"talliers": TALLIERS[:2]}, "all talliers"),
        ({"tallier": 1}, "an agent has none"),
        ({"role": "tallier"}, "a tallier has a number"),
        ({"talliers": (TALLIERS[1], TALLIERS[0], TALLIERS[2])}, "by number"),
        ({"talliers": (*TALLIERS[:2], TALLIERS[2].model_copy(update={"seal_key": "0b" * 32}))}, "one key"),
        ({"roster_digest": "00" * 32}, "roster_digest"),
        ({"party_id": "a\nb"}, "party_id"),
        ({"url": "javascript:alert(1)"}, "url"),
        ({"token": "lab_x"}, "token"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        invitation(**changes)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": "labeler-invitation/1"}', b"x" * 600_000])
def test_what_is_no_invitation_is_refused_in_a_sentence(data: bytes) -> None:
    with pytest.raises(BadData, match="invitation"):
        read_document(data)


def test_an_enrolment_is_bound_to_everything_it_is_about() -> None:
    fields: dict[str, Any] = {
        "coordinator_key": "c1" * 32,
        "token": "inv_a",
        "role": "agent",
        "party_id": "hospital-a",
        "tallier": None,
        "verify_key": "a1" * 32,
        "seal_key": "a2" * 32,
    }
    others = {"coordinator_key": "x", "token": "x", "role": "x", "party_id": "x", "tallier": 1, "verify_key": "x"}
    statements = {
        enrolment_statement(**(fields | {name: value})) for name, value in (others | {"seal_key": "x"}).items()
    }
    assert len(statements) == len(fields)
    assert enrolment_statement(**fields) not in statements
    assert token_digest("inv_a") not in ("inv_a", token_digest("inv_b"))
