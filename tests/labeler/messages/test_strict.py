"""A model of a message takes exactly what its fields say, however it is made, and repeats nothing that it refuses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Annotated, Any, ClassVar

import pytest

from labeler.errors import ProtocolViolation
from labeler.messages.bodies import Body
from labeler.untrusted import Digest, DigestIfAny, Flag, PartyId, UnixTime, strict, whole


@strict("a trial")
class Trial(Body):
    version: ClassVar[str] = "labeler-trial/1"

    name: PartyId
    count: Annotated[int, whole(1, 9)]
    digest: Digest
    earlier: DigestIfAny
    is_kept: Flag
    until: UnixTime


GOOD: dict[str, Any] = {
    "name": "agent-\u00e9", "count": 9, "digest": "0f" * 32, "earlier": "", "is_kept": False, "until": 5,
}  # fmt: skip


def test_a_model_reads_back_with_its_types() -> None:
    found = Trial.decode(Trial(**GOOD).encode())
    assert found == Trial(**GOOD)
    assert type(found.until) is int
    assert type(Trial(**GOOD | {"until": 5.0}).until) is float
    with pytest.raises(FrozenInstanceError):
        found.count = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("name", ["", "a\nb", "x" * 201, "\u202e", "\ud800", b"a", 1, None, ["a"]], "1 to 200 printable characters"),
        ("count", [0, 10, 1.0, True, "3", None, 10**400], "a whole number between 1 and 9"),
        ("digest", ["", "0f" * 31, "0F" * 32, "0f" * 32 + "\n", "\u0660" * 64, 0, None], "a SHA-256, 64 lower-case"),
        ("earlier", ["0", "0f" * 33, "\n", None], "a SHA-256, 64 lower-case hexadecimal digits, or empty"),
        ("is_kept", [0, 1, "true", None], "true or false"),
        ("until", [0, -1.0, 1e11, float("nan"), float("inf"), True, "5", None, 10**400], "a unix time in seconds"),
    ],
)
def test_what_a_field_does_not_take_is_refused_in_words_that_do_not_repeat_it(
    field: str, values: list[Any], words: str
) -> None:
    for value in values:
        with pytest.raises(ProtocolViolation) as refusal:
            Trial(**GOOD | {field: value})
        said = str(refusal.value)
        assert said.startswith(f"{field} of a trial must be ")
        assert words in said
        assert refusal.value.__cause__ is None
        assert refusal.value.__suppress_context__
        assert len(said) < 120


def test_other_fields_than_its_own_are_refused() -> None:
    for fields in ({}, GOOD | {"more": 1}, {name: GOOD[name] for name in list(GOOD)[1:]}):
        with pytest.raises(ProtocolViolation, match=r"of a trial must be|a trial must have exactly the fields"):
            Trial(**fields)
