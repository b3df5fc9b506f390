"""One round by hand: agents answer, talliers add up, the release is opened; no coordinator, no machine, no journal.

Benchmarks of single rounds use it, and tests compare the machines with it: it shares no rule with them but those of
the tally itself (labeler.tally).

A tallier as plainly as it can be written: an object with shares in memory, without machine, messages or journal.

    open: receive() until it is asked     (same share again: no change; another share: agent excluded)
      |  agree_on_contributors(): who is held by all talliers, with the same split
      v
    closed: aggregate_share(contributors) (same set again: same answer; another set: refused for ever)

Studies ask single rounds with it, and tests compare with it what the machine's talliers open (labeler.rounds.tallier),
whose rules it states a second time, in other words.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from labeler.errors import (
    DuplicateAgent,
    InvalidSetting,
    LateShare,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    WrongDigest,
)
from labeler.noise import noise_source
from labeler.randomness import KEY_BYTES
from labeler.release import Release, WinnerEngine, open_histogram, open_winner
from labeler.sharing import ShareVector
from labeler.tally import (
    MAX_TALLIERS,
    AggregateShare,
    BallotShare,
    InputShare,
    QueryBatch,
    Round,
    add_shares,
    misfit_of,
    round_of,
)
from labeler.task import Task
from tests.answering import AnsweringAgent


def run_round(
    task: Task,
    batch: QueryBatch,
    agents: Sequence[AnsweringAgent],
    *,
    post_charge: Callable[[frozenset[str]], object] = lambda _: None,
    winner_engine: WinnerEngine | None = None,
    tallier_keys: Sequence[bytes] | None = None,
) -> Release:
    """Ask every agent, add up at the talliers, open what the task releases.

    Args:
        task: the task.
        batch: the public queries.
        agents: those that take part; each keeps what it answers.
        post_charge: told the contributors, after the talliers agreed and before they open.
        winner_engine: how the talliers find the winner of each query; None adds the sums up in this process.
        tallier_keys: what each tallier draws its noise from, where talliers add it; drawn where absent.

    Raises:
        QuorumNotReached: too few agents; nothing was opened.
        BudgetExceeded: an agent refused.
        ProtocolViolation: ballots do not sum to what the task allows; nothing was opened, and the charge stands.
    """
    round = round_of(task, batch)
    keys: Sequence[bytes | None] = tallier_keys or [None] * task.talliers
    talliers = [Tallier(index, round, noise_key=keys[index]) for index in range(task.talliers)]
    for agent in agents:
        for tallier, share in zip(talliers, agent.answer(task, batch), strict=True):
            tallier.receive(share)
    contributors = agree_on_contributors(talliers)
    post_charge(contributors)
    sums = [tallier.aggregate_share(contributors) for tallier in talliers]
    if task.release == "histogram":
        return open_histogram(sums, task)
    return open_winner(sums, task, engine=winner_engine)


class Tallier:
    """One of the parties that each hold one share of every ballot, for one round; see the module.

    Args:
        index: which tallier this is, from 0.
        round: the round it sums.
        noise_key: what it draws its noise from, in a round in which talliers add it; drawn where absent.
        is_seeded: the key came from a known seed.

    Raises:
        InvalidSetting: the index is not 0, 1 or 2.
    """

    def __init__(self, index: int, round: Round, *, noise_key: bytes | None = None, is_seeded: bool = False) -> None:
        if not 0 <= index < MAX_TALLIERS:
            raise InvalidSetting(f"the index of a tallier must lie between 0 and {MAX_TALLIERS - 1}, found {index}")
        self._index = index
        self._round = round
        self._noise_key = secrets.token_bytes(KEY_BYTES) if noise_key is None else noise_key
        self._is_seeded = is_seeded
        self._shares: dict[str, ShareVector | BallotShare] = {}
        self._sharing_ids: dict[str, bytes] = {}
        self._fingerprints: dict[str, bytes] = {}
        self._excluded: set[str] = set()
        self._aggregate: AggregateShare | None = None

    @property
    def index(self) -> int:
        """Which tallier this is, from 0."""
        return self._index

    @property
    def round(self) -> Round:
        """The round this tallier sums."""
        return self._round

    @property
    def holdings(self) -> Mapping[str, bytes]:
        """The sharing_id of each agent that may contribute; after the sum, of those summed.

        Not secret: it says nothing about a ballot.
        """
        return MappingProxyType(self._sharing_ids)

    @property
    def contributors(self) -> frozenset[str]:
        """Agents of whom this tallier holds exactly one share; after the sum, those summed."""
        return frozenset(self._sharing_ids)

    def receive(self, input_share: InputShare) -> None:
        """Keep one agent's share. The same share again changes nothing, before and after the sum.

        An agent that sends a second, different share is excluded from the round here, and thereby
        everywhere: nobody can tell which one the other talliers hold, and adding halves of two splits
        would spoil the whole sum. Its shares are dropped.

        Raises:
            WrongDigest: the share belongs to another round.
            ProtocolViolation: it is meant for another tallier, or has another shape.
            LateShare: it comes after the sum was made, from an agent that had sent none before.
            DuplicateAgent: the agent has sent a different share before.
        """
        agent, share = input_share.agent_id, input_share.share
        if input_share.round_digest != self._round.digest:
            raise WrongDigest(
                f"a share of agent {agent!r} belongs to round {input_share.round_digest[:12]!r}, "
                f"this round is {self._round.digest[:12]!r}; task, batch and quorum must be the same for everybody"
            )
        if input_share.tallier != self._index:
            raise ProtocolViolation(
                f"a share of agent {agent!r} for tallier {input_share.tallier} reached tallier {self._index}"
            )
        misfit = misfit_of(share, self._round)
        if misfit:
            raise ProtocolViolation(f"a share of agent {agent!r} {misfit}")
        fingerprint = share.fingerprint()
        known = self._fingerprints.get(agent)
        if agent in self._excluded or (known is not None and known != fingerprint):
            if self._aggregate is None:
                self._excluded.add(agent)
                self._shares.pop(agent, None)
                self._sharing_ids.pop(agent, None)
            raise DuplicateAgent(
                f"agent {agent!r} sent tallier {self._index} two different shares in one round and is excluded "
                "from it, unless it was summed already; a retry must send the stored shares again, not new ones"
            )
        if known is not None:
            return
        if self._aggregate is not None:
            raise LateShare(
                f"the share of agent {agent!r} came after the sum of this round was made; it can take part in the next"
            )
        self._fingerprints[agent] = fingerprint
        self._shares[agent] = share
        self._sharing_ids[agent] = share.sharing_id

    def aggregate_share(self, contributors: Collection[str]) -> AggregateShare:
        """Add up the shares of exactly these agents, once per round.

        Args:
            contributors: what `agree_on_contributors` returned; at least the quorum.

        Returns:
            This tallier's share of the sum; the same object when asked again for the same agents.

        Raises:
            QuorumNotReached: fewer agents than the quorum.
            PrivacyRefusal: the round was summed before over other agents.
            ProtocolViolation: no share is held of one of them.
        """
        wanted = frozenset(contributors)
        if self._aggregate is not None:
            if wanted != self._aggregate.contributors:
                raise PrivacyRefusal(
                    f"tallier {self._index} has summed this round over another set of agents "
                    f"({len(self._aggregate.contributors)}, now asked for {len(wanted)}); two sums of one round "
                    "would differ by single ballots, so the second is refused for ever"
                )
            return self._aggregate
        _check_quorum(len(wanted), self._round)
        missing = wanted - self._shares.keys()
        if missing:
            raise ProtocolViolation(
                f"tallier {self._index} holds no share of {len(missing)} of the {len(wanted)} agents to sum, "
                f"among them {min(missing)!r}; agree on the contributors again"
            )
        noise = None
        if self._round.tallier_sigma_grid is not None:
            noise = noise_source(self._noise_key, self._round.digest, wanted, is_seeded=self._is_seeded)
        shares = {agent: self._shares[agent] for agent in wanted}
        self._aggregate = add_shares(self._index, self._round, shares, noise=noise)
        # Single shares have served; agreeing again, after a crash elsewhere, must find the set that was summed.
        self._shares.clear()
        self._sharing_ids = {agent: self._sharing_ids[agent] for agent in sorted(wanted)}
        return self._aggregate

    def __repr__(self) -> str:
        return f"Tallier(index={self._index}, round={self._round.digest[:12]!r}, agents={len(self._sharing_ids)})"


def agree_on_contributors(talliers: Sequence[Tallier]) -> frozenset[str]:
    """Find the agents whose shares of one split are held by every tallier: an agent counts at all or at none.

    Args:
        talliers: all talliers of the round, each once, in any order.

    Returns:
        The contributors, at least the quorum.

    Raises:
        QuorumNotReached: fewer agents than the quorum; nothing may be opened.
        ProtocolViolation: a tallier is missing or given twice.
        WrongDigest: the talliers sum different rounds.
    """
    if len(talliers) < 2 or sorted(tallier.index for tallier in talliers) != list(range(len(talliers))):
        raise ProtocolViolation("contributors are agreed on by all talliers of the round, each once")
    first = talliers[0]
    if any(tallier.round != first.round for tallier in talliers):
        raise WrongDigest("talliers of different rounds cannot agree on contributors")
    common = set(first.holdings.items())
    for tallier in talliers[1:]:
        common &= set(tallier.holdings.items())
    _check_quorum(len(common), first.round)
    return frozenset(agent for agent, _ in common)


def tallied(
    round: Round, sent: Sequence[Sequence[InputShare]], *, keys: Sequence[bytes | None] = (None, None, None)
) -> list[AggregateShare]:
    """Add up, at every tallier, the shares that each agent sent; `keys` are what talliers draw their noise from."""
    talliers = [Tallier(index, round, noise_key=keys[index]) for index in range(len(sent[0]))]
    for shares in sent:
        for tallier, share in zip(talliers, shares, strict=True):
            tallier.receive(share)
    contributors = agree_on_contributors(talliers)
    return [tallier.aggregate_share(contributors) for tallier in talliers]


def _check_quorum(count: int, round: Round) -> None:
    """Refuse a round of fewer agents than it promises the noise of.

    Raises:
        QuorumNotReached: see above.
    """
    if count < round.quorum:
        raise QuorumNotReached(
            f"{count} agents contributed, the quorum is {round.quorum}; nothing is opened, because the noise of "
            "fewer agents does not add up to what was promised. Wait for more agents, or start a new task."
        )
