"""One of several coordinators, in this process on a real PostgreSQL: what it answers once its lease could be over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from starlette.types import Message

from api.coordinator.config import CoordinatorConfig, read_config
from api.coordinator.service import Coordinator
from api.leading import SideBySide
from labeler.errors import Unavailable
from tests.postgres_server import PostgresServer
from workers.federation.home import make_federation
from workers.federation.up import Plan

LEASE_S = 1.0


@pytest.fixture
def journal(postgres_server: PostgresServer) -> Iterator[str]:
    url = postgres_server.new_database()
    yield url
    postgres_server.give_back(url)


def settings_in(folder: Path, journal: str) -> CoordinatorConfig:
    """Those of a new home."""
    place = folder / "federation"
    place.mkdir(mode=0o700)
    settings = make_federation(place, Plan(agents=2)).coordinator / "coordinator.toml"
    settings.write_text(f"{settings.read_text()}\n[side_by_side]\nlease_s = {LEASE_S}\n")
    return read_config(settings).model_copy(update={"journal": journal})


def status_of(one: SideBySide, path: str) -> int:
    """What is answered to a request."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "server": ("127.0.0.1", 80),
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(one(scope, receive, send))
    return int(sent[0]["status"])


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_one_that_meets_a_defect_while_it_opens_the_journal_ends_and_gives_the_lease_back(
    journal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(_: CoordinatorConfig) -> Coordinator:
        raise MemoryError

    monkeypatch.setattr(Coordinator, "open", defect)
    is_lost = threading.Event()
    one = SideBySide(settings_in(tmp_path, journal), url="http://127.0.0.1:9", on_lost=is_lost.set)
    one.start()
    try:
        assert is_lost.wait(30)
        assert isinstance(one.failure, Unavailable)
    finally:
        one.stop()
    with psycopg.connect(journal) as looking:
        found = looking.execute("SELECT owner FROM coordinator_leases WHERE until > clock_timestamp()").fetchall()
    assert not found


def test_one_that_cannot_renew_its_lease_answers_nothing_from_the_moment_at_which_another_may_lead(
    journal: str, tmp_path: Path
) -> None:
    one = SideBySide(settings_in(tmp_path, journal), url="http://127.0.0.1:9", on_lost=lambda: None)
    one.start()
    try:
        wait_until(lambda: one.leads)
        assert status_of(one, "/healthz") == 200
        with psycopg.connect(journal) as holding:
            # Its next look waits, as it would for a server that a broken network hides.
            holding.execute("LOCK TABLE coordinator_leases IN ACCESS EXCLUSIVE MODE")
            time.sleep(LEASE_S)
            assert status_of(one, "/healthz") == 503
            assert status_of(one, "/v1/jobs") == 503
    finally:
        one.stop()
