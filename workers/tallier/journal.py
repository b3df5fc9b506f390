"""A tallier's journal: its memory, and an entry in the chain of its ledger for every sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from labeler.ledger.database import Connection, Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.tallier_memory import TallierMemory
from labeler.system.erasable import ErasableKeys

SUMS = "rounds-summed"
"""The account in a tallier's ledger that counts sums."""


class TallierJournal:
    """A tallier's memory, with an entry in the ledger's chain for every sum.

    A journal that was replaced by an older copy would have forgotten which rounds were summed, and would sum them over
    other agents. The chain has a file that remembers its end, and the coordinator is told of it at every poll, so such
    a copy is found out. The entries are a count of rounds, not a price.
    """

    def __init__(self, database: Database, keys: ErasableKeys, ledger: Ledger) -> None:
        self.memory = TallierMemory(database, keys)
        self.database = database
        self._ledger = ledger
        ledger.open_account(SUMS, "agent", None)

    def sweep(self) -> list[str]:
        """See TallierMemory.sweep; to be called at the start of a process."""
        lost = self.memory.sweep()
        self.database.forget_log()
        return lost

    def fix(
        self, summed: Mapping[str, tuple[Collection[str], Collection[str], bytes]], *, connection: Connection
    ) -> None:
        """Fix whom rounds are summed over and what the sums are (TallierMemory.fix_open), with entries in the chain."""
        self.memory.fix_open(summed, connection=connection)
        for round_digest in summed:
            self._ledger.reserve(round_digest, [Charge(SUMS, "agent", 1)], connection=connection)
            self._ledger.post(round_digest, connection=connection)
