"""The rounds of a tallier in memory, as its journal has them, with the shares it was sent and when each round ends.

All of it may be lost at any moment; only the journal counts, and `clear` begins anew from it. Shares are secret:
nothing here prints them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from labeler.ledger.tallier_memory import TallierMemory
from labeler.messages.bodies import share_from_bytes
from labeler.rounds import tallier as machine
from labeler.rounds.tallier import Site, TallierRound
from labeler.sharing import ShareVector
from labeler.tally import BallotShare

Share = ShareVector | BallotShare


class DeskMemory:
    """See the module. Used by one thread.

    Args:
        agents: id and verify key of the agents that the site knows; None where it names none.
    """

    def __init__(self, journal: TallierMemory, agents: Mapping[str, str] | None) -> None:
        self._journal = journal
        self._agents = agents
        self._rounds: dict[str, TallierRound] | None = None
        self._shares: dict[str, dict[str, Share]] = {}
        self._open_bytes: dict[str, int] = {}
        self._ends: list[tuple[float, str]] = []

    def clear(self) -> None:
        """Forget everything: it may be ahead of the journal."""
        self._rounds = None
        self._shares.clear()
        self._open_bytes.clear()
        self._ends.clear()

    def site(self) -> Site:
        """What the machine has to know of this tallier beside a round."""
        return Site(
            agents=self._agents,
            open_rounds=len(self._open_bytes),
            open_bytes=sum(self._open_bytes.values()),
            max_open_rounds=machine.MAX_OPEN_ROUNDS,
            max_open_bytes=machine.MAX_OPEN_BYTES,
        )

    def state(self, digest: str) -> TallierRound:
        """A round as it is in memory, or else as the journal has it."""
        state = self._known().get(digest)
        if state is None:
            # Also one that was forgotten is never opened again.
            return self._load(digest) if self._journal.knows(digest) else TallierRound(digest)
        return state

    def remember(self, state: TallierRound) -> None:
        """A round as its machine left it."""
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

    def hold(self, digest: str, agent: str, share: Share) -> None:
        """The share of an agent."""
        self._shares.setdefault(digest, {})[agent] = share

    def let_go(self, digest: str, agent: str) -> None:
        """An agent that is excluded has none."""
        self._shares.get(digest, {}).pop(agent, None)

    def take_shares(self, digest: str) -> dict[str, Share]:
        """All shares of a round, which are then no more in memory."""
        return self._shares.pop(digest, {})

    def expire(self, now: float) -> list[tuple[str, bool]]:
        """Rounds whose time is over by their machine; each with whether it was summed. Drop them once that is durable.

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
            after, effects = machine.step(before, machine.Expired(), now)
            if effects:
                rounds[digest] = after
                over.append((digest, before.stage == "fixed"))
            elif before.expires_at != float("inf"):
                heapq.heappush(self._ends, (before.expires_at, digest))
        return over

    def drop(self, digest: str) -> None:
        """A round that is over."""
        self._known().pop(digest, None)
        self._shares.pop(digest, None)
        self._open_bytes.pop(digest, None)

    def _known(self) -> dict[str, TallierRound]:
        """Every round that is kept, read from the journal where it is not in memory."""
        if self._rounds is None:
            self.clear()
            rounds: dict[str, TallierRound] = {}
            self._rounds = rounds
            for opening in self._journal.open_rounds():
                self._load(opening.round.digest)
        return self._rounds

    def _load(self, digest: str) -> TallierRound:
        """A round as the journal has it."""
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
            self.remember(state)
        return state
