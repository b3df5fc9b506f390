"""What one turn of an agent's driver has still to do, and the letters that it has come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from labeler.ledger.lifetimes import CastVotes
from labeler.messages import Header
from labeler.messages.bodies import Ask, Proposal
from labeler.rounds.agent import RoundEffect
from labeler.rounds.agent_proposal import AgentProposal, ProposalEffect
from workers.agent.agent import Agent
from workers.party.mail import Draft


class Records(Protocol):
    """The agent over its shard as it is now."""

    def agent(self) -> Agent:
        """Over the shard as it was opened last: nothing is opened because somebody asks."""
        ...

    def forget_models(self) -> None:
        """Forget what was trained so far."""
        ...


@dataclass(frozen=True)
class OutgoingLetter:
    """Drafts that are taken together, and what the log says once they are."""

    drafts: tuple[Draft, ...]
    taken: str
    about: Mapping[str, str]


@dataclass
class DeskTurn:
    """What is still to be done in one turn, in the order in which it came.

    Attributes:
        now: unix time in seconds.
        started: when its poll returned, in seconds that only go up.
        planned_s: until when what it computes from records is planned to be done, counted from `started`; None where
            it computes nothing.
        admitted_s: what is planned for all that was admitted so far and is still to be computed.
        not_before, most_left_s: before when a stored answer that it sends may not leave (KeptAnswer).
    """

    now: float
    started: float = 0.0
    planned_s: float | None = None
    admitted_s: float = 0.0
    not_before: float = 0.0
    most_left_s: float = 0.0
    rounds: list[tuple[str, RoundEffect]] = field(default_factory=list)
    proposals: list[tuple[Proposal, ProposalEffect]] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    heard: dict[str, AgentProposal] = field(default_factory=dict)
    letters: list[OutgoingLetter] = field(default_factory=list)
    over: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    headers: dict[str, Header] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    stored: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    cast: dict[str, CastVotes] = field(default_factory=dict)

    def pop(self, *kinds: type) -> list[tuple[str, Any]]:
        """The round effects of these kinds, taken off the list."""
        found = [one for one in self.rounds if isinstance(one[1], kinds)]
        self.rounds = [one for one in self.rounds if not isinstance(one[1], kinds)]
        return found

    def pop_proposals(self, *kinds: type) -> list[tuple[Proposal, Any]]:
        """The proposal effects of these kinds, taken off the list."""
        found = [one for one in self.proposals if isinstance(one[1], kinds)]
        self.proposals = [one for one in self.proposals if not isinstance(one[1], kinds)]
        return found
