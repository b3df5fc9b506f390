"""The tally: what a round is, what an agent sends of its ballot, and how one tallier adds shares up.

Who may be summed, once and for ever, says the tallier's machine (labeler.rounds.tallier); here is the arithmetic.

In a winner round everything is added in the prime field of its terms (labeler.winner), so that talliers can
compute on the sums. Where rows of ballots have a known total, ballots and noise come as two sharings: the
tallier adds S * ballots + noise, and keeps what the rows of each agent sum to for the row check
(labeler.wellformed), after which alone anything may be opened.

What is not checked here: who sent a share (signatures), and whether a ballot is within bounds (shares
cannot be inspected; the agent checks, see labeler.contribution, and talliers check row totals).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.errors import (
    InvalidSetting,
    PrivacyRefusal,
    ProtocolViolation,
)
from labeler.field import PrimeField
from labeler.grid import MAX_SHARE_SIGMA_GRID, MIN_SHARE_SIGMA_GRID
from labeler.noise import DiscreteGaussian
from labeler.randomness import ByteSource
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
        quorum: fewest contributors for which anything is opened.
        terms: how talliers find the winners; None where the histogram is opened.
        tallier_sigma_grid: parameter of the noise that each tallier adds to each sum, grid units; None where the
            agents add the noise. Agents compare it with their task (`labeler.contribution.check_round`), so whoever
            tells a tallier of less noise tells it of another round, of which no agent sends a share.

    Raises:
        InvalidSetting: a digest is no SHA-256 in hexadecimal, or a number is below 1.
    """

    task_digest: str
    batch_digest: str
    num_queries: int
    num_classes: int
    quorum: int
    terms: WinnerTerms | None = None
    tallier_sigma_grid: float | None = None

    def __post_init__(self) -> None:
        for name in ("task_digest", "batch_digest"):
            if not _DIGEST.fullmatch(getattr(self, name)):
                raise InvalidSetting(f"{name} of a round must be 64 hexadecimal digits (SHA-256)")
        for name in ("num_queries", "num_classes", "quorum"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name} of a round must be at least 1, found {getattr(self, name)}")
        sigma = self.tallier_sigma_grid
        if sigma is not None and not MIN_SHARE_SIGMA_GRID <= sigma <= MAX_SHARE_SIGMA_GRID:
            raise InvalidSetting(
                f"the noise that talliers add has a parameter of {MIN_SHARE_SIGMA_GRID:g} to "
                f"{MAX_SHARE_SIGMA_GRID:,.0f} grid units, found {sigma:g}"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all fields, in hexadecimal."""
        fields: list[Any] = [
            self.task_digest, self.batch_digest, self.num_queries, self.num_classes, self.quorum,
        ]  # fmt: skip
        if self.terms is not None:
            fields.append(asdict(self.terms))
        if self.tallier_sigma_grid is not None:
            fields.append({"tallier_sigma_grid": float(self.tallier_sigma_grid)})
        return hashlib.sha256(b"labeler-round/1\n" + json.dumps(fields, sort_keys=True).encode()).hexdigest()


def round_of(task: Task, batch: QueryBatch) -> Round:
    """The round in which a task's batch is answered."""
    return round_with(task, batch.digest, len(batch))


def round_with(task: Task, batch_digest: str, num_queries: int) -> Round:
    """The same for a batch of which only its digest and size are at hand."""
    return Round(
        task_digest=task.digest,
        batch_digest=batch_digest,
        num_queries=num_queries,
        num_classes=task.num_classes,
        quorum=task.quorum,
        terms=task.winner_terms,
        tallier_sigma_grid=task.tallier_sigma_grid,
    )


@dataclass(frozen=True, eq=False)
class InputShare:
    """One agent's message to one tallier: its share of ballots plus noise, or of ballots and of noise.

    Attributes:
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
        contributors: the agents summed.
        sharings_digest: SHA-256 over (agent, sharing_id) of the contributors; equal at all talliers, or
            shares of different splits were summed.
        words: uint64, shape (num_queries, num_classes), read-only; residues in a winner round.
        is_seeded: True where any contributor's noise or masks came from a known seed, or this tallier's noise.
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


def add_shares(
    index: int, round: Round, shares: Mapping[str, ShareVector | BallotShare], *, noise: ByteSource | None = None
) -> AggregateShare:
    """One tallier's share of the sum over exactly these agents. Whether they may be summed decides the caller.

    Args:
        index: which tallier, from 0.
        round: the round; every share fits it (`misfit_of`).
        shares: agent id -> its share.
        noise: what this tallier draws its noise from (`labeler.tallier_noise.noise_source`), where the round says that
            talliers add it.

    Raises:
        PrivacyRefusal: talliers add the noise of this round, and nothing is given to draw it from; or it is given for a
            round in which they add none.
    """
    if (noise is None) != (round.tallier_sigma_grid is None):
        raise PrivacyRefusal(
            "a tallier adds noise in exactly those rounds that say so; nothing is summed without the noise that was "
            "promised"
        )
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
    if noise is not None and round.tallier_sigma_grid is not None:
        drawn = DiscreteGaussian(round.tallier_sigma_grid).sample(noise, total.shape)
        total = _sum(total, drawn.view(np.uint64) if field is None else field.encode(drawn), field)
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
        is_seeded=any(share.is_seeded for share in shares.values()) or (noise is not None and noise.is_seeded),
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


def _sharings_digest(sharings: Mapping[str, bytes]) -> str:
    pairs = sorted((agent, sharing_id.hex()) for agent, sharing_id in sharings.items())
    return hashlib.sha256(b"labeler-sharings/1\n" + json.dumps(pairs).encode()).hexdigest()
