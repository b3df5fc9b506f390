"""The rounds of one tallier: each stepped by its machine (labeler.rounds.tallier), with the shares it was sent.

A tallier's process uses this, and so does `labeler run`. `step` does the machine's memory and arithmetic, notes in
`changes` what has to be durable, and returns what is to be said once it is.

All of it may be lost at any moment; only the journal counts, and `clear` starts over from it. Shares are secret:
nothing here prints them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from labeler.errors import LabelerError, ProtocolViolation
from labeler.messages.bodies import OpenRound, share_from_bytes
from labeler.noise import noise_source
from labeler.rounds import tallier as machine
from labeler.rounds.tallier import Came, TallierEffect, TallierEvent, TallierRound, TallierSite
from labeler.sharing import ShareVector
from labeler.tally import AggregateShare, BallotShare, add_shares, misfit_of

if TYPE_CHECKING:
    # A run has talliers without a journal.
    from labeler.ledger.tallier_memory import TallierMemory

Share = ShareVector | BallotShare


@dataclass
class Changes:
    """Changes that must be durable before anything that `step` returned is said.

    Attributes:
        opened: rounds that are open now.
        held: the share of an agent in a round.
        excluded: agents of which no share of a round is taken any more.
        summed: of each sum: its agents, the agents whose shares were left out, and the sum itself.
    """

    opened: dict[str, OpenRound] = field(default_factory=dict)
    held: dict[tuple[str, str], Share] = field(default_factory=dict, repr=False)
    excluded: list[tuple[str, str]] = field(default_factory=list)
    summed: dict[str, tuple[frozenset[str], frozenset[str], AggregateShare]] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.opened or self.held or self.excluded or self.summed)


class TallierRounds:
    """The open rounds of a tallier; see the module. Used by one thread.

    Args:
        noise_key: what the noise of a round is drawn from, where talliers add it: the same at every call.
        is_seeded: such keys came from a known seed.
        agents: id and verify key of the agents that the site knows; None where it names none.
        journal: what is durable; None in a process that keeps nothing of a tallier.
    """

    def __init__(
        self,
        *,
        noise_key: Callable[[str], bytes],
        is_seeded: bool = False,
        agents: Mapping[str, str] | None = None,
        journal: TallierMemory | None = None,
    ) -> None:
        self._noise_key = noise_key
        self._is_seeded = is_seeded
        self._agents = agents
        self._journal = journal
        self._rounds: dict[str, TallierRound] | None = None
        self._shares: dict[str, dict[str, Share]] = {}
        self._open_bytes: dict[str, int] = {}
        self._ends: list[tuple[float, str]] = []
        self.changes = Changes()

    def clear(self) -> None:
        """Forget everything: memory may be ahead of the journal."""
        self._rounds = None
        self._shares.clear()
        self._open_bytes.clear()
        self._ends.clear()
        self.changes = Changes()

    def site(self) -> TallierSite:
        """The facts about this tallier, besides a round, that the machine needs."""
        return TallierSite(
            agents=self._agents,
            open_rounds=len(self._open_bytes),
            open_bytes=sum(self._open_bytes.values()),
            max_open_rounds=machine.MAX_OPEN_ROUNDS,
            max_open_bytes=machine.MAX_OPEN_BYTES,
        )

    def state(self, digest: str) -> TallierRound:
        """Return a round from memory, or else from the journal."""
        state = self._known().get(digest)
        if state is not None:
            return state
        # A forgotten round counts as known, so it is never opened again.
        known = self._journal is not None and self._journal.knows(digest)
        return self._load(digest) if known else TallierRound(digest)

    def take(self, digest: str, shares: Sequence[tuple[str, Share]], now: float) -> list[TallierEffect]:
        """Take the shares of these agents, in this order; return what is to be said of it.

        Args:
            now: unix time in seconds.
        """
        state = self.state(digest)
        if state.opening is None:
            raise ProtocolViolation("the round is unknown, so its shares are refused")
        round = state.opening.round
        came = tuple(
            # With noise from a known seed the round would be void once it is paid for; this agent alone is refused.
            Came(
                agent,
                share.sharing_id,
                share.fingerprint(),
                "says that its noise came from a known seed"
                if share.is_seeded and not self._is_seeded
                else misfit_of(share, round),
            )
            for agent, share in shares
        )
        return self.step(digest, machine.SharesCame(came), now, shares)

    def step(
        self, digest: str, event: TallierEvent, now: float, shares: Sequence[tuple[str, Share]] = ()
    ) -> list[TallierEffect]:
        """Step a round.

        Args:
            now: unix time in seconds.
            shares: those that an event is about.

        Returns:
            What is to be said once `changes` are durable.

        Raises:
            LabelerError: the shares cannot be added up.
        """
        before = self.state(digest)
        state, effects = machine.step(before, event, now)
        self._remember(state)
        told: list[TallierEffect] = []
        changes = self.changes
        for effect in effects:
            match effect:
                case machine.Keep(opening):
                    changes.opened[digest] = opening
                case machine.Hold(agent, place):
                    changes.held[digest, agent] = shares[place][1]
                    self._shares.setdefault(digest, {})[agent] = shares[place][1]
                case machine.Exclude(agent):
                    self._shares.get(digest, {}).pop(agent, None)
                    changes.held.pop((digest, agent), None)
                    changes.excluded.append((digest, agent))
                case machine.Add(contributors):
                    try:
                        self._add(state, contributors)
                    except LabelerError:
                        self._remember(before)  # its state already says that it is being summed
                        raise
                    told += self.step(digest, machine.Added(), now)
                case machine.Fix() | machine.Forget():
                    pass  # the sum is among the changes; what expired is dropped once that is durable
                case _:
                    told.append(effect)
        return told

    def expire(self, now: float) -> list[tuple[str, bool]]:
        """Expire rounds whose time is over by their machine; return each with whether it was summed.

        The caller drops them once that is durable.

        Args:
            now: unix time in seconds.
        """
        rounds = self._known()
        over: list[tuple[str, bool]] = []
        while self._ends and self._ends[0][0] < now:
            _, digest = heapq.heappop(self._ends)
            before = rounds.get(digest)
            if before is None:
                continue
            after, effects = machine.step(before, machine.RoundExpired(), now)
            if effects:
                rounds[digest] = after
                over.append((digest, before.stage == "fixed"))
            elif before.expires_at != float("inf"):
                heapq.heappush(self._ends, (before.expires_at, digest))
        return over

    def drop(self, digest: str) -> None:
        """Drop a round that is over."""
        self._known().pop(digest, None)
        self._shares.pop(digest, None)
        self._open_bytes.pop(digest, None)

    def _add(self, state: TallierRound, contributors: frozenset[str]) -> None:
        opening, digest = state.opening, state.round_digest
        if opening is None:
            raise ProtocolViolation("the round is unknown, so it is not summed")
        held = self._shares.get(digest, {})
        noise = None
        if opening.round.tallier_sigma_grid is not None:
            # A function of what is durable: killed before the sum is, this tallier draws the same again.
            noise = noise_source(self._noise_key(digest), digest, contributors, is_seeded=self._is_seeded)
        shares = {agent: held[agent] for agent in contributors}
        aggregate = add_shares(opening.tallier, opening.round, shares, noise=noise)
        self._shares.pop(digest, None)
        self.changes.summed[digest] = (contributors, frozenset(held) - contributors, aggregate)

    def _remember(self, state: TallierRound) -> None:
        digest = state.round_digest
        if state.stage == "unknown":
            return
        before = self._known().get(digest)
        self._known()[digest] = state
        if before is None or before.stage != state.stage:
            heapq.heappush(self._ends, (state.expires_at, digest))
            if state.stage == "open" and state.opening is not None:
                self._open_bytes[digest] = machine.most_bytes(state.opening)
            else:
                self._open_bytes.pop(digest, None)

    def _known(self) -> dict[str, TallierRound]:
        """Return every round that is kept, read from the journal where it is not in memory."""
        if self._rounds is None:
            self.clear()
            rounds: dict[str, TallierRound] = {}
            self._rounds = rounds
            for opening in () if self._journal is None else self._journal.open_rounds():
                self._load(opening.round.digest)
        return self._rounds

    def _load(self, digest: str) -> TallierRound:
        """Load a round from the journal."""
        assert self._journal is not None  # noqa: S101  # a tallier without a journal has every round in memory
        kept = self._journal.load(digest)
        is_fixed = kept.aggregate is not None
        state = TallierRound(
            digest,
            "forgotten" if kept.is_forgotten else "fixed" if is_fixed else "open",
            kept.opened,
            {
                agent: share.sharing_id
                for agent, share in kept.shares.items()
                if not is_fixed or agent in (kept.contributors or ())
            },
            kept.fingerprints,
            kept.excluded,
            kept.contributors,
        )
        round = kept.opened.round
        entries = round.num_queries * round.num_classes
        self._shares[digest] = {
            agent: share_from_bytes(share.data, max_entries=entries, terms=round.terms)
            for agent, share in kept.shares.items()
            if share.data is not None
        }
        if not kept.is_forgotten:
            self._remember(state)
        return state
