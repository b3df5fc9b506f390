"""An agent's contribution to a round: checked ballots on the grid, plus its noise share, split among the talliers.

This is the last place where anybody can see a ballot. Secret shares cannot be inspected later, so
the agent itself refuses ballots larger than its task allows: the price was computed for those bounds
and for nothing beyond.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.ball import project
from labeler.errors import InvalidSetting, PrivacyRefusal, WrongDigest
from labeler.methods.sensitivity import bounded_numbers, most_votes_in_a_sum, most_votes_per_cell
from labeler.noise import DiscreteGaussian, noise_share
from labeler.randomness import ByteSource
from labeler.sharing import split
from labeler.tally import InputShare, Round, split_ballots
from labeler.task import Task


def largest_sum(task: Task, num_contributors: int) -> int:
    """The largest magnitude, in grid units, of a noisy sum of a histogram over contributions that keep to the task."""
    traits = task.traits
    most = most_votes_in_a_sum(task) * task.scale if traits.counts else bounded_numbers(task).longest(task)
    if traits.has_local_noise:
        return num_contributors * most
    shares = num_contributors if task.noise_by == "agents" else task.talliers
    return num_contributors * most + shares * DiscreteGaussian(task.share_sigma_grid).reach


def check_ballots(ballots: NDArray[np.int64], task: Task) -> None:
    """Refuse ballots beyond what the task's price was computed for.

    Allowed are, per agent: knn, 0 to k votes per class and at most k per query (k t of attributes); ensemble, at
    most one vote per query; reverse-knn, where each record votes once at each of its k nearest queries, at most
    `max_agent_records` votes per query and k times as many in the batch, where the task has that bound;
    blind-average, weights whose norm is at most the learner's bound; aux-distill, at least 0, and at most 1 in a row.

    Args:
        ballots: counts of votes, shape (num_queries, num_classes); grid units where the method does not count.

    Raises:
        InvalidSetting: the array is not int64 of that shape, or has more queries than the task.
        PrivacyRefusal: an entry, a query or the batch exceeds its bound.
    """
    if ballots.dtype != np.int64 or ballots.ndim != 2 or ballots.shape[1] != task.num_classes:
        raise InvalidSetting(
            f"ballots must be int64 of shape (num_queries, {task.num_classes}); "
            f"found {ballots.dtype} of shape {ballots.shape}"
        )
    if not 1 <= len(ballots) <= task.max_queries:
        raise InvalidSetting(f"a batch of this task has 1 to {task.max_queries} queries, found {len(ballots)}")
    if not task.traits.counts:
        bounded_numbers(task).check(ballots, task)
        return
    most = most_votes_per_cell(task)
    # Entries first: only bounded entries can be summed without wrapping around.
    if ballots.min() < 0 or ballots.max() > most:
        raise PrivacyRefusal(f"a ballot holds a count outside 0 to {most}, which the price of this task does not cover")
    per_query = ballots.sum(axis=1)
    most *= task.votes_of_a_record
    if per_query.max() > most:
        raise PrivacyRefusal(
            f"a ballot casts more than {most} votes at one query, which this task's price does not cover"
        )
    if task.max_agent_records is not None:
        most_in_batch = task.max_agent_records * task.k
        if sum(per_query.tolist()) > most_in_batch:
            raise PrivacyRefusal(
                f"the ballots cast more than {most_in_batch} votes in one batch "
                f"({task.max_agent_records} records with {task.k} votes each); let fewer records vote"
            )


def clip_ballots(ballots: NDArray[np.int64], task: Task) -> NDArray[np.int64]:
    """Cut every count at `task.vote_clip`, where the task has one, so that every sum fits its field.

    A neighbouring data set gives no larger a difference after clipping than before: for any two counts
    |min(x, M) - min(y, M)| <= |x - y|, cell by cell, so the sum of squares does not grow and the price of the
    task holds (labeler.methods.reverse_knn). M is public: it follows from the task alone.

    Args:
        ballots: int64 counts that `check_ballots` accepts.

    Returns:
        The counts; the same array where nothing is clipped.
    """
    return ballots if task.vote_clip is None else np.minimum(ballots, np.int64(task.vote_clip))


def on_grid(ballots: NDArray[np.int64], task: Task) -> NDArray[np.int64]:
    """Checked counts as grid units: drawn onto the ball where the task has one (labeler.ball), clipped where it clips.

    Args:
        ballots: int64 counts that `check_ballots` accepts: the whole batch, shape (num_queries, num_classes).
    """
    if task.ballot_radius is None:
        return clip_ballots(ballots, task) * np.int64(task.scale)
    drawn = project(ballots, radius=task.ballot_radius, scale=task.scale)
    if task.vote_clip is None:
        return drawn
    most = np.int64(task.vote_clip * task.scale)
    return np.clip(drawn, -most, most)


def contribution(ballots: NDArray[np.int64], task: Task, *, source: ByteSource) -> NDArray[np.int64]:
    """Check ballots, bring them to the grid (`on_grid`) and add this agent's noise share: S * ballots + noise.

    Numbers of methods that do not count are on the grid already. Where the agent's own noise is in them, none is added,
    nor where the talliers add it: then what is returned is the bare ballot, which must leave in secret shares alone.

    Noise is added to every entry, whatever the ballots are. The noise depends on the source alone, so
    one source must never serve two different ballots: the two results would differ by the ballots'
    difference in clear. Derive the source from the digests of task and batch, store what was sent, and
    on a retry send that.

    Args:
        ballots: int64 counts, shape (num_queries, num_classes); see `check_ballots`.
        source: the agent's secret source for this batch.

    Returns:
        Grid units, int64, shape (num_queries, num_classes). Secret: one noise share alone protects too little.

    Raises:
        InvalidSetting: wrong type, shape or number of queries.
        PrivacyRefusal: ballots beyond the task's bounds.
    """
    check_ballots(ballots, task)
    if task.traits.has_local_noise:
        return ballots
    numbers = on_grid(ballots, task) if task.traits.counts else ballots
    return numbers if task.noise_by == "talliers" else numbers + noise_share(task, source, len(ballots))


def input_shares(
    ballots: NDArray[np.int64], task: Task, round: Round, *, agent_id: str, source: ByteSource
) -> tuple[InputShare, ...]:
    """Everything an agent sends in one round: one input share per tallier.

    Where talliers check rows (the round's terms have a row total), ballots and noise are shared apart: the sums
    are those of `contribution` all the same, S * ballots + noise with the same noise.

    Equal arguments and an equal source give equal shares, so a retry counts once. Whether the source
    is seeded travels with the shares into the release.

    Args:
        ballots: int64 counts, shape (num_queries, num_classes).
        round: the round; it must be of this task.
        source: the agent's secret source for this round, at its beginning.

    Raises:
        WrongDigest: the round is of another task, or of another number of queries, classes or agents.
        InvalidSetting: wrong type, shape or number of queries.
        PrivacyRefusal: ballots beyond the task's bounds.
    """
    check_round(round, task)
    if len(ballots) != round.num_queries:
        raise WrongDigest(f"ballots are for {len(ballots)} queries, the round has {round.num_queries}")
    terms = round.terms
    if terms is None or terms.row_total is None:
        values = contribution(ballots, task, source=source)
        field = None if terms is None else terms.field
        shares = split(values, num_talliers=task.talliers, source=source, field=field)
        return tuple(InputShare(agent_id, tallier, round.digest, share) for tallier, share in enumerate(shares))
    check_ballots(ballots, task)
    # Where the talliers add the noise, zeros are shared in its place.
    noise = np.zeros_like(ballots) if task.noise_by == "talliers" else noise_share(task, source, len(ballots))
    apart = split_ballots(
        ballots, noise, row_total=terms.row_total, num_talliers=task.talliers, source=source, field=terms.field
    )
    return tuple(InputShare(agent_id, tallier, round.digest, share) for tallier, share in enumerate(apart))


def check_round(round: Round, task: Task) -> None:
    """Refuse a round that is not of this task.

    Raises:
        WrongDigest: digest, classes, quorum, terms of the winner or the talliers' noise differ from the task's.
    """
    expected = (task.digest, task.num_classes, task.quorum)
    if (round.task_digest, round.num_classes, round.quorum) != expected:
        raise WrongDigest(
            f"the round is of task {round.task_digest[:12]!r} with {round.num_classes} classes and quorum "
            f"{round.quorum}; expected {task.digest[:12]!r}, {task.num_classes} and {task.quorum}"
        )
    if round.terms != task.winner_terms:
        raise WrongDigest(f"the round states other terms of the winner than its task {task.digest[:12]!r} has")
    if round.tallier_sigma_grid != task.tallier_sigma_grid:
        raise WrongDigest(f"the round states other noise of the talliers than its task {task.digest[:12]!r} has")
