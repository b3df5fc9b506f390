"""A journal on SQLite and one on PostgreSQL, for every test that asks for one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger

T = TypeVar("T")


def program(text: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a program of a few lines, in a separate process; `communicate` ends its input and waits for its end."""
    command, pipe = [sys.executable, "-c", text, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[3])


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 1, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def turn(self, **by: float) -> None:
        self.now += timedelta(**by)


@dataclass
class Place:
    """The place of one journal, and everything that was opened there."""

    dialect: str
    target: str
    anchor: Path
    opened: list[Database] = field(default_factory=list)

    def open(self, *, read_only: bool = False, with_anchor: bool = True) -> Database:
        database = open_database(self.target, anchor=self.anchor if with_anchor else None, read_only=read_only)
        self.opened.append(database)
        return database

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


@contextmanager
def undone(database: Database) -> Iterator[Connection]:
    """A transaction that is undone where it ends."""
    with suppress(KeyError), database.write() as connection:
        yield connection
        raise KeyError


def at_once(count: int, step: Callable[[int], T], *refusals: type[Exception]) -> list[T | None]:
    """What each of so many threads gets of a step that all take together; None where it is refused."""
    start = Barrier(count)

    def take(number: int) -> T | None:
        start.wait()
        try:
            return step(number)
        except refusals:
            return None

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(take, range(count)))


def refuses(database: Database, *statements: str) -> None:
    """The database itself refuses each; what is refused changes nothing, so all of them meet the one journal."""
    for statement in statements:
        try:
            with database.write() as connection:
                connection.exec_driver_sql(statement)
        except IntegrityError:
            continue
        pytest.fail(f"{database.dialect} took {statement}")


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place without a journal yet; on PostgreSQL, where that is much work, one without an entry."""
    server = None if request.param == "sqlite" else request.getfixturevalue("postgres_server")
    target = str(tmp_path / "journal.db") if server is None else server.new_journal()
    place = Place(request.param, target, tmp_path / "journal.head")
    yield place
    place.close()
    if server is not None:
        server.drop(target)


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Iterator[Place]:
    """A place without a journal yet, on SQLite."""
    place = Place("sqlite", str(tmp_path / "journal.db"), tmp_path / "journal.head")
    yield place
    place.close()


@pytest.fixture
def database(place: Place) -> Database:
    """An open journal without tables, with an anchor."""
    return place.open()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(database: Database, clock: Clock) -> Ledger:
    """A ledger with the account 'federation', instance level, cap 100."""
    ledger = Ledger(database, clock=clock)
    ledger.open_account("federation", "instance", 100)
    return ledger


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many values, `make test` runs the first on PostgreSQL; what the database itself refuses, all.

    A value is checked in Python before any SQL: the other cells would pass the same lines with another driver below.
    """
    seen: set[str] = set()
    for item in items:
        name, _, cell = item.name.partition("[")
        of_the_sql = any(word in name for word in ("database_itself", "postgresql", "entry_that", "balance_that"))
        if item.path.parent != Path(__file__).parent or "postgresql" not in cell or of_the_sql:
            continue
        if (test := f"{item.path}::{name}") in seen:
            item.add_marker(pytest.mark.long)
        seen.add(test)
