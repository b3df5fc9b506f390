"""Values of other parties are taken exactly as they should be, or refused without being repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labeler.errors import ProtocolViolation
from labeler.untrusted import (
    canonical_json,
    check_digest,
    check_list,
    check_mapping,
    check_party_id,
    check_public_key,
    check_text,
    hex_bytes,
    read_object,
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


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5))
def test_canonical_json_reads_back(content: object) -> None:
    data = canonical_json({"a": content, "version": "x/1"})
    assert data.isascii()
    assert read_object(data, "it", fields=["a"], version="x/1") == {"a": content}
