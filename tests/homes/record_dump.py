"""Record a journal of the version whose code is on the path as PostgreSQL keeps it: a plain dump of pg_dump.

    cd CHECKOUT; PYTHONPATH=$PWD:HERE python /somewhere/record_dump.py HOME.tar.xz ROLE OUT.sql

The tables and rules are made by the checkout's own code; the rows come from a journal of a home that `record_home.py`
recorded (ROLE: coordinator, or agents/agent-1), put in while the rules are switched off, as a restore would.
"""

from __future__ import annotations

import importlib
import pkgutil
import sqlite3
import sys
import tarfile
import tempfile
from pathlib import Path

import psycopg
from sqlalchemy import create_engine

import feature_store.journal
from feature_store.journal.database import metadata


def main() -> None:
    from postgres_server import postgres_running

    archive, role, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    for module in pkgutil.iter_modules(feature_store.journal.__path__):
        importlib.import_module(f"feature_store.journal.{module.name}")
    with tempfile.TemporaryDirectory() as folder, postgres_running() as server:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        source = sqlite3.connect(Path(folder) / "federation" / role / "journal.db")
        present = {name for (name,) in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        url = server.new_database()
        tables = [table for table in metadata.sorted_tables if table.name in present]
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.begin() as connection:
            metadata.create_all(connection, tables=tables)
        engine.dispose()
        with psycopg.connect(url) as target:
            target.execute("SET session_replication_role = replica")
            for table in tables:
                names = ", ".join(table.columns.keys())
                holes = ", ".join(["%s"] * len(table.columns))
                for row in source.execute(f"SELECT {names} FROM {table.name}"):
                    target.execute(f"INSERT INTO {table.name} ({names}) VALUES ({holes})", row)
        server.dump(url, out, "--no-owner", "--no-privileges")


if __name__ == "__main__":
    main()
