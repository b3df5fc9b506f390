"""JSON means one thing, and a form is read part by part."""

from __future__ import annotations

import json

import pytest

from api.access import parse_json

BAD = {
    "NaN": b'{"k": NaN}',
    "Infinity": b'{"k": -Infinity}',
    "overflow": b'{"k": 1e999}',
    "overflow with a sign": b'{"k": [1.5, -1.5E+308, 2e308]}',
    "overflow with zeros": b"[1e0000309]",
    "overflow by digits": b"[" + b"9" * 309 + b".5]",
    "overflow by digits and exponent": b"[" + b"9" * 220 + b"e99]",
    "overflow among numbers": b"[" + b"0.25," * 1000 + b"1.0e+400]",
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "long number": b"1" * 10_000,
    "not UTF-8": b'{"k": "\xff"}',
    "NUL": b'{"k": "\\u0000"}',
    "no JSON": b"{k: 1}",
    "empty": b"",
    "two documents": b"{} {}",
    "a name twice": b'{"task": {"delta": 1e-5, "delta": 1e-2}}',
    "a name twice, spelt otherwise": b'{"delta": 1e-5, "d\\u0065lta": 1e-2}',
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_json_is_refused_with_a_decode_error_that_does_not_carry_the_body(name: str) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json(BAD[name])
    assert caught.value.doc == ""


def test_json_is_read() -> None:
    assert parse_json(b'{"a": [1, 2.5, -3e2, "\\u00fc", null, true]}') == {"a": [1, 2.5, -300.0, "ü", None, True]}
