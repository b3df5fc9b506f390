"""The tally: each tallier adds up its shares of one round, over contributors all talliers agree on, once.

    agent      input shares, one per tallier, of one split ------------------------+
                                                                                   v
    tallier    open: receive() until the coordinator asks            (same share again: no change;
                 |                                                     another share: agent excluded)
                 |  agree_on_contributors(): who is held by all talliers, with the same split
                 v
               closed: aggregate_share(contributors)                 (same set again: same answer;
                                                                       another set: refused for ever)

Why a round is summed once: sums over two contributor sets of one round differ by single ballots with
the same noise shares, so whoever saw both could subtract. A tallier therefore answers for one set and
refuses any other. It keeps this in memory; a process that may restart must keep it durably, before it
answers, and goes on with `Tallier.resume`.

In a winner round everything is added in the prime field of its terms (labeler.winner), so that talliers can
compute on the sums. Where rows of ballots have a known total, ballots and noise come as two sharings: the
tallier adds S * ballots + noise, and keeps what the rows of each agent sum to for the row check
(labeler.wellformed), after which alone anything may be opened.

What is not checked here: who sent a share (signatures), and whether a ballot is within bounds (shares
cannot be inspected; the agent checks, see labeler.contribution, and talliers check row totals).

More than 400 lines: the rules of one role, most of them refusals with their sentences.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.errors import (
    BadData,
    DuplicateAgent,
    InvalidSetting,
    LateShare,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    WrongDigest,
)
from labeler.field import PrimeField
from labeler.sharing import ShareVector
from labeler.task import Task
from labeler.wellformed import BallotShare, row_sums
from labeler.winner import Winner, WinnerTerms

MAX_TALLIERS = 3

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Round:
    """One batch of one task, asked of all agents; its digest ties every message to it.

    Attributes:
        task_digest: of the task (SHA-256, hexadecimal); it fixes k, sigma, scale, classes and parties.
        batch_digest: of the batch of queries (SHA-256, hexadecimal).
        num_queries: queries in the batch.
        num_classes: classes of the task.
        quorum: fewest contributors for which anything is opened.
        terms: how talliers find the winners; None where the histogram is opened.

    Raises:
        InvalidSetting: a digest is no SHA-256 in hexadecimal, or a number is below 1.
    """

    task_digest: str
    batch_digest: str
    num_queries: int
    num_classes: int
    quorum: int
    terms: WinnerTerms | None = None

    def __post_init__(self) -> None:
        for name in ("task_digest", "batch_digest"):
            if not _DIGEST.fullmatch(getattr(self, name)):
                raise InvalidSetting(f"{name} of a round must be 64 hexadecimal digits (SHA-256)")
        for name in ("num_queries", "num_classes", "quorum"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name} of a round must be at least 1, found {getattr(self, name)}")

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all fields, in hexadecimal."""
        fields: list[Any] = [
            self.task_digest, self.batch_digest, self.num_queries, self.num_classes, self.quorum,
        ]  # fmt: skip
        if self.terms is not None:
            fields.append(asdict(self.terms))
        return hashlib.sha256(b"labeler-round/1\n" + json.dumps(fields, sort_keys=True).encode()).hexdigest()


def round_of(task: Task, batch: QueryBatch) -> Round:
    """The round in which a task's batch is answered."""
    return Round(task.digest, batch.digest, len(batch), task.num_classes, task.quorum, task.winner_terms)


@dataclass(frozen=True, eq=False)
class InputShare:
    """One agent's message to one tallier: its share of ballots plus noise, or of ballots and of noise.

    Attributes:
        agent_id: who contributes.
        tallier: index of the tallier it is for, from 0.
        round_digest: the round it belongs to.
        share: the secret share, shape (num_queries, num_classes); of both apart where the round's terms have a
            row total.
    """

    agent_id: str
    tallier: int
    round_digest: str
    share: ShareVector | BallotShare

    def __post_init__(self) -> None:
        if not 1 <= len(self.agent_id) <= 200:
            raise ProtocolViolation(f"an agent_id has 1 to 200 characters, found {len(self.agent_id)}")


@dataclass(frozen=True, eq=False, repr=False)
class AggregateShare:
    """One tallier's share of the noisy sum over the contributors. Secret until all are put together; does not print.

    Attributes:
        tallier: index of the tallier.
        round: the round summed.
        contributors: the agents summed.
        sharings_digest: SHA-256 over (agent, sharing_id) of the contributors; equal at all talliers, or
            shares of different splits were summed.
        words: uint64, shape (num_queries, num_classes), read-only; residues in a winner round.
        is_seeded: True where any contributor's noise or masks came from a known seed.
        row_sums: of each contributor (sorted) what the rows of its ballots sum to at this tallier, uint64
            residues, shape (contributors, num_queries), read-only; tallier 0 has subtracted the row total, so
            that those of all talliers add up to zero. None where rows are not checked.
    """

    tallier: int
    round: Round
    contributors: frozenset[str]
    sharings_digest: str
    words: NDArray[np.uint64]
    is_seeded: bool
    row_sums: NDArray[np.uint64] | None = None

    @cached_property
    def agreement(self) -> str:
        """SHA-256 over round, contributors and their sharings, in hexadecimal: what talliers compare before a winner.

        The round's digest covers task, batch and terms, so equal agreements mean shares of one sum and one rule.
        """
        content = [self.round.digest, sorted(self.contributors), self.sharings_digest]
        return hashlib.sha256(b"labeler-agreement/1\n" + json.dumps(content).encode()).hexdigest()

    def winner(self, labels: NDArray[np.int16]) -> Winner:
        """This tallier's answer, once the talliers have opened the labels of this sum."""
        return Winner(
            tallier=self.tallier,
            round_digest=self.round.digest,
            contributors=self.contributors,
            sharings_digest=self.sharings_digest,
            labels=labels,
            is_seeded=self.is_seeded,
        )

    def __repr__(self) -> str:
        return f"AggregateShare(tallier={self.tallier}, contributors={len(self.contributors)}, <redacted>)"


class ShareHolder(Protocol):
    """What agreeing on contributors needs to know of a tallier, near or far."""

    @property
    def index(self) -> int: ...

    @property
    def round(self) -> Round: ...

    @property
    def holdings(self) -> Mapping[str, bytes]: ...


class Tallier:
    """One of the parties that each hold one share of every ballot, for one round; see the module.

    Args:
        index: which tallier this is, from 0.
        round: the round it sums.

    Raises:
        InvalidSetting: the index is not 0, 1 or 2.
    """

    def __init__(self, index: int, round: Round) -> None:
        if not 0 <= index < MAX_TALLIERS:
            raise InvalidSetting(f"the index of a tallier must lie between 0 and {MAX_TALLIERS - 1}, found {index}")
        self._index = index
        self._round = round
        self._shares: dict[str, ShareVector | BallotShare] = {}
        self._sharing_ids: dict[str, bytes] = {}
        self._fingerprints: dict[str, bytes] = {}
        self._excluded: set[str] = set()
        self._aggregate: AggregateShare | None = None

    @classmethod
    def resume(
        cls,
        index: int,
        round: Round,
        *,
        shares: Mapping[str, ShareVector | BallotShare],
        excluded: Collection[str],
        aggregate: AggregateShare | None,
        sharing_ids: Mapping[str, bytes] | None,
        fingerprints: Mapping[str, bytes] | None = None,
    ) -> Tallier:
        """The tallier that died, from what it had kept: it answers every message as that one would have.

        Args:
            index: which tallier it was.
            round: the round it summed.
            shares: of each agent from which it took one; may be empty once the sum is made.
            excluded: agents that had sent two different shares.
            aggregate: the sum, if it was made.
            sharing_ids: of each agent summed, where its share was not kept; None for those of `shares`.
            fingerprints: `ShareVector.fingerprint` of every share ever taken whose share was not kept, so that a
                retry of it is told from a share that is late or different; None for those of `shares`.

        Raises:
            BadData: these do not belong to one tallier of one round.
            InvalidSetting: the index is not 0, 1 or 2.
        """
        tallier = cls(index, round)
        tallier._excluded = set(excluded)
        held = {agent: share for agent, share in shares.items() if agent not in tallier._excluded}
        if any(misfit_of(share, round) for share in held.values()):
            raise BadData("a share that a tallier kept does not have the shape of its round")
        tallier._fingerprints = _merge({agent: share.fingerprint() for agent, share in held.items()}, fingerprints)
        known_ids = _merge({agent: share.sharing_id for agent, share in held.items()}, sharing_ids)
        if aggregate is None:
            if (tallier._fingerprints.keys() | known_ids.keys()) - held.keys() - tallier._excluded:
                raise BadData("a tallier has lost a share of a round that is not summed yet; the round cannot go on")
            tallier._shares = held
            tallier._sharing_ids = {agent: share.sharing_id for agent, share in held.items()}
            return tallier
        summed = {agent: known_ids.get(agent, b"") for agent in sorted(aggregate.contributors)}
        if (aggregate.tallier, aggregate.round, aggregate.sharings_digest) != (index, round, _sharings_digest(summed)):
            raise BadData("the sum that a tallier kept is of another tallier, round or set of shares")
        if aggregate.contributors & tallier._excluded:
            raise BadData("a tallier has summed an agent that it had excluded")
        tallier._aggregate, tallier._sharing_ids = aggregate, summed
        return tallier

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
        self._aggregate = add_shares(self._index, self._round, {agent: self._shares[agent] for agent in wanted})
        # Single shares have served; agreeing again, after a crash elsewhere, must find the set that was summed.
        self._shares.clear()
        self._sharing_ids = {agent: self._sharing_ids[agent] for agent in sorted(wanted)}
        return self._aggregate

    def __repr__(self) -> str:
        return f"Tallier(index={self._index}, round={self._round.digest[:12]!r}, agents={len(self._sharing_ids)})"


def agree_on_contributors(talliers: Sequence[ShareHolder]) -> frozenset[str]:
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


def add_shares(index: int, round: Round, shares: Mapping[str, ShareVector | BallotShare]) -> AggregateShare:
    """One tallier's share of the sum over exactly these agents. Whether they may be summed decides the caller.

    Args:
        index: which tallier, from 0.
        round: the round; every share fits it (`misfit_of`).
        shares: agent id -> its share.
    """
    terms = round.terms
    field = None if terms is None else terms.field
    total = np.zeros((round.num_queries, round.num_classes), dtype=np.uint64)
    votes, sums = total.copy(), []
    for agent in sorted(shares):
        share = shares[agent]
        if isinstance(share, BallotShare) and field is not None:
            ballots = share.ballots.expand()
            votes = field.add(votes, ballots[:, :-1])
            sums.append(row_sums(ballots, field))
            total = field.add(total, share.noise.expand())
        elif isinstance(share, ShareVector):
            total = _sum(total, share.expand(), field)
    rows = None
    if terms is not None and terms.row_total is not None:
        total = terms.field.add(total, terms.field.times(votes, terms.scale))
        rows = np.stack(sums)
        if index == 0:
            rows = terms.field.subtract(rows, np.full_like(rows, terms.row_total))
        rows.setflags(write=False)
    total.setflags(write=False)
    return AggregateShare(
        tallier=index,
        round=round,
        contributors=frozenset(shares),
        sharings_digest=_sharings_digest({agent: share.sharing_id for agent, share in shares.items()}),
        words=total,
        is_seeded=any(share.is_seeded for share in shares.values()),
        row_sums=rows,
    )


def misfit_of(share: ShareVector | BallotShare, round: Round) -> str:
    """Why a share cannot be one of this round; empty where it can."""
    terms, expected = round.terms, (round.num_queries, round.num_classes)
    if share.shape != expected:
        return f"has shape {share.shape}, the round's is {expected}"
    if share.field != (None if terms is None else terms.field):
        return "is not shared where the round adds up: modulo 2^64 for a histogram, in a prime field for the winner"
    if isinstance(share, BallotShare) != (terms is not None and terms.row_total is not None):
        return "must hold ballots and noise apart where the round checks rows, and together where it does not"
    return ""


def _sum(one: NDArray[np.uint64], other: NDArray[np.uint64], field: PrimeField | None) -> NDArray[np.uint64]:
    return one + other if field is None else field.add(one, other)


def _check_quorum(count: int, round: Round) -> None:
    if count < round.quorum:
        raise QuorumNotReached(
            f"{count} agents contributed, the quorum is {round.quorum}; nothing is opened, because the noise of "
            "fewer agents does not add up to what was promised. Wait for more agents, or start a new task."
        )


def _merge(held: Mapping[str, bytes], kept: Mapping[str, bytes] | None) -> dict[str, bytes]:
    kept = kept or {}
    if any(kept.get(agent, value) != value for agent, value in held.items()):
        raise BadData("a share that a tallier kept is not the one it had taken")
    return {**kept, **held}


def _sharings_digest(sharings: Mapping[str, bytes]) -> str:
    pairs = sorted((agent, sharing_id.hex()) for agent, sharing_id in sharings.items())
    return hashlib.sha256(b"labeler-sharings/1\n" + json.dumps(pairs).encode()).hexdigest()
