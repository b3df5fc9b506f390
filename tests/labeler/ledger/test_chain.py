"""What is hashed and how it is spelled: others keep these hashes as witnesses, so they never change."""

from __future__ import annotations

import hashlib
import math
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from labeler.errors import InvalidSetting, TooLarge
from labeler.ledger.chain import (
    EMPTY,
    GENESIS,
    MAX_DETAIL_BYTES,
    Entry,
    Head,
    canonical,
    detail_text,
    entry_hash,
    entry_of,
    time_of,
    time_text,
)

ROW = {
    "seq": 2, "at": "2026-03-01T12:00:00.000001Z", "kind": "reserve", "account": "hôpital", "level": "instance",
    "reservation_id": "job", "amount": 7, "detail": '{"task":"t"}', "previous_hash": "a" * 64,
}  # fmt: skip


def test_an_entry_is_hashed_as_one_known_text_so_that_older_ledgers_and_witnesses_hold() -> None:
    spelled = (
        r'{"account":"h\u00f4pital","amount":7,"at":"2026-03-01T12:00:00.000001Z","detail":"{\"task\":\"t\"}",'
        r'"kind":"reserve","level":"instance","previous_hash":"' + "a" * 64 + r'","reservation_id":"job","seq":2,'
        r'"version":"labeler-ledger/1"}'
    )
    assert entry_hash(ROW) == hashlib.sha256(spelled.encode()).hexdigest()
    assert entry_hash(ROW) == "12f46fc40d0140ef53a23db50dbc262c5ff52b14d944a6519a01af1d9393b6e4"


@pytest.mark.parametrize("name", list(ROW))
def test_each_part_of_an_entry_is_in_its_hash(name: str) -> None:
    assert entry_hash(ROW | {name: "other"}) != entry_hash(ROW)
    with pytest.raises(KeyError, match=name):
        entry_hash({key: value for key, value in ROW.items() if key != name})


def test_an_entry_is_read_as_it_was_stored() -> None:
    row: dict[str, Any] = {**ROW, "hash": "b" * 64}
    at = datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=UTC)
    assert entry_of(row) == Entry(2, at, "reserve", "hôpital", "instance", "job", 7, {"task": "t"}, "a" * 64, "b" * 64)
    for bad in ({"at": "2026-03-01"}, {"detail": "{"}):
        with pytest.raises(ValueError, match=r"."):
            entry_of(row | bad)
    with pytest.raises(TypeError):
        entry_of(row | {"more": 1})


def test_json_has_one_spelling_and_no_number_that_is_none() -> None:
    assert canonical({"b": [1, "ü", None, True, 1.5], "a": {"d": 1, "c": 2}}) == (
        r'{"a":{"c":2,"d":1},"b":[1,"\u00fc",null,true,1.5]}'
    )
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="JSON compliant"):
            canonical({"x": bad})
    with pytest.raises(TypeError):
        canonical({"x": b""})


def test_a_detail_is_refused_with_what_it_may_be() -> None:
    assert (detail_text({}), detail_text({"b": 1, "a": [2]})) == ("{}", '{"a":[2],"b":1}')
    for bad in ({"x": math.nan}, {"x": object()}, {"x": 1, 2: 3}):
        with pytest.raises(InvalidSetting) as refusal:
            detail_text(bad)  # type: ignore[arg-type]  # the point of the test
        assert str(refusal.value) == "the detail of a ledger entry is JSON: texts, whole and finite numbers, lists"
    with pytest.raises(InvalidSetting) as refusal:
        detail_text({1: 2})  # type: ignore[dict-item]  # the point of the test
    assert str(refusal.value) == "the detail of a ledger entry has texts as keys"


def test_a_detail_of_exactly_the_bound_is_kept_and_one_more_byte_is_refused() -> None:
    assert MAX_DETAIL_BYTES == 16384
    fits = "y" * (MAX_DETAIL_BYTES - len('{"x":""}'))
    assert len(detail_text({"x": fits})) == MAX_DETAIL_BYTES
    with pytest.raises(TooLarge) as refusal:
        detail_text({"x": fits + "y"})
    assert str(refusal.value) == "the detail of a ledger entry is at most 16384 bytes, found 16385"


def test_times_are_written_in_utc_with_microseconds_so_that_they_sort_as_texts() -> None:
    east = timezone(timedelta(hours=2))
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert time_text(noon) == time_text(noon.astimezone(east)) == "2026-03-01T12:00:00.000000Z"
    later = noon + timedelta(microseconds=1)
    assert time_text(later) == "2026-03-01T12:00:00.000001Z" > time_text(noon)
    assert time_of(time_text(later)) == later
    assert time_of(time_text(later)).tzinfo is UTC
    with pytest.raises(InvalidSetting) as refusal:
        time_text(datetime(2026, 3, 1))  # noqa: DTZ001  # what is refused
    assert str(refusal.value) == "the ledger's clock gives times with a time zone, such as datetime.now(UTC)"


def test_times_are_in_utc_whatever_zone_the_machine_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XYZ+05")
    time.tzset()
    try:
        assert time_text(datetime(2026, 3, 1, 12, tzinfo=UTC)) == "2026-03-01T12:00:00.000000Z"
        assert time_of("2026-03-01T12:00:00.000000Z") == datetime(2026, 3, 1, 12, tzinfo=UTC)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("seq", "value", "said"),
    [
        (-1, "a" * 64, "a sequence number is a whole number of at least 0, found -1"),
        (1.0, "a" * 64, "a sequence number is a whole number of at least 0, found 1.0"),
        (True, "a" * 64, "a sequence number is a whole number of at least 0, found True"),
        (1, b"a" * 64, "the hash of an entry is 64 hexadecimal digits in lower case"),
        (1, "A" * 64, "the hash of an entry is 64 hexadecimal digits in lower case"),
        (1, "a" * 63, "the hash of an entry is 64 hexadecimal digits in lower case"),
        (1, "a" * 64 + "\n", "the hash of an entry is 64 hexadecimal digits in lower case"),
        (0, "a" * 64, "the hash of all zeros belongs to sequence number 0, and to no other"),
        (1, GENESIS, "the hash of all zeros belongs to sequence number 0, and to no other"),
    ],
)
def test_a_head_that_no_ledger_has_is_refused_word_for_word(seq: Any, value: Any, said: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        Head(seq, value)
    assert str(refusal.value) == said


def test_an_empty_ledger_ends_at_zero() -> None:
    assert (EMPTY.seq, EMPTY.hash) == (0, "0" * 64)
    assert Head(1, "0" * 63 + "1").seq == 1
