"""The readiness of the service: every part that a round needs is asked, one that is silent is named, and to whom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from importlib.metadata import version

from api.coordinator.config import CoordinatorConfig
from api.coordinator.roster import Roster
from api.coordinator.witnesses import Witnesses
from api.schema import Check, ReadinessView
from labeler.driver.mail import Mailbox
from labeler.errors import JournalBehind, LabelerError, NotReady, TryAgain
from labeler.ledger.ledger import Ledger
from labeler.ledger.parties import PartyRecord
from labeler.system.clock import Clock

Probe = Callable[[], str]
"""Looks at one part; returns what it found, in words; raises LabelerError where the part is not ready."""


def readiness(probes: Mapping[str, Probe]) -> ReadinessView:
    """Ask every part once.

    Args:
        probes: by name, in the order in which they are shown: for example "journal", "redis", "talliers", "agents".
    """
    checks = tuple(_check(name, probe) for name, probe in probes.items())
    return ReadinessView(ready=all(check.ok for check in checks), checks=checks, version=version("private-labeler"))


def talliers_live(talliers: Collection[PartyRecord], needed: int, *, now: datetime, live_s: float) -> str:
    """Every tallier is there: a secret share that nobody holds cannot be added up.

    Args:
        live_s: a party heard of within this counts as there.

    Raises:
        NotReady: one is not enrolled, or silent.
    """
    active = {party.tallier: party for party in talliers if party.state == "active"}
    missing = [str(number) for number in range(needed) if number not in active]
    if missing:
        raise NotReady(f"tallier number {', '.join(missing)} of {needed} is not enrolled")
    silent = [
        active[number].party_id for number in range(needed) if not is_live(active[number], now=now, live_s=live_s)
    ]
    if silent:
        raise NotReady(f"talliers not heard of for {live_s:g} s: {', '.join(silent)}")
    return f"{needed} of {needed} are there"


def agents_live(agents: Collection[PartyRecord], quorum: int, *, now: datetime, live_s: float) -> str:
    """Enough agents are there.

    Args:
        quorum: how many are needed, at least; of all active ones where no task says otherwise.
        live_s: heard of within this many seconds counts as there.

    Raises:
        NotReady: fewer than the quorum.
    """
    active = [party for party in agents if party.state == "active"]
    there = [party for party in active if is_live(party, now=now, live_s=live_s)]
    if not active or len(there) < quorum:
        silent = sorted({party.party_id for party in active} - {party.party_id for party in there})
        named = ", ".join(silent[:5]) + (" ..." if len(silent) > 5 else "")
        raise NotReady(
            f"{len(there)} of {len(active)} agents are there, {quorum} are needed"
            + (f"; silent: {named}" if named else "")
        )
    return f"{len(there)} of {len(active)} are there"


def embedder_there(is_there: bool, waiting: int) -> str:
    """Somebody prepares the questions of jobs that wait for theirs.

    Args:
        is_there: whether an embedder was heard of lately.
        waiting: jobs whose images have no features yet.

    Raises:
        NotReady: jobs wait, and nobody is there.
    """
    if is_there:
        return "is there"
    if waiting:
        jobs = "1 job waits" if waiting == 1 else f"{waiting} jobs wait"
        raise NotReady(f"no embedder was heard of lately, and {jobs} for questions; start `labeler embedder`")
    return "not heard of lately; the next job will wait until one is started (labeler embedder)"


def is_live(party: PartyRecord, *, now: datetime, live_s: float) -> bool:
    """Whether a party was heard of lately."""
    return party.last_contact is not None and now - party.last_contact <= timedelta(seconds=live_s)


def _check(name: str, probe: Probe) -> Check:
    try:
        return Check(name=name, ok=True, detail=probe())
    except LabelerError as error:
        return Check(name=name, ok=False, detail=str(error))


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
