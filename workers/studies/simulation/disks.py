"""What lies on a party's disk, read by connections of the witness's own: what is only in memory is not there."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from feature_store.clock import Clock
from feature_store.erasable import keys_in
from feature_store.journal.agent_memory import AgentMemory
from feature_store.journal.agent_rounds import JournalRounds
from feature_store.journal.database import open_database
from feature_store.journal.ledger import Ledger
from feature_store.journal.tallier_memory import TallierMemory


class _Peek:
    """Erasable keys as they lie on the disk; `feature_store.erasable.ErasableKeys`, for looking only."""

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

    def erase(self, name: str) -> None:
        raise NotImplementedError(name)

    def erase_all(self, names: Collection[str]) -> None:
        raise NotImplementedError(names)


class AgentDisk:
    """What is on an agent's disk."""

    def __init__(self, home: Path, owned: ExitStack, clock: Clock) -> None:
        database = owned.enter_context(open_database(home / "journal.db", read_only=True, allow_unsynced=True))
        self.ledger = Ledger(database, clock=clock, anchored=False)
        self.memory = AgentMemory(database, self.ledger)
        self.keys = _Peek(home / "erasable")
        self.rounds = JournalRounds(database, self.keys)


class TallierDisk:
    """What is on a tallier's disk."""

    def __init__(self, home: Path, owned: ExitStack, clock: Clock) -> None:
        database = owned.enter_context(open_database(home / "journal.db", read_only=True, allow_unsynced=True))
        self.ledger = Ledger(database, clock=clock, anchored=False)
        self.keys = _Peek(home / "erasable")
        self.memory = TallierMemory(database, self.keys)
