"""A new SQLite journal that has its tables already: for journals that are made often, one in each job's folder.

Making the tables of a coordinator's journal takes a commit for each store and thirty milliseconds, more than a small
job takes. So they are made once in each process, in memory and by the same statements, and every new journal begins as
a copy of that file.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Table, create_engine

from feature_store.durable import replace_file
from feature_store.journal.about import VERSION, journal_about, metadata, write_version

_WAL = b"\x02\x02"
"""Bytes 18 and 19 of a SQLite file whose journal is a write-ahead log; as every journal of ours is."""


def lay_blank(path: Path, tables: tuple[Table, ...]) -> bool:
    """Make a journal with these tables, readable by its owner only, where there is none.

    Args:
        path: of the journal; a file that lies there is left alone.
        tables: of the stores that will be opened over it.

    Returns:
        Whether it was made now.
    """
    if path.exists():
        return False
    replace_file(path, _blank(tables), mode=0o600)
    return True


@lru_cache(maxsize=4)
def _blank(tables: tuple[Table, ...]) -> bytes:
    engine = create_engine("sqlite://")
    try:
        with engine.connect() as connection:
            with connection.begin():
                metadata.create_all(connection, tables=[journal_about, *tables])
                write_version(connection, VERSION)
            raw: Any = connection.connection.driver_connection
            data: bytes = raw.serialize()
    finally:
        engine.dispose()
    return data[:18] + _WAL + data[20:]
