"""What a journal says about itself: the version of its tables, and whether an upgrade of it is under way.

    version          of the tables; a program opens its own version and no other
    upgrading        stands while an upgrade runs: from which version to which, and the backup made before it
    owner            of a journal in PostgreSQL: the process that began to write it last (`ownership`)
    upgraded_to_N    stays: when, from which version, at which head of the ledger, and the name of that backup

Tables are added by name, without a new version: a store makes its own where they are missing. A new version is for
whatever an older program would read wrongly, and comes with a step in `feature_store.journal.migrations`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, MetaData, Table, Text, delete, insert, inspect, select, update
from sqlalchemy.schema import SchemaItem

from feature_store.journal.columns import json_text
from feature_store.journal.prepared import Prepared
from labeler.errors import InvalidSetting, JournalBroken

VERSION = 4
"""Of the tables. Older ones are upgraded first, newer ones are refused."""

OLDEST = 1
"""The oldest version that can be upgraded: the first there ever was."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
"""Every table of every journal; a process makes only those of the stores it opens (`Database.create`)."""


def strict_table(name: str, *parts: SchemaItem, **options: Any) -> Table:
    """A table of every journal that has its store, in which SQLite keeps the types of columns as PostgreSQL does."""
    return Table(name, metadata, *parts, sqlite_strict=True, **options)


journal_about = Table(
    "journal_about", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False)
)

_UPGRADING = "upgrading"
_OWNER = "owner"
_NAMES_IN_SQLITE = Prepared("SELECT name FROM sqlite_master WHERE type = 'table'")
_EVERYTHING = Prepared("SELECT name, value FROM journal_about")
_OWNER_OF = select(journal_about.c.value).where(journal_about.c.name == _OWNER)


@dataclass(frozen=True)
class About:
    """What a journal says about itself.

    Attributes:
        version: of its tables; 0 where it has none yet.
        upgrading: the mark of an upgrade that began and has not ended: from, to, backup. None where there is none.
    """

    version: int
    upgrading: Mapping[str, Any] | None = None

    @property
    def is_new(self) -> bool:
        """Nothing was ever written to it."""
        return self.version == 0

    @property
    def is_old(self) -> bool:
        """It can be upgraded."""
        return OLDEST <= self.version < VERSION


def tables_of(connection: Connection) -> frozenset[str]:
    """Names of the tables that are there."""
    if connection.dialect.name == "sqlite":
        # Asked as often as a journal is opened, and the library's inspection takes ten times as long.
        return frozenset(name for (name,) in _NAMES_IN_SQLITE.all(connection))
    return frozenset(inspect(connection).get_table_names())


def read_about(connection: Connection, what: str, *, tables: frozenset[str] | None = None) -> About:
    """Look what a journal says about itself.

    Args:
        what: the journal in words, for messages.
        tables: those that are there, where they are known.

    Raises:
        JournalBroken: it says what no program wrote.
    """
    if journal_about.name not in (tables_of(connection) if tables is None else tables):
        return About(0)
    found: dict[str, str] = dict(_EVERYTHING.all(connection))
    written = found.get("version", "")
    if not written.isascii() or not written.isdigit() or int(written) < OLDEST:
        raise JournalBroken(f"{what} names no version of its tables; restore the newest backup")
    mark = found.get(_UPGRADING)
    return About(int(written), None if mark is None else _mark(mark, what))


def check_current(about: About, what: str) -> None:
    """Refuse a journal that this program would read wrongly.

    Raises:
        JournalBroken: an upgrade of it stopped half way.
        InvalidSetting: its tables are of another version.
    """
    check_not_half(about, what)
    if about.version > VERSION:
        raise InvalidSetting(
            f"{what} has tables of version {about.version}, made by a newer program, and this one knows version "
            f"{VERSION}; use the newer program. Going back needs the backup that was made before the upgrade, and "
            "what was charged since then is then written off (`labeler journal accept-restored`)"
        )
    if about.version < VERSION:
        raise InvalidSetting(
            f"{what} has tables of version {about.version}, and this program works with version {VERSION}. Start its "
            "owner, which makes a backup and upgrades it, or run `labeler journal upgrade --home HOME`"
        )


def check_not_half(about: About, what: str) -> None:
    """Refuse a journal of which some steps of an upgrade are done and others not.

    A mark at the version where the upgrade began is no such journal: each step is one transaction, and none ended.

    Raises:
        JournalBroken: it names the backup to restore.
    """
    if about.upgrading is None or about.upgrading["from"] == about.version:
        return
    raise JournalBroken(
        f"an upgrade of {what} from version {about.upgrading['from']} to {about.upgrading['to']} stopped half way, at "
        f"version {about.version}. Restore the backup that was made before it ({about.upgrading['backup']}), as the "
        "page on deployment says under Upgrades, and start again"
    )


def write_version(connection: Connection, version: int) -> None:
    """Set the version of the tables."""
    _write(connection, "version", str(version))


def begin_upgrade(connection: Connection, mark: Mapping[str, Any]) -> None:
    """Mark a journal: an upgrade has begun."""
    _write(connection, _UPGRADING, json_text(dict(mark)))


def end_upgrade(connection: Connection) -> None:
    """Take the mark away."""
    connection.execute(delete(journal_about).where(journal_about.c.name == _UPGRADING))


def note_upgrade(connection: Connection, version: int, fields: Mapping[str, Any]) -> None:
    """Keep for ever how a journal came to a version."""
    _write(connection, f"upgraded_to_{version}", json_text(dict(fields)))


def is_laid_out(connection: Connection) -> bool:
    """Whether a journal has its first table. PostgreSQL asks its catalogue, which costs more than a small write."""
    return inspect(connection).has_table(journal_about.name)


def read_owner(connection: Connection) -> str | None:
    """Who began to write this journal last, which is laid out; None where nobody is named."""
    found: str | None = connection.execute(_OWNER_OF).scalar()
    return found


def write_owner(connection: Connection, name: str) -> None:
    """Name who writes from now on."""
    _write(connection, _OWNER, name)


def _write(connection: Connection, name: str, value: str) -> None:
    changed = connection.execute(update(journal_about).where(journal_about.c.name == name).values(value=value))
    if changed.rowcount == 0:
        connection.execute(insert(journal_about), {"name": name, "value": value})


def _mark(text: str, what: str) -> Mapping[str, Any]:
    try:
        mark = json.loads(text)
    except ValueError:
        mark = None
    if not isinstance(mark, dict) or mark.keys() != {"from", "to", "backup"}:
        raise JournalBroken(f"the mark of an upgrade of {what} cannot be read; restore the newest backup")
    return mark
