"""One of several coordinators, in this process on a real PostgreSQL: what it answers once its lease could be over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from starlette.types import Message

from api.coordinator.config import read_config
from api.leading import SideBySide
from tests.postgres_server import PostgresServer
from workers.federation.home import make_federation
from workers.federation.plan import Plan

LEASE_S = 1.0


@pytest.fixture
def journal(postgres_server: PostgresServer) -> Iterator[str]:
    url = postgres_server.new_database()
    yield url
    postgres_server.give_back(url)


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


def test_one_that_cannot_renew_its_lease_answers_nothing_from_the_moment_at_which_another_may_lead(
    journal: str, tmp_path: Path
) -> None:
    place = tmp_path / "federation"
    place.mkdir(mode=0o700)
    home = make_federation(place, Plan(agents=2)).coordinator
    settings = home / "coordinator.toml"
    settings.write_text(f"{settings.read_text()}\n[side_by_side]\nlease_s = {LEASE_S}\n")
    config = read_config(settings).model_copy(update={"journal": journal})
    one = SideBySide(config, url="http://127.0.0.1:9", on_lost=lambda: None)
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
