"""The rounds and proposals of an agent in memory, or else as its journal has them; each steps by its machine.

All of it may be lost at any moment; only the journal counts.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from labeler.ledger.agent_rounds import JournalRounds
from labeler.ledger.database import Connection
from labeler.ledger.promises import PromiseStore
from labeler.messages.bodies import Proposal
from labeler.rounds import agent as machine
from labeler.rounds import agent_proposal as proposing
from labeler.rounds.agent import AgentRound, RoundEvent
from labeler.rounds.agent_proposal import AgentProposal, ProposalEvent
from workers.agent.desk_turn import DeskTurn

log = logging.getLogger("labeler.agent")

_ROUNDS_KEPT: Final = 10_000
"""Rounds whose stage is in memory; those of others are read from the journal."""


class DeskMemory:
    """See the module. Used by one thread.

    Args:
        ticks: seconds that only go up, for pauses.
    """

    def __init__(self, rounds: JournalRounds, promises: PromiseStore, ticks: Callable[[], float]) -> None:
        self._rounds = rounds
        self._promises = promises
        self._ticks = ticks
        self._states: OrderedDict[str, AgentRound] = OrderedDict()
        self._wakes: dict[str, float] = {}
        self.reader: Connection | None = None
        """One moment of the journal for all that is looked up while the mail is read."""

    def clear(self) -> None:
        """Forget everything: it may be ahead of the journal."""
        self._states.clear()
        self._wakes.clear()
        self.reader = None

    def state(self, round_digest: str) -> AgentRound:
        """A round as it is in memory, or else as the journal has it."""
        state = self._states.get(round_digest)
        if state is None:
            kept = self._rounds.kept(round_digest, connection=self.reader)
            state = AgentRound(round_digest) if kept is None else AgentRound(round_digest, kept.stage, kept.recipients)
        return state

    def forget(self, round_digest: str) -> None:
        """A round is what the journal says of it: nothing is under way."""
        self._states.pop(round_digest, None)

    def round_event(self, turn: DeskTurn, round_digest: str, event: RoundEvent) -> None:
        """Step a round; what it wants done goes into the turn."""
        before = self.state(round_digest)
        after, effects = machine.step(before, event, turn.now)
        self._states[round_digest] = after
        self._states.move_to_end(round_digest)
        for effect in effects:
            if isinstance(effect, machine.Wait):
                self._wakes[round_digest] = self._ticks() + effect.pause_s
            else:
                turn.rounds.append((round_digest, effect))
        self._trim()

    def wake(self, turn: DeskTurn) -> None:
        """Rounds whose pause is over try again."""
        for round_digest, moment in list(self._wakes.items()):
            if moment <= self._ticks():
                del self._wakes[round_digest]
                self._woken(turn, round_digest)

    def _woken(self, turn: DeskTurn, round_digest: str) -> None:
        waited = self.state(round_digest).ask is not None
        self.round_event(turn, round_digest, machine.Woken())
        if waited and self.state(round_digest).ask is None:
            log.error("the round is over, and was not answered", extra={"round_digest": round_digest})

    def _trim(self) -> None:
        """Forget the oldest rounds of which the journal knows everything."""
        while len(self._states) > _ROUNDS_KEPT:
            digest, state = self._states.popitem(last=False)
            if state.ask is not None or state.doing != "nothing":
                self._states[digest] = state
                return

    def proposal_event(self, turn: DeskTurn, proposal: Proposal, event: ProposalEvent) -> None:
        """Step a proposal, likewise."""
        state = turn.heard.get(proposal.digest)
        if state is None:
            answer = self._promises.said(proposal.digest, connection=self.reader)
            state = AgentProposal() if answer is None else AgentProposal(answer.answer, answer.until.timestamp())
        after, effects = proposing.step(state, event, turn.now)
        turn.heard[proposal.digest] = after
        turn.proposals += [(proposal, effect) for effect in effects]
