"""The server that tests share gives no test what another left behind."""

from __future__ import annotations

from pathlib import Path

import psycopg

from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from tests.labeler.ledger.conftest import Clock
from tests.postgres_server import PostgresServer


def test_a_database_that_is_given_back_comes_again_without_a_table(
    postgres_server: PostgresServer, tmp_path: Path, clock: Clock
) -> None:
    url = postgres_server.new_database()
    with open_database(url, anchor=tmp_path / "head") as database:
        Ledger(database, clock=clock)
    postgres_server.give_back(url)
    assert postgres_server.new_database() == url
    with psycopg.connect(url) as connection:
        left = connection.execute("SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace")
        assert left.fetchone() == (0,)
        functions = connection.execute("SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
        assert functions.fetchone() == (0,)


def test_a_database_with_a_setting_or_a_guest_or_another_schema_is_not_used_again(
    postgres_server: PostgresServer,
) -> None:
    settled, schemed, visited = (postgres_server.new_database() for _ in range(3))
    with psycopg.connect(settled, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = off")
    with psycopg.connect(schemed, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA another")
    with psycopg.connect(visited):
        for url in (settled, schemed, visited):
            postgres_server.give_back(url)
    assert postgres_server.new_database() not in (settled, schemed, visited)
