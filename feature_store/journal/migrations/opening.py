"""A journal opened by its owner at its start: upgraded first where it is of an earlier version, never without a backup.

A SQLite journal is copied beside itself: journal.db.v2-20270301T120000Z, readable by its owner only, verified, with an
anchor of its own. It holds what the journal held, so it is as secret, and it goes when the operator removes it. A
journal in PostgreSQL is upgraded once its operator names a dump of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import UTC
from pathlib import Path

from feature_store.clock import Clock, now_utc
from feature_store.journal.about import VERSION, About
from feature_store.journal.backup import backup
from feature_store.journal.chain import Head
from feature_store.journal.database import Database, open_database
from feature_store.journal.migrations.dumps import check_dump
from feature_store.journal.migrations.runner import Save, Upgraded, upgrade
from labeler.errors import InvalidSetting

log = logging.getLogger("labeler.journal")

COPY_TIME = "%Y%m%dT%H%M%S%fZ"
COPY_NAME = re.compile(r"\.v[0-9]+-([0-9]{8}T[0-9]{12}Z)(?:\.head)?")
"""How the copy of a journal, and the anchor beside it, are called after the journal: version, and when it was made."""


def open_upgraded(
    target: str | Path,
    *,
    anchor: Path,
    dump: Path | None = None,
    clock: Clock = now_utc,
    tell: Callable[[Upgraded], None] | None = None,
) -> Database:
    """Open a journal for writing, at this program's version.

    Args:
        target, anchor: see `open_database`.
        dump: a file of pg_dump, for a journal in PostgreSQL that has to be upgraded.
        tell: hears of an upgrade that was done; it is logged in any case.

    Raises:
        LabelerError: see `open_database` and `upgrade`; nothing was changed without a backup.
    """
    database = open_database(target, anchor=anchor)
    try:
        done = upgrade(database, save=_saving(database, dump, clock), clock=clock)
    except BaseException:
        database.close()
        raise
    if done is not None:
        log.warning(
            "journal upgraded",
            extra={"from_version": done.source, "to_version": done.target, "backup": done.backup},
        )
        if tell is not None:
            tell(done)
    return database


def _saving(database: Database, dump: Path | None, clock: Clock) -> Save:
    def save_sqlite(about: About, _: Head) -> str:
        path = database.path
        assert path is not None  # noqa: S101  # SQLite's
        copy = path.with_name(f"{path.name}.v{about.version}-{clock().astimezone(UTC):{COPY_TIME}}")
        backup(path, copy, anchor=copy.with_name(f"{copy.name}.head"))
        return copy.name

    def save_postgresql(about: About, head: Head) -> str:
        if dump is None:
            raise InvalidSetting(
                f"{database.what} has tables of version {about.version}, and this program works with version "
                f"{VERSION}. It is upgraded once there is a copy of it: run `pg_dump --file FILE URL`, then "
                "`labeler journal upgrade --home HOME --dump FILE`"
            )
        check_dump(dump, head)
        return dump.name

    return save_sqlite if database.dialect == "sqlite" else save_postgresql
