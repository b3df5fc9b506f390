"""Agents and talliers of a simulated federation: the real ones, wired as their processes wire them.

A turn is one poll and all that follows from it, by the very loop of the process (`workers.party.link.converse`).
Where the process would wait for the coordinator in the middle of its work, it tries again at once a few times. Then it
stops, and begins again from its home, as after a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from feature_store.shard import claim
from labeler.errors import LabelerError
from labeler.ledger.agent_memory import AgentMemory, JournalRounds
from labeler.ledger.backup import check_home, mark_home
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.ledger.promises import PromiseStore
from labeler.messages import Message
from labeler.system.erasable import ERASABLE_FOLDER, KeyFolder
from labeler.system.keys import PartyKeys
from tests.oracles.winner_reference import ReferenceEngine
from tests.simulation.contract import VirtualClock
from workers.agent.decisions import Admission
from workers.agent.driver import AgentDriver
from workers.agent.ledger import DurableLedger
from workers.agent.policy import Policy
from workers.agent.public_clock import PublicClock
from workers.agent.service import _Records, account_of
from workers.party.coordinator import CoordinatorDoor
from workers.party.home import (
    ANCHOR_FILE,
    JOURNAL_FILE,
    KEYS_FILE,
    read_agent_config,
    read_tallier_config,
)
from workers.party.link import Handler, Outgoing, PartyLink, converse
from workers.tallier.peers import read_group
from workers.tallier.service import TallierDriver, TallierJournal
from workers.tallier.winners import WinnerRounds
from workers.winner.engine import Outcome, WinnerOrder

_REAL_S = 60.0
"""Of this machine's time, that a computation may take."""

_TRIES = 3
"""How often a party whose request was lost in the middle of its work tries again before it is told to stop."""

URL = "http://127.0.0.1:1"
"""Nobody listens there; every request goes through the door."""


class TurnStop(threading.Event):
    """A process's stop signal that is given after every turn, and whose waits take no time."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False
        self._tries = 0
        self.is_working = False
        self.is_broken = False

    def begin(self) -> None:
        """A turn begins."""
        self._is_over, self._tries, self.is_working, self.is_broken = False, _TRIES, False, False

    def end(self) -> None:
        """The turn is over."""
        self._is_over = True

    def is_set(self) -> bool:
        """Return whether the turn is over."""
        return self._is_over

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002  # in virtual time nobody waits
        """Return True, so that it stops. In the middle of work, only after a few tries."""
        if self.is_working and self._tries > 0:
            self._tries -= 1
            return False
        self.is_broken = self.is_working
        self._is_over = True
        return True


class Party:
    """A party that lives: the loop of its process, one turn at a time."""

    def __init__(
        self,
        link: PartyLink,
        handler: Handler,
        stop: TurnStop,
        owned: ExitStack,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = link
        self._handler = handler
        self._stop = stop
        self._owned = owned
        self._look = look

    def turn(self) -> bool:
        """Run one poll and what follows; False if the process has ended by itself.

        What an agent's thread does by the clock is done between turns.
        """
        self._look()
        self._stop.begin()
        converse(self._link, self, self._stop)
        return not self._stop.is_broken

    def close(self) -> None:
        """Let go of everything; what is not on disk is lost."""
        self._owned.close()

    # The handler, and where a turn begins to work and ends.

    def tidy(self) -> None:
        """See Handler."""
        self._handler.tidy()

    @property
    def due_in_s(self) -> float | None:
        """See Handler."""
        return self._handler.due_in_s

    def handle(self, mail: Sequence[Message]) -> Sequence[Outgoing]:
        """See Handler."""
        self._stop.is_working = True
        return self._handler.handle(mail)

    def sent(self, letters: Sequence[Outgoing], errors: Sequence[LabelerError | None]) -> None:
        """See Handler."""
        self._handler.sent(letters, errors)
        self._stop.is_working = False
        self._stop.end()


def mark_records(shard: Path, agent_id: str) -> None:
    """Mark a shard for an agent before any journal is there: all templates share shards, each has journals of its own,
    and no schedule writes a mark that another finds."""
    claim(shard, agent_id=agent_id, journal=_journal_of(agent_id))


def _journal_of(agent_id: str) -> str:
    return agent_id.encode().hex()


def boot_agent(
    home: Path,
    *,
    door: CoordinatorDoor,
    policy: Callable[[], Policy],
    clock: VirtualClock,
    keys: PartyKeys | None = None,
) -> Party:
    """An agent as `workers.agent.service.run_agent` makes it from its home."""
    config = read_agent_config(home)
    stop = TurnStop()
    with ExitStack() as owned:
        database, ledger, erasable = _opened(home, owned, clock)
        memory, promises = AgentMemory(database, ledger), PromiseStore(database, ledger)
        rounds = JournalRounds(database, erasable)
        account = account_of(config.agent_id)
        site = DurableLedger(database, memory, ledger, promises, account=account, read_policy=policy, clock=clock.utc)
        site.open_accounts()
        mark_home(database, erasable)
        rounds.sweep()
        records = _Records(home, config, LifetimeSpends(database), journal=_journal_of(config.agent_id))
        link = PartyLink(
            url=URL,
            party_id=config.agent_id,
            keys=keys or PartyKeys.load(home / KEYS_FILE),
            coordinator_key=policy().coordinator.verify_key,
            home=home,
            ledger=ledger,
            clock=clock.utc,
            facts=records.facts,
            stop=stop,
            wait_s=0.0,
            door=door,
        )
        admission = Admission(
            home,
            memory,
            read_policy=policy,
            coordinator_key=link.coordinator_key,
            clock=clock.utc,
        )
        driver = AgentDriver(
            link.mail,
            coordinator_key=link.coordinator_key,
            records=records,
            database=database,
            rounds=rounds,
            promises=promises,
            ledger=site,
            admission=admission,
            clock=clock.utc,
            public_clock=PublicClock(
                tick_s=0.1, estimate_s=lambda _: 0.0, started=clock.steady_s, ticks=clock.steady_s
            ),
        )
        return Party(link, driver, stop, owned.pop_all(), records.look)


class MeetingRoom(ReferenceEngine):
    """The engine of the three talliers of one simulated federation, in which nobody waits.

    Between processes the three calls of a job run at the same time. Here one tallier has its turn after the other, so
    who comes first is told that the others are not there yet, as by a job that was stopped, and is asked again; what it
    brought stays in the room. The last to come finds all three.
    """

    def winners(
        self,
        orders: Sequence[WinnerOrder],
        stop: threading.Event | None = None,
        *,
        met: threading.Event | None = None,
    ) -> list[Outcome]:
        """See WinnerEngine."""
        stop = threading.Event()
        stop.set()
        return super().winners(orders, stop, met=met)


class PromptWinners(WinnerRounds):
    """Computations that have ended when they have begun, as their engine never waits: whether a thread was fast enough
    is not for a schedule to depend on."""

    def begin(self) -> None:
        """See WinnerRounds."""
        super().begin()
        self.wait(_REAL_S)


def boot_tallier(home: Path, *, door: CoordinatorDoor, room: MeetingRoom, clock: VirtualClock) -> Party:
    """A tallier as `workers.tallier.service.run_tallier` makes it from its home."""
    config = read_tallier_config(home)
    stop = TurnStop()
    with ExitStack() as owned:
        database, ledger, erasable = _opened(home, owned, clock)
        journal = TallierJournal(database, erasable, ledger)
        mark_home(database, erasable)
        journal.sweep()
        keys = PartyKeys.load(home / KEYS_FILE)
        winners = PromptWinners(
            read_group(home, own_verify_key=keys.public.verify_key), keys, engine=room, patience_s=0.0
        )
        owned.callback(winners.close)
        link = PartyLink(
            url=URL,
            party_id=config.tallier_id,
            keys=keys,
            coordinator_key=config.coordinator_verify_key,
            home=home,
            ledger=ledger,
            clock=clock.utc,
            facts=lambda: winners.facts,
            stop=stop,
            wait_s=0.0,
            door=door,
        )
        driver = TallierDriver(
            link.mail,
            coordinator_key=link.coordinator_key,
            coordinator_seal_key=config.coordinator_seal_key,
            agents=config.agents,
            journal=journal,
            winners=winners,
            clock=clock.utc,
        )
        return Party(link, driver, stop, owned.pop_all())


def _opened(home: Path, owned: ExitStack, clock: VirtualClock) -> tuple[Database, Ledger, KeyFolder]:
    # A file system in memory is allowed here and nowhere else: a simulated crash loses no page of it.
    database = open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE, allow_unsynced=True)
    owned.callback(database.close)
    ledger, erasable = Ledger(database, clock=clock.utc), KeyFolder(home / ERASABLE_FOLDER)
    check_home(database, erasable, has_entries=ledger.verify().seq > 0)
    return database, ledger, erasable
