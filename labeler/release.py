"""The release: what is opened of a round, and nothing else.

`open_histogram` puts the talliers' sums together and gives the noisy histogram. `open_winner` gives
only the class with most noisy votes of each query. Both are covered by the price of the histogram
(the winner is a function of it). A task names one of the two; the other is refused, because it was
not agreed to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.contribution import check_round, largest_sum
from labeler.errors import PrivacyRefusal, ProtocolViolation, QuorumNotReached, WrongDigest
from labeler.sharing import unshard
from labeler.tally import AggregateShare
from labeler.task import ReleaseKind, Task


@dataclass(frozen=True, eq=False)
class Release:
    """What a round made public. Safe to store and show: noise is in it, and it was paid for.

    Attributes:
        kind: histogram or winner.
        labels: int16, shape (num_queries,): the class with most noisy votes; among equals the lowest.
        noisy_votes: float64, shape (num_queries, num_classes), the noisy sums in votes; None for winner.
        contributors: the agents summed.
        is_seeded: True for a simulation: who knows a contributor's seed can subtract its noise, so the
            privacy guarantee does not hold. It must be shown wherever the labels are.
    """

    kind: ReleaseKind
    labels: NDArray[np.int16]
    noisy_votes: NDArray[np.float64] | None
    contributors: frozenset[str]
    is_seeded: bool

    def __post_init__(self) -> None:
        if (self.noisy_votes is not None) != (self.kind == "histogram"):
            raise PrivacyRefusal("a histogram release carries noisy votes, a winner release none")


class WinnerEngine(Protocol):
    """Finds the winner of each query from shares of the noisy sums."""

    def winners(self, shares: Sequence[NDArray[np.uint64]], *, largest: int) -> NDArray[np.int64]:
        """Return the lowest class with the largest sum, per query.

        Args:
            shares: one uint64 array per tallier, shape (num_queries, num_classes), in tallier order.
            largest: public bound on the magnitude of every sum, in grid units.

        Returns:
            Class numbers, shape (num_queries,).

        Raises:
            ProtocolViolation: a sum lies beyond the bound (where the engine can tell).
        """
        ...


class InProcessWinner:
    """Reference engine: **puts the noisy sums together inside this process**, then keeps only the winners.

    It computes what a secure computation among the talliers must compute, and is the twin to test one
    against. Whoever can read this process's memory sees the noisy histogram, for which the stated price holds too.
    """

    def winners(self, shares: Sequence[NDArray[np.uint64]], *, largest: int) -> NDArray[np.int64]:
        """See `WinnerEngine.winners`."""
        winners: NDArray[np.int64] = np.argmax(_open_sum(shares, largest), axis=1)
        return winners


def open_histogram(aggregate_shares: Sequence[AggregateShare], task: Task) -> Release:
    """Open the noisy sum of a round.

    Guarantee: the one the task's price states, with `task.sigma_votes` at least of noise per entry
    that nobody can subtract, provided that at most `task.colluding_agents` contributors pool what they
    know, not all talliers do, and each tallier sums a round once (labeler.tally).

    Args:
        aggregate_shares: one per tallier of the task, in any order.
        task: the task of the round.

    Raises:
        PrivacyRefusal: the task releases only winners.
        QuorumNotReached: fewer contributors than the task's quorum.
        WrongDigest: a share is of another round or task.
        ProtocolViolation: a tallier is missing or twice, talliers summed different agents or different
            shares, there are more contributors than the task has agents, or the sum is beyond what
            contributions can add up to.
    """
    _check_kind(task, "histogram")
    first = _check_shares(aggregate_shares, task)
    sums = _open_sum([share.words for share in aggregate_shares], largest_sum(task, len(first.contributors)))
    # The winner comes from the integers: dividing first could turn a lead of one unit into a tie.
    labels = np.argmax(sums, axis=1).astype(np.int16)
    return _release(task, aggregate_shares, labels, sums / np.float64(task.scale))


def open_winner(
    aggregate_shares: Sequence[AggregateShare], task: Task, *, engine: WinnerEngine | None = None
) -> Release:
    """Open the winner of each query and nothing else.

    Args:
        aggregate_shares: one per tallier of the task, in any order.
        task: the task of the round.
        engine: how the talliers find the winner; the in-process reference if None.

    Raises:
        PrivacyRefusal: the task releases the histogram.
        QuorumNotReached, WrongDigest, ProtocolViolation: as for `open_histogram`.
    """
    _check_kind(task, "winner")
    first = _check_shares(aggregate_shares, task)
    ordered = sorted(aggregate_shares, key=lambda share: share.tallier)
    engine = engine or InProcessWinner()
    winners = engine.winners([share.words for share in ordered], largest=largest_sum(task, len(first.contributors)))
    if winners.shape != (first.round.num_queries,) or winners.min() < 0 or winners.max() >= task.num_classes:
        raise ProtocolViolation("the winners that came back are not one class of the task per query")
    return _release(task, aggregate_shares, winners.astype(np.int16), None)


def _release(
    task: Task,
    aggregate_shares: Sequence[AggregateShare],
    labels: NDArray[np.int16],
    noisy_votes: NDArray[np.float64] | None,
) -> Release:
    return Release(
        kind=task.release,
        labels=labels,
        noisy_votes=noisy_votes,
        contributors=aggregate_shares[0].contributors,
        is_seeded=any(share.is_seeded for share in aggregate_shares),
    )


def _check_kind(task: Task, kind: ReleaseKind) -> None:
    if task.release != kind:
        raise PrivacyRefusal(f"this task releases the {task.release}; opening the {kind} was not agreed to")


def _check_shares(aggregate_shares: Sequence[AggregateShare], task: Task) -> AggregateShare:
    if sorted(share.tallier for share in aggregate_shares) != list(range(task.talliers)):
        raise ProtocolViolation(
            f"opening needs the sums of all {task.talliers} talliers, each once; found {len(aggregate_shares)}"
        )
    first = aggregate_shares[0]
    for share in aggregate_shares:
        check_round(share.round, task)
        if share.round != first.round:
            raise WrongDigest("the talliers' sums belong to different rounds")
        if share.contributors != first.contributors:
            raise ProtocolViolation("the talliers summed different agents; nothing can be opened")
        if share.sharings_digest != first.sharings_digest:
            raise ProtocolViolation("the talliers summed shares of different splits; nothing can be opened")
        if share.words.shape != (first.round.num_queries, first.round.num_classes):
            raise ProtocolViolation("a tallier's sum does not have the shape of the round")
    if len(first.contributors) < task.quorum:
        raise QuorumNotReached(f"{len(first.contributors)} agents were summed, the quorum is {task.quorum}")
    if len(first.contributors) > task.agents:
        raise ProtocolViolation(f"{len(first.contributors)} agents were summed, the task has {task.agents}")
    return first


def _open_sum(shares: Sequence[NDArray[np.uint64]], largest: int) -> NDArray[np.int64]:
    sums = unshard(shares)
    # A share that is damaged or of another split spreads the sum over all 64-bit words: seen here, almost surely.
    if sums.min() < -largest or sums.max() > largest:
        raise ProtocolViolation(
            "the opened sums lie beyond what contributions of this task can add up to, so a share was damaged or not "
            "made for this round; the round is void"
        )
    return sums
