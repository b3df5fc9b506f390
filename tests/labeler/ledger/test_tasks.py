"""Tasks are kept as they were made, and each of their queries is given out once."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from labeler.errors import InvalidSetting, JournalBroken, NotFound, ProtocolViolation
from labeler.ledger.database import Database
from labeler.ledger.tasks import TaskRecord, TaskStore
from labeler.task import Task
from tests.labeler.ledger.conftest import at_once, refuses, undone

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def a_task(nonce: str = "", **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "name": "cats", "method": "knn", "classes": ("cat", "dog"), "k": 3, "sigma_votes": 12.5, "delta": 1e-5,
        "max_queries": 10,
        "agents": 3, "nonce": nonce,
    }  # fmt: skip
    return Task(**fields | changes)


def a_record(nonce: str = "", at: datetime = NOW, **changes: Any) -> TaskRecord:
    return TaskRecord(a_task(nonce, **changes), ("a", "b", "c"), at, "tok_1")


@pytest.fixture
def store(database: Database) -> TaskStore:
    return TaskStore(database)


def test_a_task_is_read_as_it_was_written_and_the_same_again_changes_nothing(store: TaskStore) -> None:
    record = a_record(sigma_votes=0.1 + 0.2)
    assert store.add(record) == record
    later = TaskRecord(record.task, ("c", "b", "a"), NOW + timedelta(hours=1), "tok_2")
    assert store.add(later) == record
    assert store.get(record.digest) == record
    assert store.get(record.digest).created_at.tzinfo is UTC


def test_a_task_with_other_participants_is_another_task(store: TaskStore) -> None:
    record = store.add(a_record())
    with pytest.raises(ProtocolViolation, match="other participants"):
        store.add(TaskRecord(record.task, ("a", "b", "d"), NOW, "tok_1"))


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "b"), ("a", "b", "c", "d")])
def test_participants_are_as_many_as_the_task_says_each_once(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidSetting, match="3 agents"):
        TaskRecord(a_task(), names, NOW, "tok_1")


def test_an_unknown_task_is_not_found(store: TaskStore) -> None:
    with pytest.raises(NotFound):
        store.get("0" * 64)
    with pytest.raises(NotFound):
        store.claim_queries("0" * 64, 1)


def test_queries_are_given_out_in_order_and_no_more_than_there_are(store: TaskStore) -> None:
    digest = store.add(a_record()).digest
    assert [store.claim_queries(digest, count) for count in (4, 1, 3)] == [0, 4, 5]
    with pytest.raises(InvalidSetting, match="only 2 of the 10"):
        store.claim_queries(digest, 3)
    assert store.get(digest).queries_left == 2
    assert store.claim_queries(digest, 2) == 8
    for count in (0, -1, True, 1.0):
        with pytest.raises(InvalidSetting):
            store.claim_queries(digest, count)  # type: ignore[arg-type]


def test_queries_of_a_transaction_that_is_undone_are_given_out_again(store: TaskStore, database: Database) -> None:
    digest = store.add(a_record()).digest
    with undone(database) as connection:
        assert store.claim_queries(digest, 5, connection=connection) == 0
    assert store.claim_queries(digest, 10) == 0


def test_no_query_is_given_to_two_jobs_at_the_same_time(store: TaskStore) -> None:
    digest = store.add(a_record(max_queries=40)).digest
    assert sorted(at_once(20, lambda _: store.claim_queries(digest, 2))) == list(range(0, 40, 2))


def test_a_list_is_newest_first_and_its_pages_meet_without_gap_or_repeat(store: TaskStore) -> None:
    records = [store.add(a_record(str(number), NOW + timedelta(seconds=number // 2))) for number in range(7)]
    expected = sorted((one.created_at, one.digest) for one in records)[::-1]
    found: list[TaskRecord] = []
    after = None
    while page := store.list(after=after, limit=3):
        found += page
        after = page[-1].cursor
    assert [(one.created_at, one.digest) for one in found] == expected


MALFORMED = [
    "", "x", "!!!!", "é", "A" * 5000, base64.b64encode(b"[1,2]").decode(), base64.b64encode(b'["now","x"]').decode(),
    base64.b64encode(b'["2026-03-01T12:00:00.000000Z"]').decode(), base64.b64encode(b"\xff\xfe").decode(),
    base64.b64encode(b"[" * 600).decode(), base64.b64encode(b'["2026-03-01T12:00:00.000000Z","\\u0000"]').decode(),
    base64.b64encode(b'["2026-03-01T12:00:00.000000Z","\\ud800"]').decode(),
]  # fmt: skip


def test_a_malformed_cursor_and_a_page_beyond_its_bounds_are_refused(store: TaskStore) -> None:
    for after in MALFORMED:
        with pytest.raises(InvalidSetting, match="after"):
            store.list(after=after)
    for limit in (0, -1, 1001, True):
        with pytest.raises(InvalidSetting, match="limit"):
            store.list(limit=limit)


def test_the_database_itself_keeps_a_task_as_it_is(store: TaskStore, database: Database) -> None:
    digest = store.add(a_record()).digest
    store.claim_queries(digest, 2)
    before = store.get(digest)
    refuses(
        database,
        "UPDATE tasks SET next_query = next_query - 1",
        "UPDATE tasks SET next_query = 11",
        "UPDATE tasks SET participants = '[]'",
        "UPDATE tasks SET body = '{}'",
        "UPDATE tasks SET max_queries = 100",
        "DELETE FROM tasks",
    )
    assert store.get(digest) == before


def test_a_task_that_was_changed_in_the_file_is_found_out(store: TaskStore, database: Database) -> None:
    digest = store.add(a_record()).digest
    drop = "DROP TRIGGER tasks_stay" + (" ON tasks" if database.dialect == "postgresql" else "")
    with database.write() as connection:
        connection.execute(text(drop))
        connection.execute(text("UPDATE tasks SET body = replace(body, '12.5', '1.5')"))
    with pytest.raises(JournalBroken, match="changed"):
        store.get(digest)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="time zone"):
        a_record(at=datetime(2026, 3, 1))  # noqa: DTZ001  # what is refused
