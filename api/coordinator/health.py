"""Whether the service is there for a job: what it looks at, and what it says to whom."""

from __future__ import annotations

from collections.abc import Callable

from api.coordinator.config import CoordinatorConfig
from api.coordinator.readiness import Probe, agents_live, embedder_there, readiness, talliers_live
from api.coordinator.roster import Roster
from api.coordinator.witnesses import Witnesses
from api.schema import ReadinessView
from feature_store.clock import Clock
from feature_store.journal.ledger import Ledger
from feature_store.mailbox import Mailbox
from labeler.errors import JournalBehind, TryAgain


class Health:
    """See the module.

    Args:
        witnesses: what parties have seen of the journal.
        room: raises where the disk has none.
        waiting_for_embedder: how many jobs cannot go on without one.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        ledger: Ledger,
        *,
        witnesses: Witnesses,
        roster: Roster,
        mailbox: Mailbox,
        room: Probe,
        waiting_for_embedder: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._witnesses = witnesses
        self._roster = roster
        self._mailbox = mailbox
        self._room = room
        self._waiting_for_embedder = waiting_for_embedder
        self._clock = clock

    def readiness(self, *, is_named: bool = True) -> ReadinessView:
        """Whether jobs can be taken, and what is missing.

        Args:
            is_named: whether parties are named and entries counted; for strangers they are not.
        """
        needed, live_s = self._config.talliers, self._config.timing.live_s
        probes: dict[str, Probe] = {
            "journal": lambda: self._journal_probe(is_named=is_named),
            "storage": self._room,
            "redis": self._redis_probe,
            "embedder": self._embedder_probe,
            "talliers": lambda: talliers_live(
                self._roster.known("tallier"), needed, now=self._clock(), live_s=live_s, is_named=is_named
            ),
            "agents": lambda: agents_live(
                self._roster.known("agent"), 1, now=self._clock(), live_s=live_s, is_named=is_named
            ),
        }
        return readiness(probes)

    def _journal_probe(self, *, is_named: bool) -> str:
        if not is_named and self._witnesses.sentence:
            raise JournalBehind("a party has seen, with proof, entries of this journal that it does not hold")
        self.check_trusted()
        entries = self._ledger.head().seq
        # To strangers no number: watched, it tells when somebody's job is charged.
        found = f"{entries} entries, chain checked at the start" if is_named else "chain checked at the start"
        doubters = self._witnesses.doubters
        if doubters:
            who = ", ".join(doubters[:5]) if is_named else f"{len(doubters)} parties"
            found += f"; seen further, as they say without proof, by: {who}"
        return found

    def _redis_probe(self) -> str:
        self._mailbox.check()
        return "answers, and evicts nothing"

    def _embedder_probe(self) -> str:
        try:
            is_there = self._mailbox.is_alive("embedder")
        except TryAgain:
            return "not known while redis cannot be reached"
        return embedder_there(is_there, self._waiting_for_embedder())

    def check_trusted(self) -> None:
        """Refuse jobs while a party has proven that charges are missing from the journal.

        Raises:
            JournalBehind: they are, so nothing can be promised.
        """
        behind = self._witnesses.sentence
        if behind:
            raise JournalBehind(f"{behind}. No job is taken until the newest journal is restored; see docs/operate.md")
