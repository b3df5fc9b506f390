"""The revision of a journal's tables: created at the newest, upgraded by Alembic, and refused if it is newer.

    alembic_version     one row: the revision, REVISION of `labeler.ledger.schema` in this program's journals
    versions/           a module for each revision; the first one is what the schema makes of an empty journal.

An upgrade is one write transaction of the journal's owner, in SQLite as in PostgreSQL. It is committed only if the
ledger, read again from its first entry, ends as it did before. A process that dies in it leaves the journal as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, inspect, text

from labeler.errors import InvalidSetting, JournalBroken
from labeler.ledger import schema
from labeler.ledger.verification import verify_ledger

if TYPE_CHECKING:
    from labeler.ledger.database import Database

VERSIONS: list[Path] = [Path(__file__).parent / "versions"]
"""Folders of revisions."""

_TABLE: Final = "alembic_version"


def prepare(database: Database) -> None:
    """Create the tables of a new journal, or upgrade those of an earlier revision; its owner calls it.

    Raises:
        JournalBroken: it names no revision, or the chain does not hold, before or after the upgrade.
        InvalidSetting: it was made by a newer program.
    """
    with database.write() as connection:
        found = _revision(connection, database.what)
        if not found:
            schema.metadata.create_all(connection, checkfirst=False)
            connection.execute(text(f"CREATE TABLE {_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
            connection.execute(text(f"INSERT INTO {_TABLE} VALUES (:revision)"), {"revision": schema.REVISION})
    if found and found != schema.REVISION:
        _upgrade(database, found)
    database.claim()


def check_revision(database: Database) -> None:
    """Refuse to read a journal that this program would misread.

    Raises:
        InvalidSetting: its tables are of another revision.
        JournalBroken: it names none.
    """
    with database.read() as connection:
        found = _revision(connection, database.what)
    if found != schema.REVISION:
        raise InvalidSetting(
            f"{database.what} has tables of revision {found or 'none'}, and this program works with {schema.REVISION}: "
            "start its owner once, which brings it there; or use the newer program that made it"
        )


def _revision(connection: Connection, what: str) -> str:
    """Return the revision of a journal's tables; empty if it has none yet."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return ""
    found = None
    if _TABLE in tables:
        found = connection.execute(text(f"SELECT version_num FROM {_TABLE}")).scalar()
    if found is None and "ledger_entries" in tables:
        raise JournalBroken(f"{what} names no revision of its tables; restore the newest backup")
    return found or ""


def _upgrade(database: Database, found: str) -> None:
    # Imported only here: almost every start finds the newest revision.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(map(str, VERSIONS)).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found not in known:
        raise InvalidSetting(
            f"{database.what} has tables of revision {found}, made by a newer program, and this one knows them up to "
            f"{schema.REVISION}; use the newer program, or restore a backup made before it was started"
        )
    with database.remodel() as connection:
        before = verify_ledger(connection)
        attributes: dict[Any, Any] = config.attributes
        attributes["connection"] = connection
        command.upgrade(config, schema.REVISION)
        if verify_ledger(connection) != before:
            raise JournalBroken(
                f"an upgrade from revision {found} changed the ledger of {database.what}; nothing of it was kept. Go "
                "on with the program that made the journal, and report this"
            )
