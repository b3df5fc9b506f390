"""Values of other parties are taken exactly as they should be, or refused without being repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Annotated, Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.errors import ProtocolViolation
from labeler.messages.bodies import Body
from labeler.untrusted import (
    Digest,
    DigestIfAny,
    Flag,
    PartyId,
    UnixTime,
    canonical_json,
    check_digest,
    check_list,
    check_mapping,
    check_party_id,
    check_public_key,
    check_text,
    hex_bytes,
    read_object,
    strict,
    whole,
)

GOOD: list[tuple[Callable[[Any], object], object]] = [
    (lambda value: check_party_id(value, "v"), "Hôpital nord-1"),
    (lambda value: check_digest(value, "v"), "0f" * 32),
    (lambda value: check_text(value, "v", most=3), "abc"),
    (lambda value: check_list(value, "v"), [1]),
    (lambda value: check_mapping(value, "v"), {"a": 1}),
    (lambda value: check_public_key(value, "v"), "0f" * 32),
]


@pytest.mark.parametrize(("check", "value"), GOOD)
def test_a_good_value_comes_back_as_it_is(check: Callable[[Any], object], value: object) -> None:
    assert check(value) == value


@pytest.mark.parametrize(("check", "value"), GOOD)
def test_a_value_of_another_type_is_refused(check: Callable[[Any], object], value: object) -> None:
    for other in ("", b"", None, True, 1, 0.5, [], {}, "\n", float("nan")):
        if type(other) is not type(value):
            if isinstance(value, float) and type(other) is int:
                continue
            with pytest.raises(ProtocolViolation):
                check(other)


@pytest.mark.parametrize("value", ["", "a" * 201, "a\nb", "a\x00", "\ud800", "a\u2028b", "\u202eabc", b"a", None, 3])
def test_an_id_that_could_forge_a_line_of_a_log_is_refused(value: object) -> None:
    with pytest.raises(ProtocolViolation):
        check_party_id(value, "an id")


@pytest.mark.parametrize("value", ["0F" * 2, "0f", "0f0f\n", "0f0", "xxxx", 15])
def test_bytes_have_one_spelling(value: object) -> None:
    assert hex_bytes("0f0f", 2, "two bytes") == b"\x0f\x0f"
    with pytest.raises(ProtocolViolation):
        hex_bytes(value, 2, "two bytes")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"version":"x/1"}',
        b'{"a":1}',
        b'{"a":1,"version":"x/2"}',
        b'{"a":1,"b":2,"version":"x/1"}',
        b'{"a":1,"a":1,"version":"x/1"}',
        b'{"a":NaN,"version":"x/1"}',
        b'{"a":-Infinity,"version":"x/1"}',
        b'{"a":1,"version":"x/1"} ,',
        b'\xef\xbb\xbf{"a":1,"version":"x/1"}',
        b'{"a":"\xff","version":"x/1"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"9" * 5000 + b',"version":"x/1"}',
    ],
)
def test_an_object_has_exactly_its_fields(data: bytes) -> None:
    assert read_object(b'{"a":1,"version":"x/1"}', "it", fields=["a"], version="x/1") == {"a": 1}
    with pytest.raises(ProtocolViolation):
        read_object(data, "it", fields=["a"], version="x/1")


@settings(max_examples=40)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5))
def test_canonical_json_reads_back(content: object) -> None:
    data = canonical_json({"a": content, "version": "x/1"})
    assert data.isascii()
    assert read_object(data, "it", fields=["a"], version="x/1") == {"a": content}


# A model of a message takes exactly what its fields say, and repeats nothing that it refuses.


@strict("a trial")
class Trial(Body):
    version: ClassVar[str] = "labeler-trial/1"

    name: PartyId
    count: Annotated[int, whole(1, 9)]
    digest: Digest
    earlier: DigestIfAny
    is_kept: Flag
    until: UnixTime


TRIAL: dict[str, Any] = {
    "name": "agent-\u00e9", "count": 9, "digest": "0f" * 32, "earlier": "", "is_kept": False, "until": 5,
}  # fmt: skip


def test_a_model_reads_back_with_its_types() -> None:
    found = Trial.decode(Trial(**TRIAL).encode())
    assert found == Trial(**TRIAL)
    assert type(found.until) is int
    assert type(Trial(**TRIAL | {"until": 5.0}).until) is float
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
            Trial(**TRIAL | {field: value})
        said = str(refusal.value)
        assert said.startswith(f"{field} of a trial must be ")
        assert words in said
        assert refusal.value.__cause__ is None
        assert refusal.value.__suppress_context__
        assert len(said) < 120


def test_other_fields_than_its_own_are_refused() -> None:
    for fields in ({}, TRIAL | {"more": 1}, {name: TRIAL[name] for name in list(TRIAL)[1:]}):
        with pytest.raises(ProtocolViolation, match=r"of a trial must be|a trial must have exactly the fields"):
            Trial(**fields)
