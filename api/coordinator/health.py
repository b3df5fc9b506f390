"""Whether the service is there for a job: what it looks at, and what it says to whom."""

from __future__ import annotations

from collections.abc import Callable

from api.coordinator.config import CoordinatorConfig
from api.coordinator.readiness import Probe, agents_live, embedder_there, readiness, talliers_live
from api.coordinator.roster import Roster
from api.coordinator.witnesses import Witnesses
from api.schema import Check, ReadinessView
from feature_store.clock import Clock
from feature_store.journal.ledger import Ledger
from feature_store.mailbox import Mailbox
from labeler.errors import JournalBehind, TryAgain

READY = "jobs can be taken"
NOT_READY = "no job can be taken now; an administrator's token is told why"
"""All that leaves to whoever shows no administrator's token."""


def for_strangers(view: ReadinessView) -> ReadinessView:
    """Ready or not, and nothing of why: a reason counts jobs and charges, and says where the journal is."""
    said = READY if view.ready else NOT_READY
    return ReadinessView(ready=view.ready, checks=(Check(name="service", ok=view.ready, detail=said),))


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

    def readiness(self) -> ReadinessView:
        """Whether jobs can be taken, and what is missing: for an administrator."""
        needed, live_s = self._config.talliers, self._config.timing.live_s
        probes: dict[str, Probe] = {
            "journal": self._journal_probe,
            "storage": self._room,
            "redis": self._redis_probe,
            "embedder": self._embedder_probe,
            "talliers": lambda: talliers_live(self._roster.known("tallier"), needed, now=self._clock(), live_s=live_s),
            "agents": lambda: agents_live(self._roster.known("agent"), 1, now=self._clock(), live_s=live_s),
        }
        return readiness(probes)

    def _journal_probe(self) -> str:
        self.check_trusted()
        found = f"{self._ledger.head().seq} entries, chain checked at the start"
        doubters = self._witnesses.doubters
        if doubters:
            found += f"; seen further, as they say without proof, by: {', '.join(doubters[:5])}"
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
