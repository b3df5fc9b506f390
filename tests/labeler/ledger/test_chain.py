"""The bytes that are hashed: others keep these hashes as witnesses, so they never change."""

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
    for bad in ({"x": math.nan}, {"x": object()}, {"x": 1, 2: 3}, {1: 2}, {"salt": "00"}):
        with pytest.raises(InvalidSetting):
            detail_text(bad)  # type: ignore[arg-type]  # the point of the test


def test_a_detail_of_exactly_the_bound_is_kept_and_one_more_byte_is_refused() -> None:
    assert MAX_DETAIL_BYTES == 16384
    fits = "y" * (MAX_DETAIL_BYTES - len('{"x":""}'))
    assert len(detail_text({"x": fits})) == MAX_DETAIL_BYTES
    with pytest.raises(TooLarge):
        detail_text({"x": fits + "y"})


def test_times_are_written_in_utc_with_microseconds_so_that_they_sort_as_texts() -> None:
    east = timezone(timedelta(hours=2))
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert time_text(noon) == time_text(noon.astimezone(east)) == "2026-03-01T12:00:00.000000Z"
    later = noon + timedelta(microseconds=1)
    assert time_text(later) == "2026-03-01T12:00:00.000001Z" > time_text(noon)
    assert time_of(time_text(later)) == later
    assert time_of(time_text(later)).tzinfo is UTC
    with pytest.raises(InvalidSetting):
        time_text(datetime(2026, 3, 1))  # noqa: DTZ001  # what is refused


def test_times_are_in_utc_whatever_zone_the_machine_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XYZ+05")
    time.tzset()
    try:
        assert time_text(datetime(2026, 3, 1, 12, tzinfo=UTC)) == "2026-03-01T12:00:00.000000Z"
        assert time_of("2026-03-01T12:00:00.000000Z") == datetime(2026, 3, 1, 12, tzinfo=UTC)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("seq", [-1, 1.0, True])
def test_a_sequence_number_is_a_whole_number(seq: Any) -> None:
    with pytest.raises(InvalidSetting):
        Head(seq, "a" * 64)


@pytest.mark.parametrize(
    ("seq", "value"), [(1, b"a" * 64), (1, "A" * 64), (1, "a" * 63), (1, "a" * 64 + "\n"), (0, "a" * 64), (1, GENESIS)]
)
def test_a_hash_is_64_digits_and_all_zeros_belong_to_an_empty_ledger(seq: int, value: Any) -> None:
    with pytest.raises(InvalidSetting):
        Head(seq, value)
    assert Head(0, "0" * 64) == EMPTY
