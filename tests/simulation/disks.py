"""A party's disk, read by connections of the witness's own: what is only in memory is not there.

What was read stays known until SQLite says that somebody else has committed to the file (`PRAGMA data_version`), which
costs a hundredth of reading it again. So a look at every rule after every step reads what is new, and misses nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from labeler.errors import NotFound
from labeler.ledger.agent_memory import AgentMemory, JournalRounds
from labeler.ledger.chain import Entry, entry_of
from labeler.ledger.database import Database, open_database
from labeler.ledger.jobs import JobRecord, JobStore, RoundRecord
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import SET_ASIDE
from labeler.ledger.schema import ledger_entries
from labeler.ledger.tallier_memory import TallierMemory
from labeler.ledger.tasks import TaskStore
from labeler.system.clock import Clock
from labeler.system.erasable import keys_in

_COLUMNS = tuple(column.name for column in ledger_entries.columns)
_ENTRIES = f"SELECT {', '.join(_COLUMNS)} FROM ledger_entries WHERE seq > ? ORDER BY seq"  # names of columns
_LIVED = "SELECT round_digest FROM life_rounds WHERE seq > ? ORDER BY seq"
_SPENT = "SELECT digest, spent FROM life_spends"


class _Peek:
    """Erasable keys as the disk has them; `labeler.system.erasable.ErasableKeys`, for looking only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        return keys_in(self._folder).get(name)

    def names(self) -> list[str]:
        return sorted(keys_in(self._folder))

    def draw(self, name: str) -> bytes:
        raise NotImplementedError(name)

    def draw_all(self, names: Collection[str]) -> None:
        raise NotImplementedError(names)

    def erase_all(self, names: Collection[str]) -> None:
        raise NotImplementedError(names)


class _Disk:
    """A journal, and whether it has changed."""

    def __init__(self, home: Path, owned: ExitStack, clock: Clock) -> None:
        path = home / "journal.db"
        self.database: Database = owned.enter_context(open_database(path, read_only=True, allow_unsynced=True))
        with self.database.read() as connection:  # the one thread that looks is given the same one every time
            self._connection: Any = connection.connection.driver_connection
        self._version = -1
        self._entries_at = -1
        self._reserved_at = -1
        self._reserved = False
        self.entries: list[Entry] = []
        self.ledger = Ledger(self.database, clock=clock, anchored=False)

    def version(self) -> int:
        """Another number whenever somebody has committed."""
        number: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
        return number

    def read_entries(self) -> list[Entry]:
        """Entries of the ledger that have come since the last time."""
        version = self.version()
        if version == self._entries_at:
            return []
        rows = self._connection.execute(_ENTRIES, (self.entries[-1].seq if self.entries else 0,)).fetchall()
        new = [entry_of(dict(zip(_COLUMNS, row, strict=True))) for row in rows]
        self.entries += new
        self._entries_at = version
        return new

    def set_aside(self) -> dict[str, int]:
        """Return what each account has set aside for votes for life, nano-units; in several entries, where it grew."""
        aside: dict[str, int] = {}
        for entry in self.entries:
            if entry.kind == "post" and (entry.reservation_id or "").startswith(SET_ASIDE):
                aside[entry.account] = aside.get(entry.account, 0) + entry.amount
        return aside

    def has_reserved(self) -> bool:
        """Return whether any account has charges that are neither final nor given back."""
        version = self.version()
        if version != self._reserved_at:
            self._reserved = any(one.reserved for one in self.ledger.balances())
            self._reserved_at = version
        return self._reserved


class CoordinatorDisk(_Disk):
    """What is on the coordinator's disk."""

    def __init__(self, home: Path, owned: ExitStack, clock: Clock) -> None:
        super().__init__(home, owned, clock)
        self.store, self.tasks = JobStore(self.database, clock=clock), TaskStore(self.database)
        self._jobs: dict[str, JobRecord] = {}
        self._rounds: dict[str, list[RoundRecord]] = {}
        self._by_digest: dict[str, RoundRecord] = {}

    def look(self) -> bool:
        """Read the jobs again if anything was committed; whether it was."""
        version = self.version()
        if version == self._version:
            return False
        with self.database.read() as connection:
            ids = [job_id for (job_id,) in connection.exec_driver_sql("SELECT job_id FROM jobs")]
            self._jobs = self.store.many(ids, connection=connection)
            self._rounds = self.store.rounds_of(ids, connection=connection) if ids else {}
        every = [one for rounds in self._rounds.values() for one in rounds]
        self._by_digest = {one.round_digest: one for one in every if one.round_digest}
        self._version = version
        return True

    @property
    def jobs(self) -> dict[str, JobRecord]:
        """Every job as it is now, by id."""
        self.look()
        return self._jobs

    def rounds(self, job_id: str) -> list[RoundRecord]:
        """The rounds of a job as they are now; none where there is no such job."""
        self.look()
        return self._rounds.get(job_id, [])

    def round_of(self, digest: str) -> RoundRecord:
        """The round of a digest as it is now.

        Raises:
            NotFound: there is none.
        """
        self.look()
        if digest not in self._by_digest:
            raise NotFound(f"there is no round {digest[:12]!r}")
        return self._by_digest[digest]


class AgentDisk(_Disk):
    """What is on an agent's disk."""

    def __init__(self, home: Path, owned: ExitStack, clock: Clock) -> None:
        super().__init__(home, owned, clock)
        self.memory = AgentMemory(self.database, self.ledger)
        self.keys = _Peek(home / "erasable")
        self.rounds = JournalRounds(self.database, self.keys)
        self._amounts: dict[tuple[str, str], int] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lived_at = -1

    def lived(self, *, after: int) -> tuple[list[str], dict[bytes, int]] | None:
        """Digests of the rounds that have spent votes for life behind so many, and what every image has spent now.

        None where nobody has committed since the last time.
        """
        version = self.version()
        if version == self._lived_at:
            return None
        self._lived_at = version
        self._connection.execute("BEGIN")  # both of one moment
        try:
            rounds = self._connection.execute(_LIVED, (after,)).fetchall()
            return [digest for (digest,) in rounds], dict(self._connection.execute(_SPENT).fetchall())
        finally:
            self._connection.execute("COMMIT")

    def charges(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(round, level) -> what the agent charged itself, and how often."""
        for entry in self.read_entries():
            if entry.kind == "post" and "round" in entry.detail:
                name = (str(entry.detail["round"]), entry.level)
                self._amounts[name] = entry.amount
                self._counts[name] += 1
        return {name: (amount, self._counts[name]) for name, amount in self._amounts.items()}


class TallierDisk(_Disk):
    """What is on a tallier's disk."""

    def __init__(self, home: Path, owned: ExitStack, clock: Clock) -> None:
        super().__init__(home, owned, clock)
        self.keys = _Peek(home / "erasable")
        self.memory = TallierMemory(self.database, self.keys)
