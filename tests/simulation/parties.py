"""Agents and talliers of a simulated federation: the real ones, made as their processes make them.

Their journals lie in memory, which is allowed here and nowhere else: a simulated crash loses no page of it.

A turn is one poll and all that follows from it, by the very loop of the process (`workers.party.link.converse`).
Where the process would wait for the coordinator in the middle of its work, it tries again at once a few times. Then it
stops, and begins again from its home, as after a restart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from feature_store.shard import claim
from labeler.errors import LabelerError
from labeler.messages import Message
from tests.oracles.winner_reference import ReferenceEngine
from tests.simulation.contract import VirtualClock
from workers.agent.policy import Policy
from workers.agent.public_clock import PublicClock
from workers.agent.service import open_agent
from workers.party.coordinator import CoordinatorDoor
from workers.party.link import Handler, Outgoing, PartyLink, converse
from workers.tallier.service import open_tallier
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


def boot_agent(home: Path, *, door: CoordinatorDoor, policy: Callable[[], Policy], clock: VirtualClock) -> Party:
    """An agent as its process makes it from its home."""
    stop, owned = TurnStop(), ExitStack()
    link, driver, records = owned.enter_context(
        open_agent(
            home,
            stop=stop,
            clock=clock.utc,
            wait_s=0.0,
            ticks=clock.steady_s,
            read=policy,
            door=door,
            public_clock=PublicClock(
                tick_s=0.1, estimate_s=lambda _: 0.0, started=clock.steady_s, ticks=clock.steady_s
            ),
            journal=_journal_of(home.name),
            allow_unsynced=True,
        )
    )
    return Party(link, driver, stop, owned, records.look)


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
    """A tallier as its process makes it from its home."""
    stop, owned = TurnStop(), ExitStack()
    link, driver = owned.enter_context(
        open_tallier(
            home,
            stop=stop,
            clock=clock.utc,
            wait_s=0.0,
            door=door,
            winners_of=partial(PromptWinners, engine=room, patience_s=0.0),
            allow_unsynced=True,
        )
    )
    return Party(link, driver, stop, owned)
